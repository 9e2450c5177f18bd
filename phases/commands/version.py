"""`ladder --version`."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGE = "inference-ladder"


def version(package: str = PACKAGE) -> str:
    """Return a package's version; a checkout that is not installed has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def line() -> str:
    """Return what a report of a defect begins with."""
    return f"ladder {version()}, torch {version('torch')}, Python {platform.python_version()}"

"""Paths of the files that this project makes outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import UserError


def cache_home() -> Path:
    """Return the folder of the models: `$LADDER_HOME`, or `~/.cache/inference-ladder`."""
    return expand("LADDER_HOME", os.environ.get("LADDER_HOME") or "~/.cache/inference-ladder")


def expand(name: str, path: str | Path) -> Path:
    """`path` with a leading `~` or `~person` replaced; `name` is what the person gave it as.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{name} is {str(path)!r}, but that home folder is not known here"
        ) from None

"""Where this project keeps what it makes outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Where models are kept: `$LADDER_HOME`, or `~/.cache/inference-ladder`."""
    home = os.environ.get("LADDER_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "inference-ladder"

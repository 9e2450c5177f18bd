"""Temporary folders whose names say which process made them, so that a killed one's can be swept."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

_NAME = re.compile(r"ladder-(\d+)-\w+")


def new_folder() -> str:
    """Make a folder of this process, and remove those of processes of this user that have died."""
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob("ladder-*"):
        found = _NAME.fullmatch(folder.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)  # another user's stays: it cannot be removed
    return tempfile.mkdtemp(prefix=f"ladder-{os.getpid()}-")

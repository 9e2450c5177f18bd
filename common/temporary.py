"""Temporary folders and files that are deleted in any case: by their process, or by the next one.

A process that is killed deletes nothing. The system then releases its locks, so the next process deletes
what no process has locked. Process ids would not do: containers that share a folder count their own.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

NAME = re.compile(r"inference-ladder-\d+-[a-z0-9_]{8}")
"""The name of a temporary folder: no other folder that a user has is called so."""
_locks: dict[Path, int] = {}
"""Folders of this process -> descriptors that hold their locks."""


def temporary_folder() -> Path:
    """Create and return a folder that only this user may enter.

    It is deleted when the process ends, or by `delete_folder`.

    Raises:
        OSError: it cannot be created.
    """
    sweep(_temporary_folders())
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"inference-ladder-{os.getpid()}-"))
        lock = lock_path(folder)
        if lock is not None and folder.exists():  # not swept before it was locked
            _locks[folder] = lock
            return folder


def delete_folder(folder: Path) -> None:
    """Delete a folder that `temporary_folder` made, and release its lock."""
    lock = _locks.pop(folder, None)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def lock_path(path: Path, *, wait: bool = True) -> int | None:
    """Lock a file or a folder until the returned descriptor is closed or the process ends.

    wait: True: wait until another process unlocks it.

    Returns:
        A descriptor; None if there is no such path, or another process has locked it and `wait` is False.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if not wait:
            os.close(descriptor)
            return None
        # A file system without locks: no process can lock it, so none sweeps it.
    return descriptor


def _temporary_folders() -> list[Path]:
    """Return the temporary folders of all processes, running or ended."""
    return [
        path for path in Path(tempfile.gettempdir()).iterdir() if NAME.fullmatch(path.name)
    ]


def sweep(paths: Iterable[Path]) -> None:
    """Delete the files and folders among `paths` that belong to this user and are not locked by a process."""
    for path in paths:
        with suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            lock = lock_path(path, wait=False)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                os.close(lock)


@atexit.register
def _delete_all() -> None:
    """Delete the temporary folders of this process, and those of processes that were killed."""
    for folder in list(_locks):
        delete_folder(folder)
    with suppress(OSError):
        sweep(_temporary_folders())

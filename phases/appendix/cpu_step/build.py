"""Compile a shared library once, and load it from the cache folder.

A library of another user would run as this user. So one is loaded only from a folder that no other user can
write. It is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

from common.console import err
from common.errors import UserError
from common.files import whole
from common.paths import cache_home
from common.temporary import delete_folder, temporary_folder

PATIENCE = 60.0
"""Seconds that a compiler may take."""


def load_library(source: Path, compiler: Sequence[str]) -> CDLL:
    """Return a C++ library from the cache folder; compile it from `source` if no valid one is there.

    Its file name depends on source, compiler, and what `-march=native` means on this machine. Where the
    folder cannot be trusted or written, the library is compiled each time, and a line on standard error
    says so.

    Args:
        compiler: command and flags, without source and output.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be compiled, or not within `PATIENCE` seconds.
    """
    native = _run([*compiler, "-E", "-###", os.devnull])
    key = hashlib.sha256(source.read_bytes() + native).hexdigest()[:16]
    path = cache_home() / "compiled" / f"{source.stem}-{key}.so"
    reason = _prepare(path.parent)
    if not reason:
        with suppress(OSError):  # there is none yet, or the file is no library
            if not may_be_written_by_others(path):
                return CDLL(str(path))
    folder = temporary_folder()
    try:
        made = folder / path.name
        _run([*compiler, str(source), "-o", str(made)])
        try:
            if not reason:
                with whole(path) as scratch:
                    shutil.copyfile(made, scratch)
                    scratch.chmod(0o600)
        except UserError as error:
            reason = str(error)
        if reason:
            err.print(
                f"{source.name} is compiled at every start: {reason}",
                markup=False,
                soft_wrap=True,
            )
        return CDLL(str(made))
    finally:
        delete_folder(folder)  # what is loaded stays


def _run(command: Sequence[str]) -> bytes:
    """Run a command and return its standard error; kill it and its children after `PATIENCE` seconds."""
    nothing = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            said = process.communicate(timeout=PATIENCE)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(
            f"{command[0]} ends with code {process.returncode}: {last}"
        )
    return said


def _prepare(folder: Path) -> str:
    """Create the cache folder; return why it must not be used, or an empty string."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        for place in (folder, *folder.parents):
            if may_be_written_by_others(place, inside=place is folder):
                return f"others can write {place}"
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    return ""


def may_be_written_by_others(path: Path, *, inside: bool = True) -> bool:
    """Return True if another user than this one and root can replace a file at `path`, or in it.

    inside: True: any file in the folder counts. False: only this user's folders in it, which the sticky bit
        of `/tmp` protects; and a group of the user's own number has no other member.
    """
    found = path.stat()
    user = os.geteuid()
    if found.st_uid not in (0, user):
        return True
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not inside and (found.st_mode & stat.S_ISVTX):
        return False
    if not inside and found.st_gid == user != 0:
        others &= ~stat.S_IWGRP
    return bool(others)

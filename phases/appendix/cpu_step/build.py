"""Compile a shared library once, and load it from the cache folder as long as the file is unchanged.

A damaged library ends the process that loads it, and a library of another user would run as this user. So a
file is loaded only from a folder that no other user can write, and only if its SHA-256 is the one recorded
beside it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
from collections.abc import Sequence
from ctypes import CDLL
from pathlib import Path

from common.console import err
from common.errors import UserError
from common.files import read_bytes, whole
from common.paths import cache_home
from common.temporary import delete_folder, sweep, temporary_folder

PATIENCE = 60.0
"""Seconds that a compiler may take."""
MOST_BYTES = 1 << 26
"""Of a library; a larger file is not what was compiled, and is not read."""
MOST_RECORD_BYTES = 1 << 10
"""Of the file beside it, which has a size and a SHA-256."""


def load_library(source: Path, compiler: Sequence[str]) -> CDLL:
    """Return a C++ library (`CDLL`) from the cache folder; compile it from `source` if no valid one is there.

    Its file name depends on the source, the compiler, and what `-march=native` means on this machine. Where
    the folder cannot be trusted or written, the library is compiled each time, and a line on standard error
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
    image = None if reason else _read(path)
    folder = temporary_folder()
    try:
        made = folder / path.name
        if image is not None:
            made.write_bytes(image)
        else:
            _run([*compiler, str(source), "-o", str(made)])
            reason = reason or _store(made.read_bytes(), path)
        if reason:
            err.print(
                f"{source.name} is compiled at every start: {reason}",
                markup=False,
                soft_wrap=True,
            )
        # A copy: a change of the file in the cache would end this process.
        return CDLL(str(made))
    finally:
        delete_folder(folder)  # what is loaded stays


def _run(command: Sequence[str]) -> bytes:
    """Run a command and return its standard error; kill it and its children after `PATIENCE` seconds.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or takes too long.
    """
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
    """Create the cache folder, and delete files that killed processes have left in it.

    Returns:
        Why the folder must not be used; an empty string if it may be.
    """
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        for place in (folder, *folder.parents):
            if may_be_written_by_others(place, inside=place is folder):
                return f"others can write {place}"
        sweep(folder.glob("*.[0-9]*"))
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror}"
    return ""


def may_be_written_by_others(path: Path, *, inside: bool = True) -> bool:
    """Return True if another user, except root, could replace the file or folder `path`.

    inside: True: for a folder, also if another user could replace or add any file in it. False: only
        replacing this user's own folders in it counts, which the sticky bit of `/tmp` prevents; a group with
        the user's own number is taken to have no other member.
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


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _record(image: bytes) -> str:
    return f"{len(image)} bytes, SHA-256 {hashlib.sha256(image).hexdigest()}\n"


def _read(path: Path) -> bytes | None:
    """Return the bytes of the library at `path`; None if it is missing or must not be loaded.

    It may be loaded only if other users cannot write it, and size and SHA-256 are as recorded beside it.
    """
    try:
        if may_be_written_by_others(path):
            return None
        image = read_bytes(path, MOST_BYTES)
        record = read_bytes(_record_of(path), MOST_RECORD_BYTES).decode(errors="replace")
    except (OSError, UserError):
        return None
    return image if record == _record(image) else None


def _store(image: bytes, path: Path) -> str:
    """Write a library `image` to `path`, and its size and SHA-256 into a file beside it.

    Returns:
        Why they cannot be written; an empty string if they were.
    """
    try:
        for file, content in ((path, image), (_record_of(path), _record(image).encode())):
            with whole(file) as scratch:
                scratch.write_bytes(content)
                scratch.chmod(0o600)
    except UserError as error:
        return str(error)
    return ""

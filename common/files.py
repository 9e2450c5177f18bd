"""Write files completely or not at all, and read files with a limit of size."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from common.errors import UserError
from common.temporary import lock_path, sweep


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Return a context with a temporary file to write to, which replaces `path` if the block raises no error.

    Readers see the old file or the new one, never half of one. The temporary file has the suffix of `path`.
    Missing folders are created. Temporary files that killed processes have left for this `path` are
    deleted.

    Raises:
        UserError: the file cannot be written.
    """
    # Random: processes of two containers may have one number and one folder.
    scratch = path.with_name(f".{os.getpid()}-{token_hex(4)}-{path.name}")
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        left = re.compile(rf"\.\d+-(\w{{8}}-)?{re.escape(path.name)}")
        sweep(each for each in path.parent.iterdir() if left.fullmatch(each.name))
        scratch.touch()
        lock = lock_path(scratch, wait=False)
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            scratch.unlink()
        if lock is not None:
            os.close(lock)


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes, or of a symbolic link to one.

    A pipe or a device is refused, since reading one may never end.

    Raises:
        OSError: the file cannot be read; `FileNotFoundError` if it does not exist.
        UserError: the file is larger, or not a regular file.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is a pipe or a device, but must be a regular file")
        raw = b"" if found.st_size > most else file.read(most + 1)
    if (size := max(found.st_size, len(raw))) > most:
        raise UserError(f"{path} has {size} bytes, but a file of this kind has at most {most}")
    return raw


def _open_at_once(path: str, flags: int) -> int:
    """Return the descriptor of a file opened with `flags` of `os.open`; do not wait for a pipe's writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_text(path: Path, flag: str, most: int) -> str:
    """Return the text of a file that the user has named, without a byte order mark.

    flag: the option by which the user named the file, such as `--json-schema`; for errors.
    most: bytes that the file may have. No more are read, so that an endless pipe is refused as well.

    Raises:
        UserError: the file cannot be read, is larger, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from None
    if len(raw) > most:
        raise UserError(f"{flag} {path} has more than {most:,} bytes, but may have no more")
    return decoded(raw, f"{flag} {path}")


def decoded(raw: bytes, name: str) -> str:
    """Return the bytes `raw`, UTF-8, as text without a byte order mark.

    name: what the bytes are; begins the message of the `UserError` that is raised if they are not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text") from None

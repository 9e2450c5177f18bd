"""Files, written whole or not at all and read with a limit; folders, tried before long work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import UserError

PROBE_BYTES = 1 << 16


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, of the same ending: it becomes `path` when the block ends well.

    Readers see the old file or the new one, never half of one. Folders are made.

    Raises:
        UserError: it cannot be written.
    """
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        scratch.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            scratch.unlink()


def check_folder(folder: Path, name: str = "") -> None:
    """Make a folder and try to write there.

    name: what the person gave it as, such as `--output`.

    Raises:
        UserError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise UserError(
            f"{name} {folder} cannot be written: {error.strerror}".lstrip()
        ) from None


def read_text(path: Path, flag: str, most: int) -> str:
    """Return the text of a file that a person has given, without a byte order mark of Windows' editors.

    flag: what it was given as, such as `--json-schema`.
    most: bytes that it may have. No more are read, so that a pipe without end is refused as well.

    Raises:
        UserError: it cannot be read, is larger, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from None
    if len(raw) > most:
        raise UserError(f"{flag} {path} has more than {most:,} bytes, but may have no more")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text") from None

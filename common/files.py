"""Files that are there whole or not at all, and folders that are tried before long work for them begins."""

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
        raise UserError(f"{name} {folder} cannot be written: {error.strerror}".lstrip()) from None

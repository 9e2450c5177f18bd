"""The access log: one line of JSON a request, and no request fails because it cannot be written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from common.errors import UserError
from serving.watching.metrics import Metrics


class AccessLog:
    """Lines go to a file, to standard error, or nowhere.

    where: a path, "-" for standard error, or "none".
    """

    def __init__(self, where: str, metrics: Metrics) -> None:
        """Open it. Raises `UserError` if that cannot be done."""
        self.metrics = metrics
        self._file: IO[str] | None = None
        if where == "-":
            self._file = sys.stderr
        elif where != "none":
            try:
                self._file = Path(where).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UserError(f"--access-log {where} cannot be written: {error.strerror}") from None

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line. What a full disk does not take is lost, and counted."""
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(entry).decode() + "\n")
            self._file.flush()
        except (OSError, ValueError):
            self.metrics.lost_log_lines += 1

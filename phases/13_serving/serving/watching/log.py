"""The access log: one line of JSON a request, and no request fails because it cannot be written."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import IO, Any

import msgspec

from common.errors import UserError
from serving.watching.metrics import Metrics

MOST_LIMITED = 10


class AccessLog:
    """Lines go to a file, to standard error, or nowhere.

    where: a path, "-" for standard error, or "none".
    """

    def __init__(self, where: str, metrics: Metrics) -> None:
        """Open it. Raises `UserError` if that cannot be done."""
        self.metrics, self._limited = metrics, Counter[str]()
        self._file: IO[str] | None = None
        if where == "-":
            self._file = sys.stderr
        elif where != "none":
            try:
                self._file = Path(where).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UserError(f"--access-log {where} cannot be written: {error.strerror}") from None

    def write(self, entry: dict[str, Any], *, limited: bool = False) -> None:
        """Add a line. What a full disk does not take is lost, and counted.

        limited: one of many that a client can cause for nothing: `MOST_LIMITED` a second are written.
        """
        if self._file is None:
            return
        if limited:
            self._limited[entry["time"]] += 1
            if self._limited[entry["time"]] > MOST_LIMITED:
                self.metrics.lost_log_lines += 1
                return
            self._limited = Counter({entry["time"]: self._limited[entry["time"]]})
        try:
            self._file.write(msgspec.json.encode(entry).decode() + "\n")
            self._file.flush()
        except (OSError, ValueError):
            self.metrics.lost_log_lines += 1

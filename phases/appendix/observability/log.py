"""The access log: one line of JSON a request, and no request fails because it cannot be written."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import msgspec

from common.errors import UserError
from phases.appendix.observability.metrics import Metrics
from serving.app import Extension
from serving.http.exchange import Exchange

MOST_LIMITED = 10


class AccessLog(Extension):
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

    def refused(self, status: int, client: str | None, reason: str) -> None:
        """Write down what never became a request."""
        self.write({"time": now(), "client": client, "status": status, "error": reason}, limited=True)

    def ended(self, exchange: Exchange) -> None:
        """Write down a request and its answer."""
        client, group = exchange.scope.get("client"), exchange.group
        entry: dict[str, Any] = {
            "time": now(),
            "id": exchange.id,
            "client": client[0] if client else None,
            "method": exchange.method,
            "path": exchange.path[:200],
            "status": exchange.status,
            "seconds": round(time.perf_counter() - exchange.started, 6),
            "bytes": exchange.sent_bytes,
        }
        if group is not None:
            entry["prompt_tokens"], entry["output_tokens"] = group.prompt_tokens, group.output_tokens
            entry["trouble"] = group.trouble[0] if group.trouble else None
            if group.first_token is not None:
                entry["first_token_ms"] = round((group.first_token - group.arrived) * 1e3, 3)
        self.write(entry)

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


def now() -> str:
    """Return the time as lines of the log have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

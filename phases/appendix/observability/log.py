"""The access log: one line of JSON for each request; failing to write a line fails no request."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO, Any

from common.errors import UserError
from common.json_text import encode_json
from phases.appendix.observability.metrics import Metrics
from serving.app import App
from serving.http.request import HttpRequest


class AccessLog:
    """Writes a line of JSON about each HTTP request of `app` that has ended."""

    def __init__(self, app: App, where: str, metrics: Metrics) -> None:
        """Open the log for appending.

        where: a path, "-" for standard error, or "none": nothing is written.
        metrics: counts lines that cannot be written.

        Raises:
            UserError: the file cannot be opened.
        """
        self.metrics = metrics
        self._file: IO[str] | None = None
        if where == "-":
            self._file = sys.stderr
        elif where != "none":
            try:
                self._file = Path(where).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UserError(
                    f"--access-log {where} cannot be written: {error.strerror}"
                ) from None
        if self._file is not None:
            app.on_end.append(self.ended)

    def ended(self, http: HttpRequest) -> None:
        """Write one line of JSON about an ended request; count lines that fail (`lost_log_lines`)."""
        if self._file is None:
            return
        client, group = http.scope.get("client"), http.group
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": http.id,
            "client": client[0] if client else None,
            "method": http.method,
            "path": http.path[:200],
            "status": http.status,
            "seconds": round(time.perf_counter() - http.started, 6),
            "bytes": http.sent_bytes,
        }
        if group is not None:
            entry["prompt_tokens"] = group.prompt_tokens
            entry["output_tokens"] = group.output_tokens
            entry["trouble"] = group.failure[0] if group.failure else None
            firsts = [choice.times[0] for choice in group.choices if choice.times]
            if firsts:
                entry["first_token_ms"] = round((min(firsts) - http.started) * 1e3, 3)
        try:
            self._file.write(encode_json(entry).decode() + "\n")
            self._file.flush()
        except (OSError, ValueError):
            self.metrics.lost_log_lines += 1

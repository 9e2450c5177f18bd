"""One user: a streamed request over a plain connection, and the time of every token.

A client library would spend more on a token than the server does, and its time would be measured with it. So
this speaks just enough HTTP/1.1 to stream one completion.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from common.errors import UserError

PATIENCE = 10.0
"""Seconds after which a server that does not respond is taken to be absent."""


@dataclass(frozen=True)
class Target:
    """Where requests go. key: sent if there is one."""

    host: str
    port: int
    path: str = "/v1/completions"
    key: str = ""
    model: str = ""

    @classmethod
    def of(cls, url: str, key: str = "", model: str = "") -> Target:
        """From an address such as `http://127.0.0.1:8000`. Raises `UserError` if it is none."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port or 80
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise UserError(f"URL is {url!r}, but must be like http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, f"{prefix}/v1/completions", key, model)


def reach(url: str) -> None:
    """Raise `UserError` if `url` is no address, or no server listens at it."""
    target = Target.of(url)
    try:
        socket.create_connection((target.host, target.port), PATIENCE).close()
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(
            f"no server answers at {url} ({said}): "
            "start one with `ladder serve`, or mend the address"
        ) from None


@dataclass
class Outcome:
    """What became of a request. Times are `time.perf_counter()` seconds of its process.

    times: when each event with text or tokens came; status 0: no answer.
    """

    started: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float = 0.0
    status: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == 200 and not self.error


class Answer(asyncio.Protocol):
    """Reads a streamed answer as its bytes come in: a token costs one call, and no task is woken for it.

    ended: done when the answer is complete or the connection is gone.
    """

    def __init__(self, outcome: Outcome, request: bytes) -> None:
        self.outcome, self._request = outcome, request
        self.ended = asyncio.get_running_loop().create_future()
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note when each event has come. Lines of a chunk's length are among them, and are no events."""
        now, outcome = time.perf_counter(), self.outcome
        data = self._rest + data if self._rest else data
        if not outcome.status:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return
            outcome.status = int(head.split(b" ", 2)[1])
        if outcome.status != 200:
            self._rest = data[-2000:]
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            if line.startswith(b'data: {"error"'):
                outcome.error = line[6:306].decode("utf-8", "replace")
            elif b'"choices":[]' in line:
                outcome.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            else:
                outcome.times.append(now)

    def connection_lost(self, exc: Exception | None) -> None:
        """That was all."""
        outcome = self.outcome
        if outcome.status != 200:
            said = self._rest[-300:].decode("utf-8", "replace")
            outcome.error = (
                outcome.error or said or f"no answer: {exc or 'the connection was closed'}"
            )
        elif exc is not None:
            outcome.error = outcome.error or f"{type(exc).__name__}: {exc}"
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


async def ask(target: Target, body: dict[str, Any], timeout: float = 600.0) -> Outcome:
    """Send one request and read its stream. Failures are outcomes, too."""
    outcome = Outcome(time.perf_counter())
    answer = Answer(outcome, _request(target, body))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(lambda: answer, target.host, target.port)
            await answer.ended
    except (OSError, TimeoutError, ValueError) as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    finally:
        answer.close()
    outcome.ended = time.perf_counter()
    if outcome.status == 200 and not outcome.tokens and not outcome.error:
        outcome.error = "the stream has ended without saying how many tokens it had"
    return outcome


def _request(target: Target, body: dict[str, Any]) -> bytes:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    more |= {"model": target.model} if target.model else {}
    data = json.dumps(body | more).encode()
    said = f"authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (
        f"POST {target.path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\nconnection: close\r\n{said}"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data

"""One user: a streamed request over a plain connection, and the time of every token.

A client library would spend more on a token than the server does, and its time would be measured with it. So
this speaks just enough HTTP/1.1 to stream one completion.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from common.errors import UserError


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
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise UserError(f"URL is {url!r}, but must be like http://127.0.0.1:8000")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, f"{prefix}/v1/completions", key, model)


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


async def ask(target: Target, body: dict[str, Any], timeout: float = 600.0) -> Outcome:
    """Send one request and read its stream. Failures are outcomes, too."""
    outcome = Outcome(time.perf_counter())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 22)
            writer.write(_request(target, body))
            await _read(reader, outcome)
    except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    finally:
        if writer is not None:
            writer.close()
    outcome.ended = time.perf_counter()
    if outcome.status == 200 and not outcome.tokens and not outcome.error:
        outcome.error = "the stream has ended without saying how many tokens it had"
    return outcome


def _request(target: Target, body: dict[str, Any]) -> bytes:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    more |= {"model": target.model} if target.model else {}
    data = json.dumps(body | more).encode()
    key = f"authorization: Bearer {target.key}\r\n" if target.key else ""
    head = (
        f"POST {target.path} HTTP/1.1\r\nhost: {target.host}:{target.port}\r\nconnection: close\r\n{key}"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    outcome.status = int(head.split(b" ", 2)[1])
    if outcome.status != 200:
        outcome.error = (await reader.read(2000)).decode("utf-8", "replace")[-300:]
        return
    rest = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            if line.startswith(b'data: {"error"'):
                outcome.error = line[6:306].decode("utf-8", "replace")
            elif b'"choices":[]' in line:
                outcome.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            else:
                outcome.times.append(now)

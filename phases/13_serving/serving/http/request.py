"""An HTTP request and its response, as ASGI messages (https://asgi.readthedocs.io/en/latest/specs/www.html)."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from common.http.errors import ApiError, ErrorForm, too_large
from common.http.limits import Limits
from common.json_text import encode_json

if TYPE_CHECKING:
    from serving.completion import ChoiceGroup

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON = (b"content-type", b"application/json")
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would hold the tokens back
]
DRAINED_BYTES, DRAIN_SECONDS = 64 << 10, 1.0
"""Of a body that is refused unread: it is taken for so long, so that the answer is read."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientDisconnected(Exception):
    """Raised when the client has closed the connection before its request was complete."""


class HttpRequest:
    """An HTTP request (ASGI), and what has been sent of its response so far.

    id: the client's `x-request-id` where it is well-formed, or a random one.
    status: of the response, 0 before it. extra: more headers for the response.
    content_length: value of that header, as it came. unread: there may be a body that has not been read.
    group: its completions, if it is a request for tokens; else None. form: the JSON form of its errors.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.limits = limits
        self.method, self.path = scope["method"], scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if _ID.fullmatch(given) else secrets.token_hex(12)
        self.started = time.perf_counter()
        self.content_length = self.headers.get(b"content-length", b"0")
        self.unread = (
            b"transfer-encoding" in self.headers or self.content_length.strip(b"0") != b""
        )
        self.status = 0
        self.sent_bytes = 0
        self.group: ChoiceGroup | None = None
        self.extra = list[Header]()
        self.form = ErrorForm()

    async def body(self) -> bytes:
        """Read and return the whole body. Raises `ClientDisconnected`, or `ApiError`: 408 if it is too slow,
        413 if it is too large. If a header says that, nothing is read.
        """
        most = self.limits.max_body_bytes
        if self.content_length.isdigit() and int(self.content_length[:20]) > most:
            raise too_large(most)
        return await self._read(most, self.limits.body_seconds)

    async def _read(self, most: int, seconds: float) -> bytes:
        """Read and return the rest of the body, of at most `most` bytes, in so many `seconds`. Raises like
        `body`. `unread` tells whether more is to come.
        """
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(seconds):
                while more and len(body) <= most:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    body += message.get("body", b"")
                    more = self.unread = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"no whole body after {seconds:g} s") from None
        if len(body) > most:
            raise too_large(most)
        return bytes(body)

    async def drain(self) -> None:
        """Read and drop the rest of a small body: a client that still sends it reads the response."""
        if self.unread:
            with suppress(ApiError):
                await self._read(DRAINED_BYTES, DRAIN_SECONDS)

    async def disconnected(self) -> None:
        """Wait until the client has closed the connection. Call this when the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send the response's status and headers; `extra` and `x-request-id` are added to `headers`."""
        self.status = status
        every = [*headers, *self.extra, (b"x-request-id", self.id.encode())]
        if self.unread:  # the rest of a body is not worth a connection
            every.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": every})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the body, and wait until the client has taken it. more: another part follows."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.sent_bytes += len(data)

    async def answer(
        self, status: int, body: bytes, headers: Iterable[Header] = (JSON,)
    ) -> None:
        """Send a whole response, with a header `content-length`; to a HEAD request it has no body."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def json(self, value: Any, status: int = 200) -> None:
        """Send a whole response with `value` as its JSON body."""
        await self.answer(status, encode_json(value))

    async def fail(self, error: ApiError) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        body = encode_json(self.form.body(error))
        if self.status:
            await self.write(self.form.event % body, more=False)
            return
        if error.status in (429, 503):  # the server's fault, not the request's
            self.extra.append((b"retry-after", b"1"))
        await self.answer(error.status, body)

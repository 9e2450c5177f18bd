"""A client's connection to the server: one request at a time, a limit of bytes, and one timer.

It extends uvicorn's protocol. A connection waits for a request, receives one, owes a response, or closes,
when its client has to read what is left. One timer runs in all states (while a response is owed, only if the
client does not read it), and no byte that arrives restarts it. What arrives while a response is owed is
stored unparsed, up to the limit of a request's headers: so the socket is still read, and a client that
disconnects is noticed.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, cast

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from common.http.limits import Limits
    from serving.app import App

KEEP_ALIVE_SECONDS = 75
"""That a connection may wait for its next request."""
UNREAD_BYTES = 128 << 10
"""What the system keeps of what a client has not read yet; beyond that the server knows that it is slow."""
NEVER = 1 << 30
"""Seconds of uvicorn's clock, which any byte stops: a connection here has its own."""
_CLOSE = b"content-length: 0\r\nconnection: close\r\n\r\n"
LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _CLOSE
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\n" + _CLOSE


class Connection(HttpToolsProtocol):
    """A server's side of one HTTP connection (asyncio protocol of uvicorn), with limits of size and time.

    owed: requests without a complete response; more than one if a client sends several without waiting.
    since: when the connection began to wait for its client, in seconds of the event loop's clock.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up a new connection; if there are too many, close one that waits for its client.

        That is the one that has waited longest; if no other one waits, the new one is closed.
        """
        super().connection_made(transport)
        self.limits = self.read_limits()
        self.owed: deque[RequestResponseCycle] = deque()
        self._bytes = 0  # of the headers that are being received
        self._later = b""
        self._data = b""
        self._clock: asyncio.TimerHandle | None = None
        self.since = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            waiting = [
                one
                for one in self.connections
                if isinstance(one, Connection) and one is not self and one.keeps_waiting
            ]
            if not waiting:
                transport.abort()
                return
            min(waiting, key=lambda one: one.since).transport.abort()
        made = transport.get_extra_info("socket")
        if made is not None:  # or the system keeps megabytes for a reader that does not read
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        self._expect(self.limits.body_seconds, TIMED_OUT)

    def read_limits(self) -> Limits:
        """Return the application's limits on requests: bytes, seconds, connections."""
        return cast("App", self.config.app).limits

    def connection_lost(self, exc: Exception | None) -> None:
        """Report to every request of this connection that its client has disconnected."""
        self._stop_clock()
        super().connection_lost(exc)
        for cycle in self.owed:
            cycle.disconnected = True
            cycle.message_event.set()

    @property
    def keeps_waiting(self) -> bool:
        """Return True if the server can do nothing until the client sends more; False once closing."""
        return not self.transport.is_closing() and (not self.owed or self.owed[0].more_body)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes of a client.

        While a response is owed they are stored, to be parsed after it; once the connection closes they are
        dropped.
        """
        if self.transport.is_closing():
            return
        if self.owed and not self.owed[-1].more_body:
            self._later += data
            if len(self._later) > self.limits.max_header_bytes:
                self.transport.abort()
            return
        self._data = data
        super().data_received(data)

    def _should_upgrade(self) -> bool:
        """Return True if the request's header `Upgrade` asks for another protocol, such as HTTP/2."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def handle_websocket_upgrade(self) -> None:
        """Parse a request that asks for another protocol once more, without its header `Upgrade`.

        Java's client sends this header with every request. The parser takes all that follows the headers,
        including the body, for bytes of that other protocol. uvicorn calls this method while it handles the
        parser's exception.
        """
        stopped = sys.exception()
        assert isinstance(stopped, HttpParserUpgrade)
        line = f" HTTP/{self.scope['http_version']}\r\n".encode()
        head = [self.scope["method"].encode(), b" ", self.url, line]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        # One that has read `Connection: close` takes no more.
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.data_received(b"".join(head) + b"\r\n" + self._data[stopped.args[0] :])

    def on_message_begin(self) -> None:
        """Begin a request: count its header bytes from 0, and start the timer within which it must arrive."""
        super().on_message_begin()
        self._bytes = 0
        if not self.owed:
            self._expect(self.limits.body_seconds, TIMED_OUT)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the request's URL; refuse the request (431) if it has too many."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header; refuse the request (431) if its headers have too many."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that the request needs a response, and stop the timer: the application times the body.

        A timer starts if the client has not yet read the response to its previous request.
        """
        if self.parser.should_upgrade() and self._should_upgrade():
            self.scope["method"] = self.parser.get_method().decode()
            self.scope["http_version"] = self.parser.get_http_version()
            return
        self._stop_clock()
        if self.flow.write_paused:  # it has not read the answer before this one
            self._set_deadline()
        super().on_headers_complete()
        self.owed.append(self.cycle)
        self.flow.resume_reading()  # uvicorn stops at a pipelined request, and would not see a client leave

    def on_response_complete(self) -> None:
        """End a request whose response was sent: parse the next one, or close the connection.

        The connection closes if the request's body has not been read to its end.
        """
        answered = self.owed.popleft()
        if answered.more_body:
            self.transport.close()
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_deadline()
        if self.transport.is_closing() or self.owed:
            return
        self.since = self.loop.time()
        self._expect(KEEP_ALIVE_SECONDS, b"")
        later, self._later = self._later, b""
        if later:
            self.data_received(later)

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read: `limits.slow_seconds` until it is aborted."""
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        """Stop the timer of a client that has read enough; a connection that is closing keeps its timer."""
        super().resume_writing()
        if self.owed and not self.transport.is_closing():
            self._stop_clock()

    def send_400_response(self, msg: str) -> None:
        """Send a 400 response to bytes that are no HTTP, and close the connection.

        If another response has begun, only close. msg: the response's text.
        """
        if any(cycle.response_started for cycle in self.owed):
            self.transport.close()
        else:
            super().send_400_response(msg)
        self._set_deadline()

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._close(LARGE)
            raise ValueError("too many bytes of headers")  # the parser gives up

    def _expect(self, seconds: float, answer: bytes) -> None:
        """Close the connection in `seconds`, unless the timer is stopped or restarted before.

        answer: bytes of the response to send first, perhaps none.
        """
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, self._close, answer)

    def _close(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            if not self.owed:  # or it would stand in the middle of another answer
                self.transport.write(answer)
            self.transport.close()
            self._set_deadline()

    def _set_deadline(self) -> None:
        """Abort the connection in `limits.slow_seconds` if the client has not read the rest by then."""
        self._stop_clock()
        self._clock = self.loop.call_later(self.limits.slow_seconds, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

"""A front without Ray: it reads a request, chooses a server, and then only copies bytes.

    python -m benchmarks.router http://127.0.0.1:8001 http://127.0.0.1:8002 --route prefix --port 8000

It does not start servers, or start them again. It is what routing itself costs: the same policies as under
Ray, and nothing that is not needed to try them. `bench_replicas.py` measures Ray and others against it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from common.errors import UserError
from common.sockets import listen
from replicas.options import ROUTES
from replicas.prefixes import chain_of
from replicas.routing import InFlight, Policy, make_policy
from serving.http.errors import ApiError, ErrorForm
from serving.http.limits import Limits

PROBE_SECONDS = 1.0
"""A server that cannot be reached is tried again after so long."""


class Servers:
    """The servers that are up, and what each has. A server's name is `host:port`."""

    def __init__(self, urls: Sequence[str], policy: Policy) -> None:
        self.addresses = dict(map(address_of, urls))
        self.policy, self.in_flight = policy, InFlight()
        self.up = set(self.addresses)
        self.numbers = count()

    def rank(self, chain: Sequence[int]) -> list[str]:
        """Return those that are up, best first."""
        return (
            self.policy.rank(chain, {name: self.in_flight.of(name) for name in self.up})
            if self.up
            else []
        )

    def lost(self, name: str) -> None:
        """It cannot be reached: nothing of what it knew counts when it comes back."""
        self.up.discard(name)
        self.policy.keep(self.up)
        asyncio.get_running_loop().call_later(PROBE_SECONDS, self.up.add, name)


def address_of(url: str) -> tuple[str, tuple[str, int]]:
    """A server's name, and its host and port. Raises `UserError` for what is no address of one."""
    try:
        part = urlsplit(url)
        host, port = part.hostname, part.port or 80
    except ValueError:  # brackets, or a port beyond all
        host, port = None, 0
    if not host or part.scheme != "http":
        raise UserError(f"URL is {url!r}, but must be such as http://127.0.0.1:8001")
    return f"{host}:{port}", (host, port)


class Front(asyncio.Protocol):
    """One client's connection: a request is read to its end, and then everything is copied, both ways."""

    def __init__(self, servers: Servers, limits: Limits) -> None:
        self.servers, self.limits = servers, limits
        self._parser = httptools.HttpRequestParser(self)
        self._head = [b""]
        self._body = bytearray()
        self._size = 0
        self._task: asyncio.Task[None] | None = None
        self._server: Copy | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        """End the client's task: it has left."""
        if self._task is not None:
            self._task.cancel()
        if self._server is not None:
            self._server.transport.abort()

    def pause_writing(self) -> None:
        """The client is slow, so its server has to wait."""
        if self._server is not None:
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._server is not None:
            self._server.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """More of the request. What comes after it is not listened to: a connection is for one request."""
        self._size += len(data)
        if self._task is not None:
            return
        try:
            if self._size > self.limits.max_body_bytes + self.limits.max_header_bytes:
                raise ApiError(
                    413, f"the request has more than {self.limits.max_body_bytes:,} bytes"
                )
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.refuse(ApiError(400, "this is no HTTP request"))
        except ApiError as error:
            self.refuse(error)

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._head[0] = self._parser.get_method() + b" " + url + b" HTTP/1.1\r\n"

    def on_header(self, name: bytes, value: bytes) -> None:
        """Headers go on as they are, but for the connection, and how the body comes."""
        if name.lower() not in (
            b"connection",
            b"transfer-encoding",
            b"content-length",
            b"expect",
        ):
            self._head.append(name + b": " + value + b"\r\n")

    def on_headers_complete(self) -> None:
        """A client that asks first is told to go on."""
        if self._parser.should_upgrade():
            raise ApiError(400, "nothing can be upgraded here")

    def on_body(self, body: bytes) -> None:
        """More of it."""
        self._body += body

    def on_message_complete(self) -> None:
        """All is here."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._forward())

    async def _forward(self) -> None:
        """Find a server that can be reached, and hand everything over."""
        servers, body = self.servers, bytes(self._body)
        chain = chain_of(body) if body else []
        number = str(next(servers.numbers))
        done = asyncio.get_running_loop().create_future()
        length = b"content-length: %d\r\n" % len(body) if body else b""
        request = b"".join([*self._head, length, b"connection: close\r\n\r\n", body])
        try:
            for name in servers.rank(chain):
                servers.in_flight.begin(number, name)
                servers.policy.sent(chain, name)
                try:
                    await self._connect(servers.addresses[name], done)
                except OSError:
                    servers.lost(name)
                    continue
                assert self._server is not None
                self._server.transport.write(request)
                await done
                return
            self.refuse(
                ApiError(
                    503, "no server can be reached; try again", retry=1, code="unavailable"
                )
            )
        finally:
            servers.in_flight.end(number)

    async def _connect(self, address: tuple[str, int], done: asyncio.Future[None]) -> None:
        async with asyncio.timeout(5.0):
            make: Callable[[], Copy] = lambda: Copy(self, done)  # noqa: E731
            _, self._server = await asyncio.get_running_loop().create_connection(
                make, *address
            )

    def refuse(self, error: ApiError) -> None:
        """Say what is wrong, and hang up."""
        body = msgspec.json.encode(ErrorForm().body(error))
        head = f"HTTP/1.1 {error.status} -\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class Copy(asyncio.Protocol):
    """The connection to a server: what comes from there goes to the client."""

    def __init__(self, front: Front, done: asyncio.Future[None]) -> None:
        self.front = front
        self.done = done
        self.said = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It can be reached."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """The answer, a token, ..."""
        self.said = True
        self.front.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """All is said; or the server has died, and the client sees a connection that was cut."""
        if not self.said and not self.front.transport.is_closing():
            self.front.refuse(
                ApiError(503, "the server has ended; try again", retry=1, code="died")
            )
        self.front.transport.close()
        if not self.done.done():
            self.done.set_result(None)


async def run(servers: Servers, host: str, port: int, limits: Limits) -> None:
    """Serve until this is cancelled."""
    loop = asyncio.get_running_loop()
    listening = listen(host, port)
    front = await loop.create_server(lambda: Front(servers, limits), sock=listening)
    print(f"Ready: http://{host}:{listening.getsockname()[1]}", flush=True)
    async with front:
        await front.serve_forever()


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--route", choices=ROUTES, default="prefix")
    parser.add_argument("--imbalance", type=int, default=8)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        servers = Servers(given.urls, make_policy(given.route, given.imbalance))
        uvloop.run(run(servers, given.host, given.port, Limits()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

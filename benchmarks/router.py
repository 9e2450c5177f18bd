"""A front without Ray: it reads a request, chooses a server, and then only copies bytes.

    python -m benchmarks.router http://127.0.0.1:8001 http://127.0.0.1:8002 --route prefix --port 8000

It does not start servers, or start them again. It is what routing itself costs: the same policies as under
Ray, and nothing that is not needed to try them. `benchmarks/replicas.py` measures Ray against it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count

import uvloop

from benchmarks.loadtest.user import Target
from common.errors import UserError
from common.sockets import listen
from replicas.options import ROUTES
from replicas.prefixes import chain_of
from replicas.routing import InFlight, Policy, make_policy

PROBE_SECONDS = 1.0
"""A server that cannot be reached is tried again after so long."""


class Servers:
    """The servers that are up, and what each has. A server's name is `host:port`."""

    def __init__(self, urls: Sequence[str], policy: Policy) -> None:
        targets = map(Target.of, urls)
        self.addresses = {
            f"{each.host}:{each.port}": (each.host, each.port) for each in targets
        }
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


async def answer(
    servers: Servers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Serve one client: read its request, and then only copy bytes, until either side ends."""
    number = str(next(servers.numbers))
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
        body = await reader.readexactly(int(length[1]) if length else 0)
        head = re.sub(rb"\r\nconnection:[^\r]*", b"", head[:-4], flags=re.I)
        chain = chain_of(body) if body else []
        for name in servers.rank(chain):
            servers.in_flight.begin(number, name)
            servers.policy.sent(chain, name)
            try:
                async with asyncio.timeout(5.0):
                    said, theirs = await asyncio.open_connection(*servers.addresses[name])
            except OSError:
                servers.lost(name)
                continue
            try:
                theirs.write(head + b"\r\nconnection: close\r\n\r\n" + body)
                while data := await said.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            finally:
                theirs.transport.abort()
            break
        else:
            writer.write(b"HTTP/1.1 503 -\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    servers.in_flight.end(number)
    writer.close()


async def run(servers: Servers, host: str, port: int) -> None:
    """Serve until this is cancelled."""
    listening = listen(host, port)
    front = await asyncio.start_server(partial(answer, servers), sock=listening)
    print(f"Ready: http://{host}:{listening.getsockname()[1]}", flush=True)
    async with front:
        await front.serve_forever()


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--route", choices=ROUTES, default="prefix")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        servers = Servers(given.urls, make_policy(given.route, 8))
        uvloop.run(run(servers, "127.0.0.1", given.port))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

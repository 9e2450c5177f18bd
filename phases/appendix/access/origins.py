"""Web pages of other origins, which a browser lets read an answer only if the server says so.

https://fetch.spec.whatwg.org/#http-cors-protocol. Nobody's cookies or passwords go along: a page has to send
a key of its own.
"""

from __future__ import annotations

import re

from common.errors import UserError
from phases.appendix.access.hosts import ANY, listed
from serving.app import App, Extension
from serving.http.errors import ApiError
from serving.http.exchange import Exchange, Header

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+")
EXPOSED = b"x-request-id, x-ladder-ignored, x-ladder-warning, retry-after"
SECONDS = b"600"
"""That a browser may remember an answer of ours to its question."""


def origins(given: str | None) -> tuple[str, ...]:
    """Origins with commas between them. Raises `UserError` if one is none: a browser would never send it."""
    found = listed("--allowed-origins", given, "origin")
    for origin in found:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            what = f"an origin is scheme://host or scheme://host:port, without a path, or {ANY}"
            raise UserError(f"--allowed-origins has {origin!r}, but {what}")
    return found


class Origins(Extension):
    """Lets pages of the origins `allowed` read answers, and answers what browsers ask first."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = allowed

    def install(self, app: App) -> None:
        """Learn the routes."""
        self.app = app

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        permit(exchange, self.allowed)
        if not asks(exchange):
            return False
        await reply(exchange, tuple(self.app.handlers(exchange.path)))
        return True


def asks(exchange: Exchange) -> bool:
    """Return True for a browser's question about a request that it has not sent yet; it has no key."""
    headers = exchange.headers
    return (
        exchange.method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers
    )


def permit(exchange: Exchange, allowed: tuple[str, ...]) -> None:
    """Let pages of these origins read the answer."""
    origin = exchange.headers.get(b"origin", b"")
    if ANY not in allowed:
        exchange.extra.append((b"vary", b"origin"))  # or a cache would give one page's answer to another
    name = b"*" if ANY in allowed else origin if origin.decode("latin-1") in allowed else b""
    if origin and name:
        exchange.extra.append((b"access-control-allow-origin", name))
        exchange.extra.append((b"access-control-expose-headers", EXPOSED))
    elif asks(exchange):
        shown = origin[:100].decode("latin-1")
        raise ApiError(403, f"pages of {shown!r} may not ask here: see --allowed-origins", code="origin")


async def reply(exchange: Exchange, methods: tuple[str, ...]) -> None:
    """Answer a browser's question: with these methods, and with whatever headers it has asked for."""
    headers: list[Header] = [
        (b"access-control-allow-methods", ", ".join(methods).encode()),
        (b"access-control-max-age", SECONDS),
    ]
    wanted = exchange.headers.get(b"access-control-request-headers")
    if wanted:
        headers.append((b"access-control-allow-headers", wanted))
    await exchange.start(204, headers)
    await exchange.write(b"", more=False)

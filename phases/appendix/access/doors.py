"""Doors of a server: names that a server answers to, origins of web pages, keys, and bodies without a type.

A web page can make its own name point at this machine after it was loaded (DNS rebinding). To the browser the
page and the server are then of one origin, so nothing but the name in `Host` tells them apart. An address in
its place cannot be rebound.

A browser lets pages of other origins read an answer only if the server says so
(https://fetch.spec.whatwg.org/#http-cors-protocol). No cookies or passwords go along: a page has to send a
key of its own.

A body must be `application/json`, so that no web page can send one without asking first. A form it may send,
but its browser says so in a header; `curl -d` does not.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket

from common.errors import UserError
from serving.app import App, Extension
from serving.http.errors import ApiError
from serving.http.exchange import Exchange, Header

ANY = "*"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?")


def listed(flag: str, given: str | None, what: str) -> tuple[str, ...]:
    """Read the value of a flag with commas in it. Raises `UserError` if it is there, and empty."""
    found = tuple(name.strip().lower() for name in (given or "").split(",") if name.strip())
    if given is not None and not found:
        raise UserError(f"{flag} is empty, but must have at least 1 {what}")
    return found


def hosts(given: str | None) -> tuple[str, ...]:
    """Read host names with commas between them. Raises `UserError` for what is no name."""
    found = listed("--allowed-hosts", given, "name")
    for name in found:
        if name != ANY and not _NAME.fullmatch(name):
            raise UserError(f"--allowed-hosts has {name!r}, but a host is a name without a port, or {ANY}")
    return found


def names_of(host: str, allowed: tuple[str, ...], *, keys: bool) -> frozenset[str]:
    """Return the names that a server answers to, `*` for any.

    host: the one that it listens on.
    allowed: further ones; where there are some, they also bind a server with keys.
    keys: whether clients need one. A web page has none, so any name will do.
    """
    if ANY in allowed or (keys and not allowed):
        return frozenset({ANY})
    return frozenset({"localhost", host.lower(), socket.gethostname().lower(), *allowed})


class Hosts(Extension):
    """Refuses requests to other names. names: see `names_of`."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        check(exchange, self.names)
        return False


def check(exchange: Exchange, names: frozenset[str]) -> None:
    """Raise `ApiError` for a request to another name; one without a name does not come from a browser."""
    given = exchange.headers.get(b"host", b"").decode("latin-1").strip().lower()
    if ANY in names or not given:
        return
    name = re.sub(r":\d*$", "", given)
    if name in names or name.endswith(".localhost") or _is_address(name):
        return
    raise ApiError(
        421, f"host is {given[:100]!r}, which is no name of this server: see --allowed-hosts", code="host"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


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


OPEN = ("/health", "/ready", "/ping", "/", "/docs", "/favicon.ico")
"""Routes that need no key. Pages are the same files for every client; what they ask for needs one."""


class Keys(Extension):
    """Refuses requests without one of the keys; without keys it takes every request."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = [key.encode() for key in keys]

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        if not self.keys or exchange.path in OPEN:
            return False
        given = exchange.headers.get(b"authorization", b"")
        if not given and b"x-api-key" in exchange.headers:  # as Anthropic's clients send it
            given = b"bearer " + exchange.headers[b"x-api-key"]
        scheme, _, value = given.partition(b" ")
        if scheme.lower() != b"bearer":
            value = b""
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            exchange.extra.append((b"www-authenticate", b'Bearer realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return False


FORMS = (b"", b"application/x-www-form-urlencoded")
WEB_PAGE = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"referer"})
"""Headers of which a browser sends one with the body of a page, which may be another site's."""


class Forms(Extension):
    """Takes the body of a form as JSON, unless a web page sends it."""

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        kind = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind in FORMS and WEB_PAGE.isdisjoint(exchange.headers):
            exchange.headers[b"content-type"] = b"application/json"
        return False

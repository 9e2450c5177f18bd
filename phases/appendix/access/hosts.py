"""Names that a server without a key answers to.

A web page can make its own name point at this machine after it was loaded (DNS rebinding). To the browser the
page and the server are then of one origin, so nothing but the name in `Host` tells them apart. An address in
its place cannot be rebound.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from common.errors import UserError
from serving.app import Extension
from serving.http.errors import ApiError
from serving.http.exchange import Exchange

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

"""Options of a server's access policy: host names and origins, as a command line gives them."""

from __future__ import annotations

import re
import socket

from common.errors import UserError

ANY = "*"
HOST = r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?"
ORIGIN = r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+"


def hosts(given: str | None) -> tuple[str, ...]:
    """Return the host names in `given`, the text of `--allowed-hosts`, in lower case; () for None.

    given: host names with commas between them; `*` stands for any.

    Raises:
        UserError: the text is empty, or an entry is neither a host name without a port nor `*`.
    """
    return _listed("--allowed-hosts", given, HOST, "a host is a name without a port")


def origins(given: str | None) -> tuple[str, ...]:
    """Return the web origins in `given`, the text of `--allowed-origins`; () for None.

    given: origins (`scheme://host` or `scheme://host:port`; lowered in the result) with commas between them;
        `*` stands for any.

    Raises:
        UserError: the text is empty, or an entry is neither an origin nor `*`.
    """
    return _listed(
        "--allowed-origins", given, ORIGIN, "an origin is scheme://host or scheme://host:port"
    )


def _listed(flag: str, given: str | None, pattern: str, what: str) -> tuple[str, ...]:
    found = tuple(name.strip().lower() for name in (given or "").split(",") if name.strip())
    if given is not None and not found:
        raise UserError(f"{flag} is empty, but must have at least 1 entry")
    for name in found:
        if name != ANY and not re.fullmatch(pattern, name):
            raise UserError(f"{flag} has {name!r}, but {what}, or {ANY}")
    return found


def names_of(host: str, allowed: tuple[str, ...], *, keys: bool) -> frozenset[str]:
    """Return the host names that a server accepts in the Host header; `{"*"}` means any.

    host: the address that the server listens on, always accepted, as are `localhost` and this machine's name.
    allowed: further names; `*`: any.
    keys: whether clients need an API key. If so, and `allowed` is empty, any name is accepted: a foreign web
        page has no key.
    """
    if ANY in allowed or (keys and not allowed):
        return frozenset({ANY})
    return frozenset({"localhost", host.lower(), socket.gethostname().lower(), *allowed})

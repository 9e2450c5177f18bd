"""Make listening sockets."""

from __future__ import annotations

import socket

from common.errors import UserError

BACKLOG = 4096
"""Connections that may wait to be accepted."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host` and `port`; port 0 takes any free one. Raises `UserError` if it
    cannot.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port} cannot be listened on: {said}") from None

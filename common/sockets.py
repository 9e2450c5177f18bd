"""Sockets that listen."""

from __future__ import annotations

import socket

from common.errors import UserError

BACKLOG = 4096
"""Connections that may wait to be taken."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is any that is free. Raises `UserError`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}"
        ) from None

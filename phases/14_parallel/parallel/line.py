"""The connection of a rank that is not the first to rank 0."""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any


class Line:
    """The connection to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def receive(self) -> Any:
        """The next message. Ends this process when rank 0 is gone."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    def send(self, message: Any) -> None:
        """Answer rank 0."""
        self.connection.send_bytes(pickle.dumps(message))

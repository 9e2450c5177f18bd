"""Connections to the proxy in front of several replicas of the server, which Ray's HTTP server accepts."""

from __future__ import annotations

import json
import os
from functools import lru_cache

from common.http.limits import Limits
from phases.appendix.connections.connection import Connection
from replicas.gate import LIMITS

PROXY = f"{__name__}:ProxyConnection"


class ProxyConnection(Connection):
    """A client's connection to the proxy in front of several replicas of the server."""

    def read_limits(self) -> Limits:
        """Return the limits on requests (bytes, seconds, connections), equal for all replicas."""
        return _limits(os.environ.get(LIMITS, "{}"))


@lru_cache(1)
def _limits(given: str) -> Limits:
    return Limits(**json.loads(given))

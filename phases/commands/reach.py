"""Is there a server, and does it take the key: asked before anything that takes seconds."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from common.errors import UserError

PATIENCE = 10.0
"""Seconds. A server that computes a step answers late, and one that is not there answers at once or never."""


def check(url: str, key: str = "") -> None:
    """Ask a server for its models. Whatever is no plain address is left to those who read it.

    Raises:
        UserError: nothing answers there, or it wants another key.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or 80
    except ValueError:
        return
    if parts.scheme != "http" or not parts.hostname:
        return
    asked = http.client.HTTPConnection(parts.hostname, port, timeout=PATIENCE)
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        asked.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        status = asked.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"no server answers at {url} ({reason or type(error).__name__}): "
            "start one with `ladder serve`, or mend the address"
        ) from None
    finally:
        asked.close()
    if status in (401, 403):
        known = "another key than this" if key else "a key"
        raise UserError(f"the server at {url} wants {known}: give it as --api-key")

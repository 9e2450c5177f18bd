"""Is there a server, and does it take the key: asked before anything that takes seconds."""

from __future__ import annotations

import http.client

from benchmarks.loadtest.user import Target
from common.errors import UserError

PATIENCE = 10.0
"""Seconds. A server that computes a step answers late, and one that is not there answers at once or never."""


def check(url: str, key: str = "") -> None:
    """Ask a server for its models.

    Raises:
        UserError: the address is none, nothing answers there, or it wants another key.
    """
    target = Target.of(url, key)
    asked = http.client.HTTPConnection(target.host, target.port, timeout=PATIENCE)
    path = target.path.replace("/completions", "/models")
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

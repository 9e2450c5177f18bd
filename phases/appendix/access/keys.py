"""API keys of a server."""

from __future__ import annotations

import hmac

from common.http.errors import ApiError
from serving.app import App
from serving.http.request import HttpRequest

OPEN = ("/health", "/ready", "/ping", "/", "/docs")
"""Routes that need no key. Pages are the same files for every client; what they ask for needs one."""


class ApiKeys:
    """Refuse HTTP requests to `app` that have none of its API keys (`keys`)."""

    def __init__(self, app: App, keys: tuple[str, ...]) -> None:
        self.keys = [key.encode() for key in keys]
        app.before.append(self.before)

    async def before(self, http: HttpRequest) -> bool:
        """Raise `ApiError` for a request without one of the keys; all are compared, in constant time.

        Returns:
            False: the request is not answered here.
        """
        if http.path in OPEN:
            return False
        # As older clients of Anthropic send it.
        other = b"bearer " + http.headers.get(b"x-api-key", b"")
        given = http.headers.get(b"authorization") or other
        scheme, _, value = given.partition(b" ")
        if scheme.lower() != b"bearer":
            value = b""
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            http.extra.append((b"www-authenticate", b'Bearer realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return False

"""API keys of a server."""

from __future__ import annotations

import hmac

from common.http.errors import ApiError
from serving.app import App
from serving.http.request import HttpRequest

OPEN = ("/health", "/ready", "/ping", "/", "/docs")
"""Routes that need no key. Pages are the same files for every client; what they ask for needs one."""


class ApiKeys:
    """A check before every route of the server `app`: a client must send one of the API `keys`."""

    def __init__(self, app: App, keys: tuple[str, ...]) -> None:
        self.keys = [key.encode() for key in keys]
        app.before.append(self.before)

    async def before(self, http: HttpRequest) -> bool:
        """Raise `ApiError` (401) if a request sends no valid API key.

        Paths such as `/health` need none. A key comes in the header `Authorization: Bearer KEY` or
        `x-api-key`; it is compared with all keys in constant time.

        Returns:
            False: the app goes on to the request's route.
        """
        if http.path in OPEN:
            return False
        scheme, _, value = http.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":  # as older clients of Anthropic send it
            value = http.headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            http.extra.append((b"www-authenticate", b'Bearer realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return False

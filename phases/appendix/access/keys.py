"""Keys, of which a client needs one. All are compared, each in constant time."""

from __future__ import annotations

import base64
import hmac

from serving.app import Extension
from serving.http.errors import ApiError
from serving.http.exchange import Exchange

OPEN = ("/health", "/ready", "/ping", "/", "/docs", "/favicon.ico")
"""Routes that need no key. Pages are the same files for everybody; what they ask for needs one."""


class Keys(Extension):
    """Refuses requests without one of the keys; without keys everybody may come in."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = [key.encode() for key in keys]

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        if not self.keys or exchange.path in OPEN:
            return False
        given = exchange.headers.get(b"authorization", b"")
        if not given and b"x-api-key" in exchange.headers:  # as Anthropic's clients send it
            given = b"bearer " + exchange.headers[b"x-api-key"]
        scheme, _, value = given.partition(b" ")
        if scheme.lower() == b"basic":  # `curl -u :KEY`, and proxies that ask for a password
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            exchange.extra.append((b"www-authenticate", b'Bearer realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return False

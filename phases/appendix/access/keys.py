"""Keys, of which a client needs one. All are compared, each in constant time."""

from __future__ import annotations

import base64
import hmac

from serving.app import Extension
from serving.http.errors import ApiError
from serving.http.exchange import Exchange

OPEN = ("/health", "/ready", "/ping")
"""Routes that need no key."""


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
        if scheme.lower() == b"basic":  # a browser asks for a password, and sends it so
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            kind = b"Basic" if exchange.path == "/" else b"Bearer"
            exchange.extra.append((b"www-authenticate", kind + b' realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return False

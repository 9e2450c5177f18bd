"""Bodies without a content type, as `curl -d` sends them, of whoever is no web page.

A body must be `application/json`, so that no web page can send one without asking first. A form it
may send, but its browser says so in a header.
"""

from __future__ import annotations

from serving.app import Extension
from serving.http.exchange import Exchange

FORMS = (b"", b"application/x-www-form-urlencoded")
WEB_PAGE = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"referer"})
"""Headers of which a browser sends one with the body of a page, which may be somebody else's."""


class Forms(Extension):
    """Takes the body of a form as JSON, unless a web page sends it."""

    async def before(self, exchange: Exchange) -> bool:
        """See `Extension`."""
        kind = exchange.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind in FORMS and WEB_PAGE.isdisjoint(exchange.headers):
            exchange.headers[b"content-type"] = b"application/json"
        return False

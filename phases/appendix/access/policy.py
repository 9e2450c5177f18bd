"""Access policy of a server: its host names, bodies without a type, and what web pages may read.

A web page can make its own name point at this machine after it was loaded (DNS rebinding). To the browser the
page and the server are then of one origin, so nothing but the name in `Host` tells them apart. An address in
its place cannot be rebound.

A body must be `application/json`, so that no web page can send one without asking first. A form it may send,
but its browser says so in a header; `curl -d` does not.
"""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress

from common.http.errors import ApiError
from phases.appendix.access.options import ANY
from phases.appendix.access.pages import allow_pages
from serving.app import App
from serving.http.request import HttpRequest

FORMS = (b"", b"application/x-www-form-urlencoded")
WEB_PAGE = frozenset({b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"referer"})
"""Headers of which a browser sends one with the body of a page, which may be another site's."""


class AccessPolicy:
    """A check before all routes of `app` of a request's host, origin and content type.

    hosts: names in the Host header that are accepted; `*`: any.
    origins: web origins whose pages may read responses; empty: no response allows a page to read it.
    """

    def __init__(self, app: App, hosts: frozenset[str], origins: tuple[str, ...] = ()) -> None:
        self.app = app
        self.hosts = hosts
        self.origins = origins
        app.before.append(self.before)

    async def before(self, http: HttpRequest) -> bool:
        """Check a request, and raise `ApiError` to refuse it.

        Returns:
            True if it was a browser's preflight request, which is answered here.
        """
        self.check_host(http)
        if self.origins and allow_pages(http, self.origins, self.app):
            await http.start(204, [])
            await http.write(b"", more=False)
            return True
        if http.method == "POST":
            self.check_type(http)
        return False

    def check_type(self, http: HttpRequest) -> None:
        """Raise `ApiError` (415) for a body that is not declared as JSON, or compressed.

        A form's type, or none, is accepted where no web page can have sent it.
        """
        kind = http.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        loose = kind in FORMS or http.path.startswith("/api/")  # Ollama's clients send any
        typed = kind == b"application/json" or (loose and WEB_PAGE.isdisjoint(http.headers))
        coding = http.headers.get(b"content-encoding") or b"identity"
        if not typed or coding.lower() != b"identity":
            words = "the content-type must be application/json, and the body not compressed"
            raise ApiError(415, words)

    def check_host(self, http: HttpRequest) -> None:
        """Raise `ApiError` if a request's Host header names a host that is not allowed.

        IP addresses are accepted, and requests without the header, since every browser sends it.
        """
        given = http.headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = re.sub(r":\d*$", "", given)
        if ANY in self.hosts or not given or name in self.hosts or name.endswith(".localhost"):
            return
        with suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return
        words = (
            f"host is {given[:100]!r}, which is no name of this server: see --allowed-hosts"
        )
        raise ApiError(421, words, code="host")

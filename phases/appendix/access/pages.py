"""CORS headers, which let web pages of other origins read responses.

https://fetch.spec.whatwg.org/#http-cors-protocol

A page of another origin may send requests, but a browser lets it read a response only if the server says so.
No cookies or passwords go along: a page has to send an API key of its own.
"""

from __future__ import annotations

from common.http.errors import ApiError
from phases.appendix.access.options import ANY
from serving.app import App
from serving.http.request import HttpRequest

EXPOSED = b"x-request-id, x-ladder-ignored, x-ladder-loosened, x-ladder-warning, retry-after"
SECONDS = b"600"
"""That a browser may remember an answer of ours to its question."""


def allow_pages(http: HttpRequest, origins: tuple[str, ...], app: App) -> bool:
    """Add the CORS headers that let web pages of the allowed `origins` read a response.

    app: the server, which knows the methods of each path.

    Returns:
        True if the request is a preflight (a browser's `OPTIONS`, which asks whether it may send the real
        request), so that only an empty response is left to send; False for any other request.

    Raises:
        ApiError: the preflight is of a page whose origin is not allowed.
    """
    headers, extra = http.headers, http.extra
    any_page = ANY in origins
    origin = headers.get(b"origin", b"")
    question = http.method == "OPTIONS" and b"access-control-request-method" in headers
    asks = question and origin != b""
    if not any_page:  # or a cache would give one page's answer to another
        extra.append((b"vary", b"origin"))
    shown = origin.decode("latin-1")
    if origin and (any_page or shown in origins):
        extra.append((b"access-control-allow-origin", b"*" if any_page else origin))
        extra.append((b"access-control-expose-headers", EXPOSED))
    elif asks:
        words = f"pages of {shown[:100]!r} may not ask here: see --allowed-origins"
        raise ApiError(403, words, code="origin")
    if asks:
        methods = ", ".join(app.methods(http.path)).encode()
        extra += [
            (b"access-control-allow-methods", methods),
            (b"access-control-max-age", SECONDS),
        ]
        if wanted := headers.get(b"access-control-request-headers"):
            extra.append((b"access-control-allow-headers", wanted))
    return asks

"""Keys, and what web pages may ask."""

from __future__ import annotations

import hmac

import pytest

from common.errors import UserError
from phases.appendix.access.keys import ApiKeys
from phases.appendix.access.options import origins
from tests.servers import Client
from tests.serving_kit import engine as engine
from tests.serving_kit import extension
from tests.serving_kit import make as make
from tests.serving_kit import tokenizer as tokenizer

PAGE = {"origin": "https://a.example"}
ASKS = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-os",
}


async def test_keys(make):
    app = make(keys=("secret", "other"))
    for path in (
        "/v1/models",
        "/metrics",
        "/events",
        "/openapi.json",
        "/nothing",
        "/v1/completions",
    ):
        method = "POST" if path == "/v1/completions" else "GET"
        for wrong in ("", "Bearer wrong", "Bearer ", "Basic !", "secret", "Bearer sécret"):
            headers = {"authorization": wrong} if wrong else {}
            asked = await Client(app).request(path, b"", method, headers).run()
            assert asked.status == 401, f"{path} is open to {headers}"
    for right in ("Bearer secret", "Bearer other"):
        assert (await Client(app).get("/version", authorization=right)).status == 200, right
    for path in ("/health", "/ready", "/ping", "/", "/docs"):
        assert (await Client(app).get(path)).status == 200


async def test_pages_of_allowed_origins_may_ask(make):
    """A browser asks first, without the key, and reads what it gets: errors, too."""
    app = make(
        keys=("secret",), allowed_origins=("https://a.example", "http://b.example:3000")
    )
    asked = await Client(app).request("/v1/completions", b"", "OPTIONS", ASKS).run()
    assert asked.status == 204 and asked.complete and "content-length" not in asked.headers
    assert asked.headers["access-control-allow-origin"] == "https://a.example"
    assert asked.headers["access-control-allow-methods"] == "POST"
    assert (
        asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    )
    key = {"authorization": "Bearer secret"}
    for body, headers, status in (
        ({"prompt": "a", "max_tokens": 1}, PAGE | key, 200),
        ({"prompt": "a", "max_tokens": 2, "stream": True}, PAGE | key, 200),
        ({"prompt": ""}, PAGE | key, 400),
        ({"prompt": "a"}, PAGE, 401),
    ):
        found = await Client(app).request("/v1/completions", body, headers=headers).run()
        assert found.status == status
        assert found.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in found.headers["access-control-expose-headers"]
        assert found.headers["vary"] == "origin"
    # A question about something else than a request to come is none.
    assert (
        await Client(app).request("/v1/completions", b"", "OPTIONS", PAGE).run()
    ).status == 401
    missing = await Client(app).request("/nothing", b"", "OPTIONS", ASKS).run()
    assert missing.status == 404


async def test_pages_of_other_origins_may_not(make):
    for allowed in (("http://b.example",), ("https://a.example:444",), ("http://a.example",)):
        app = make(allowed_origins=allowed)
        asked = await Client(app).request("/v1/completions", b"", "OPTIONS", ASKS).run()
        assert asked.status == 403 and asked.json()["error"]["code"] == "origin"
        assert "access-control-allow-origin" not in asked.headers
        # It is the browser that keeps the answer from the page; the server's own page sends its origin.
        found = await Client(app).request("/version", b"", "GET", PAGE).run()
        assert found.status == 200 and "access-control-allow-origin" not in found.headers
        assert found.headers["vary"] == "origin"
    asked = await Client(make()).request("/v1/completions", b"", "OPTIONS", ASKS).run()
    assert asked.status == 405 and not [
        name for name in asked.headers if "access-control" in name
    ]


async def test_pages_of_any_origin(make):
    any_page = Client(make(allowed_origins=("*",)))
    asked = await any_page.request(
        "/v1/models", b"", "OPTIONS", ASKS | {"origin": "null"}
    ).run()
    assert asked.status == 204 and asked.headers["access-control-allow-origin"] == "*"
    assert asked.headers["access-control-allow-methods"] == "GET, HEAD"
    assert (
        "access-control-allow-credentials" not in asked.headers and "vary" not in asked.headers
    )
    assert "access-control-allow-origin" not in (await any_page.get("/version")).headers


def test_origins_are_checked():
    assert origins(None) == ()
    several = ("https://a.example", "http://localhost:3000", "*")
    assert origins("https://A.example, http://localhost:3000,*") == several
    for wrong in (
        "",
        " , ",
        "a.example",
        "https://a.example/",
        "https://a.example/x",
        "null",
        "http://",
    ):
        with pytest.raises(UserError, match="--allowed-origins"):
            origins(wrong)


async def test_every_key_is_compared_whichever_is_right(make, monkeypatch):
    """So that the time says nothing about which key was nearly right."""
    app = make(keys=("first", "second", "third"))
    compared = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key in ("first", "third", "none", ""):
        compared.clear()
        await (
            Client(app)
            .request("/version", b"", "GET", {"authorization": f"Bearer {key}"})
            .run()
        )
        assert compared == extension(app, ApiKeys).keys, (
            f"with {key!r} only {compared} were compared"
        )

"""The table of fields in `docs/serving.md` says of every field what the server does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phases import ROOT
from tests.scripted_server import scripted
from tests.servers import Client

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Fields of the protocols")[2].partition("\n## ")[0]
EVERYWHERE = "every route for tokens"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
}
SAYING: dict[str, Any] = {
    **{"suffix": "x", "best_of": 2, "prompt_logprobs": 1, "user": "u", "store": True, "n": 2},
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "chat_template": "x"},
    **{"audio": {}, "metadata": {}, "service_tier": "auto", "background": True, "raw": True},
    **{"conversation": "c", "prompt": {"id": "p"}, "include": [], "truncation": "auto"},
    **{"stream_options": {"include_usage": True}, "template": "t", "context": [1]},
    **{"thread": {"type": "create"}, "compaction": {"type": "summarize"}},
}
"""Values of fields that are refused or named in a header."""
IN_MESSAGES = {"audio", "images", "is_error"}


def rows() -> Iterator[tuple[list[str], list[str], str]]:
    """Yield the routes of each row, the fields in it, and what becomes of them."""
    routes: list[str] = []
    for line in TABLE.splitlines():
        if line.startswith("| ") and not line.startswith(("| route", "| ---")):
            route, fields, what = (cell.strip() for cell in line.strip("|").split("|"))
            routes = re.findall(r"`([^`]+)`", route) or ([route] if route else routes)
            yield routes, re.findall(r"`([\w.]+)`", fields), what


def cases(what: str) -> list[tuple[str, str]]:
    """Return the fields of each route that are in rows of this kind."""
    found = [
        (route, field)
        for routes, fields, said in rows()
        for route in routes
        for field in fields
        if said == what and route in BODIES and field not in IN_MESSAGES
    ]
    return [(route, field) for route, field in found if field in SAYING or pytest.fail(field)]


def test_every_declared_field_is_in_the_table_and_every_route_is_there(tmp_path: Path) -> None:
    known: dict[str, set[str]] = {}
    for routes, fields, _ in rows():
        for route in routes:
            known.setdefault(route, set()).update(field.split(".")[0] for field in fields)
    app = scripted(tmp_path, "x")
    assert known.keys() - app.endpoints.keys() == {EVERYWHERE}
    for path, endpoint in app.endpoints.items():
        declared = {name for kind in endpoint.kinds for name in kind.__struct_fields__}
        missing = declared - known[path] - known[EVERYWHERE]
        assert not missing, f"{path}: the table says nothing of {sorted(missing)}"


@pytest.mark.parametrize(("path", "field"), cases("header"))
async def test_a_field_of_the_header_is_named_there(
    tmp_path: Path, path: str, field: str
) -> None:
    body = BODIES[path] | {field: SAYING[field], "stream": True}
    asked = await Client(scripted(tmp_path, "x")).request(path, body).run()
    assert asked.status == 200, asked.chunks
    assert field in asked.headers["x-ladder-ignored"].split(", ")


@pytest.mark.parametrize(("path", "field"), cases("refused"))
async def test_a_refused_field_is_named(tmp_path: Path, path: str, field: str) -> None:
    body = BODIES[path] | {field: SAYING[field]}
    asked = await Client(scripted(tmp_path, "x")).request(path, body).run()
    assert asked.status == 400 and field in str(asked.json()), (asked.status, asked.chunks)

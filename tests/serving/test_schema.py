"""Random requests from the OpenAPI document: no 5xx, no hang, no leak; `LADDER_SCHEMA_CASES` of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.servers import Running

pytestmark = pytest.mark.slow  # real processes

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

CASES = int(os.environ.get("LADDER_SCHEMA_CASES", "120"))
POSTS = ("/v1/completions", "/v1/chat/completions")
POSTS += ("/v1/responses", "/v1/messages", "/v1/embeddings", "/api/chat", "/api/generate")
POSTS += ("/api/embed",)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = (
        "--max-seconds",
        "5",
        "--body-seconds",
        "2",
        "--max-requests",
        "64",
        "--access-log",
        "none",
    )
    with Running("--max-rows", "8", *limits) as running:
        yield running
        running.settle()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", POSTS)
def test_no_request_breaks_the_server(server, path):
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path]["POST"]
    negative = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    strategy = operation.as_strategy() | negative

    @hypothesis.settings(
        max_examples=max(1, CASES // len(POSTS)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def never_fails(case):
        answer = case.call(timeout=20)
        assert answer.status_code < 500 or answer.status_code == 504, answer.text[:300]
        if answer.status_code >= 400:
            error = answer.json() if path.startswith("/api/") else answer.json()["error"]
            assert {"message", "type", "param", "code"} <= set(error), answer.text[:300]

    never_fails()
    assert server.get("/ready")[0] == 200

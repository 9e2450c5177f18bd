"""`ladder load`: what it counts is what was asked and answered."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.loadtest import command as load
from benchmarks.loadtest.loops import LoadPlan, poisson, run
from benchmarks.loadtest.report import Goal, summarize
from benchmarks.loadtest.user import Outcome, Target, ask, reach
from common.errors import UserError
from tests.servers import Running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running("--max-rows", "8", "--access-log", "none") as running:
        yield running


def outcome(started: float, times: list[float], tokens: int = 0, status: int = 200) -> Outcome:
    return Outcome(
        started, times, tokens or len(times), times[-1] if times else started, status
    )


def test_percentiles_and_goodput():
    good = outcome(0.0, [0.1, 0.2, 0.3])
    late = outcome(0.0, [3.0, 3.1])
    rough = outcome(1.0, [1.1, 2.0])
    failed = outcome(0.0, [], status=429)
    found = summarize([good, late, rough, failed], Goal(first_ms=500, gap_ms=200))
    assert (found["requests"], found["failed"], found["output_tokens"]) == (4, 1, 7)
    assert found["seconds"] == pytest.approx(3.1)
    assert found["ttft_ms_p50"] == pytest.approx(100) and found["e2e_ms_p99"] == pytest.approx(
        3058, abs=1
    )
    assert found["itl_ms_p50"] == pytest.approx(100)
    assert found["goodput_requests_per_s"] == pytest.approx(1 / 3.1), "only the first is good"
    assert summarize([failed]) == {"requests": 1, "failed": 1}


def test_addresses():
    for wrong in ("https://x", "http://", "ftp://x:1", "http://x:99999"):
        with pytest.raises(UserError, match="URL is"):
            Target.of(wrong)
    assert Target.of("localhost:8000/v1/") == Target("localhost", 8000, "/v1/completions")
    assert Target.of("http://h/a").path == "/a/v1/completions"


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.slow
def test_every_request_is_asked_once_and_read_to_its_end(server, closed):
    bodies = [
        {"prompt": [1 + n, 5], "max_tokens": 3 + n, "ignore_eos": True} for n in range(10)
    ]
    before = server.metric("vllm:generation_tokens_total")
    plan = LoadPlan(
        bodies, 10, users=4 if closed else 0, arrivals=[] if closed else poisson(100.0, 10)
    )
    outcomes = run(Target.of(server.url), plan, processes=2)
    assert all(one.ok for one in outcomes), [one.error for one in outcomes if not one.ok]
    assert sorted(one.tokens for one in outcomes) == [3 + n for n in range(10)]
    assert all(
        1 <= len(one.times) <= one.tokens and one.times == sorted(one.times)
        for one in outcomes
    )
    assert server.metric("vllm:generation_tokens_total") - before == sum(range(3, 13))


@pytest.mark.slow
def test_what_goes_wrong_is_an_outcome(server):
    target = Target.of(server.url)
    refused = asyncio.run(ask(target, {"prompt": [1], "temperature": -1}))
    assert refused.status == 400 and "temperature" in refused.error
    late = asyncio.run(
        ask(target, {"prompt": [1], "max_tokens": 900, "ignore_eos": True, "deadline_ms": 100})
    )
    assert not late.ok and "deadline" in late.error
    nobody = asyncio.run(ask(Target("127.0.0.1", 9), {"prompt": [1]}))
    assert nobody.status == 0 and nobody.error


@pytest.mark.slow
def test_the_command(server, tmp_path: Path, capsys):
    numbers = tmp_path / "l.json"
    settings = {
        "workload": "paged_attention-small",
        "requests": 6,
        "vocab": 200,
        "processes": 2,
    }
    settings |= {"api_key": "", "first_ms": 9e3, "gap_ms": 9e3, "json": numbers}
    assert load.run(SimpleNamespace(url=server.url, users=["1,3"], rate=None, **settings)) == 0
    runs = json.loads(numbers.read_text())["runs"]
    assert [one["load"] for one in runs] == ["1 user", "3 users"]
    assert all(one["failed"] == 0 and one["goodput_requests_per_s"] > 0 for one in runs)
    assert re.search(r"3 users", capsys.readouterr().out)
    with pytest.raises(UserError, match="only one of them"):
        load.run(SimpleNamespace(url=server.url, users=["1"], rate=1.0, **settings))
    with pytest.raises(UserError, match="users is"):
        load.run(SimpleNamespace(url=server.url, users=["many"], rate=None, **settings))


@pytest.mark.parametrize("url", ["http://[::", "http://127..0.1:8000", f"http://{'a' * 70}:1"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(UserError, match=r"URL is|no server answers"):
        reach(url)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(
        UserError, match=r"no server answers at http://127\.0\.0\.1:9 \(Connection refused\)"
    ):
        reach("http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach(f"http://127.0.0.1:{server.getsockname()[1]}/v1")

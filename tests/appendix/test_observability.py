"""What the page shows: how tokens came about, and the tree of remembered prefixes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.synthetic_drafter import Synthetic
from common.sampling.params import SamplingParams
from forward import load_model
from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from phases.appendix.observability.observer import picture
from phases.appendix.server import whole_app
from serving.messages import StepStats
from tests.guidance_kit import served as load
from tests.servers import Client, Loopback, tokenizer_for
from tests.serving_kit import engine as engine
from tests.serving_kit import extension, metrics, settle
from tests.serving_kit import make as make
from tests.serving_kit import tokenizer as tokenizer


def made_engine(**options: Any):
    model = load_model("random:tiny", device="cpu", dtype="float32")
    return load(
        model, max_rows=4, max_len=256, **{"block_size": 4, "cache_bytes": 1 << 20, **options}
    )


async def test_drafts_that_were_right_are_marked_for_those_who_ask(tmp_path: Path):
    tokenizer = tokenizer_for(tmp_path, 257)
    drafts = {"draft_length": 3, "draft_adaptive": False}
    made = made_engine(block_size=16, tokenizer=tokenizer, **drafts)
    made.scheduler.drafter.inner.source = source = Synthetic(1.0)
    made.runner.verifier.agree = source.agree
    app = whole_app(Loopback(made), tokenizer, "tiny")
    body = {
        "prompt": "abc",
        "stream": True,
        "max_tokens": 40,
        "ignore_eos": True,
        "temperature": 0,
    }
    asked = (
        await Client(app).request("/v1/completions", body | {"return_token_marks": True}).run()
    )
    choices = [event["choices"][0] for event in asked.events()[:-1]]
    marks = [pair for choice in choices for pair in choice["token_marks"]]
    assert "".join(text for text, _ in marks) == "".join(choice["text"] for choice in choices)
    assert sum(made.scheduler.drafter.inner.stats.accepted), (
        "nothing was drafted: the test shows nothing"
    )
    assert sum(mark == "draft" for _, mark in marks) >= 3 and marks[0][1] == "", (
        f"marks: {marks}"
    )
    plain = await Client(app).request("/v1/completions", body).run()
    assert "token_marks" not in plain.events()[0]["choices"][0], "nobody asked for marks"


def test_the_tree_shows_what_is_shared_and_nobodys_tokens():
    made = made_engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    shared = list(range(1, 13))  # three blocks of four
    made.generate([shared + [20] * 8, shared + [30] * 4, [99] * 8], params)
    found = picture(made)["tree"]
    nodes = found["nodes"]
    assert found["more"] == 0 and picture(made_engine(index="hash"))["tree"] is None
    roots = [node for node in nodes if node[0] == -1]
    assert sorted(node[1] for node in roots) == [2, 3], (
        f"two beginnings, of 3 and 2 blocks, but: {nodes}"
    )
    trunk = next(place for place, node in enumerate(nodes) if node[0] == -1 and node[1] == 3)
    assert sorted(node[1] for node in nodes if node[0] == trunk) == [1, 2], (
        f"two ends below it, but: {nodes}"
    )
    assert all(node[2] == 0 for node in nodes), (
        f"nobody runs, but somebody stands in the tree: {nodes}"
    )
    assert all(
        len(node) == 3 and all(isinstance(value, int) for value in node) for node in nodes
    )


async def test_the_log_survives_a_full_disk(make, tmp_path, monkeypatch):
    path = tmp_path / "access.log"
    app = make(access_log=str(path))
    await Client(app).post(
        "/v1/completions", {"prompt": "a", "max_tokens": 2}, x_request_id="mine"
    )
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["id"] == "mine" and entry["status"] == 200 and entry["output_tokens"] >= 1

    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        extension(app, AccessLog), "_file", SimpleNamespace(write=full, flush=list)
    )
    assert (await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[
        0
    ] == 200
    assert metrics(app).lost_log_lines == 1


def test_steps_are_shown_behind_a_restart():
    """A new engine counts its steps from the beginning; who has seen step 500 sees its first."""
    engine = SimpleNamespace(ready=None, stats=StepStats(), state="ready", in_flight=0)
    live, seen = Live(SimpleNamespace(engine=engine, routes={})), 0
    live.watchers = 1
    for count in (500, 300):
        for number in range(count):
            stats = StepStats(steps=number + 1, step_tokens=1)
            live.stepped(SimpleNamespace(stats=stats, tokens=[7], picture=None))
        shown = [step[0] for step in live.event(seen)["steps"]]
        assert shown[-1:] == [count], (
            f"of {count} steps {len(shown)} are shown behind step {seen}"
        )
        seen = shown[-1]


async def test_watching(make):
    """Events come while somebody looks, at most ten a second, and stop when nobody does."""
    app = make()
    watcher = Client(app).request("/events", b"", "GET")
    task = asyncio.ensure_future(watcher.run())
    await asyncio.sleep(0.05)
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True}
    await Client(app).post("/v1/completions", body)
    await asyncio.sleep(0.25)
    started = len(watcher.chunks)
    await asyncio.sleep(0.5)
    assert len(watcher.chunks) - started <= 6
    events = watcher.events()
    steps = [step for event in events for step in event["steps"]]
    assert len(steps) == len({step[0] for step in steps}) > 100, (
        "steps are missing or told twice"
    )
    assert any(event["picture"] and event["picture"]["rows"] for event in events), (
        "nobody was seen to run"
    )
    watcher.leave()
    await task
    assert extension(app, Live).watchers == 0
    await settle(app)
    assert not app.engine.worker.observer.due, "a picture is drawn for nobody"

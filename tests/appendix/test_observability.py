"""What the page shows: how tokens came about, and the tree of remembered prefixes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.sampling.params import SamplingParams
from forward import load_model
from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from phases.appendix.observability.observer import EngineObserver, picture
from phases.appendix.server import whole_app
from serving import messages
from serving.messages import AddPrompt
from serving.worker import Worker
from tests.guidance_kit import served as load
from tests.servers import Client, Lists, Loopback, tokenizer_for
from tests.serving_kit import engine as engine
from tests.serving_kit import extension, metrics, settle
from tests.serving_kit import make as make
from tests.serving_kit import tokenizer as tokenizer


def made_engine(**options: Any):
    model = load_model("random:tiny", device="cpu", dtype="float32")
    return load(model, max_rows=4, max_len=256, **{"block_size": 4, "cache_bytes": 1 << 20, **options})


def marks_of(made, *adds: AddPrompt) -> dict[int, list[str]]:
    """For each completion the marks of its tokens, in order."""
    channel = Lists()
    worker = Worker(made, channel, EngineObserver(made))
    channel.commands = list(adds)
    worker.turn()
    while worker.live:
        worker.turn()
    found: dict[int, list[str]] = {}
    for step in channel.steps:
        for number, kind, marks in step.notes:
            if kind == messages.MARKS:
                found.setdefault(number, []).extend(marks)
    marks = worker.observer.marks
    assert not marks._followed and not marks._single, "who has ended is still followed"
    return found


def test_drafts_that_were_right_are_marked_and_only_for_those_who_asked():
    made = made_engine(drafter="synthetic", draft_accept=1.0, draft_length=3, draft_adaptive=False)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    found = marks_of(made, AddPrompt(0, [1, 2, 3], params, wanted=["marks"]), AddPrompt(1, [4, 5], params))
    accepted = sum(made.scheduler.drafter.inner.stats.accepted)
    assert accepted, "nothing was drafted: the test shows nothing"
    assert found[0].count("draft") >= 3 and found[0][0] == "", f"marks of request 0: {found[0]}"
    assert 1 not in found, f"request 1 did not ask, but has marks {found[1]}"


async def test_a_chunk_tells_how_its_tokens_came_about(tmp_path: Path):
    tokenizer = tokenizer_for(tmp_path, 257)
    made = made_engine(block_size=16, tokenizer=tokenizer)
    body = {"prompt": "x", "stream": True, "max_tokens": 40, "guided_choice": ["aaaa"], "temperature": 0}
    app = whole_app(Loopback(made), tokenizer, "tiny")
    asked = await Client(app).request("/v1/completions", body | {"return_token_marks": True}).run()
    marks = [pair for event in asked.events()[:-1] for pair in event["choices"][0]["token_marks"]]
    assert "".join(text for text, _ in marks) == "aaaa", f"the texts of the marks are {marks}"
    forced = "".join(text for text, mark in marks if mark == "forced")
    assert forced == "aaaa", f"one token was allowed at each place, but only {forced!r} says forced: {marks}"
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
    assert sorted(node[1] for node in roots) == [2, 3], f"two beginnings, of 3 and 2 blocks, but: {nodes}"
    trunk = next(place for place, node in enumerate(nodes) if node[0] == -1 and node[1] == 3)
    assert sorted(node[1] for node in nodes if node[0] == trunk) == [1, 2], f"two ends below it, but: {nodes}"
    assert all(node[2] == 0 for node in nodes), f"nobody runs, but somebody stands in the tree: {nodes}"
    assert all(len(node) == 3 and all(isinstance(value, int) for value in node) for node in nodes)


async def test_the_log_survives_a_full_disk(make, tmp_path, monkeypatch):
    path = tmp_path / "access.log"
    app = make(access_log=str(path))
    await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 2}, x_request_id="mine")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["id"] == "mine" and entry["status"] == 200 and entry["output_tokens"] >= 1

    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(extension(app, AccessLog), "_file", SimpleNamespace(write=full, flush=list))
    assert (await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200
    assert metrics(app).lost_log_lines == 1


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
    assert len(steps) == len({step[0] for step in steps}) > 100, "steps are missing or told twice"
    assert any(event["picture"] and event["picture"]["rows"] for event in events), "nobody was seen to run"
    watcher.leave()
    await task
    assert extension(app, Live).watchers == 0
    await settle(app)
    assert not app.engine.worker.observer.due(), "a picture is drawn for nobody"

"""What the page shows: how tokens came about, and the tree of remembered prefixes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from common.sampling.params import SamplingParams
from forward import load_model
from paged_cache import BlockPool
from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from phases.appendix.observability.observer import EngineObserver
from phases.appendix.observability.picture import MOST_NODES, picture
from phases.appendix.observability.traces import Traces
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
    size = 128 * BlockPool.bytes_per_block(model.config, 4, model.dtype)
    return load(model, max_rows=4, max_len=256, block_size=4, cache_bytes=size, **options)


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
    assert not worker.observer.marks._followed and not worker.observer.marks._single, (
        "who has ended is still followed"
    )
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
    made = engine_with(tokenizer)
    body = {"prompt": "x", "stream": True, "max_tokens": 40, "guided_choice": ["aaaa"], "temperature": 0}
    app = whole_app(Loopback(made), tokenizer, "tiny")
    asked = await Client(app).request("/v1/completions", body | {"return_token_marks": True}).run()
    marks = [pair for event in asked.events()[:-1] for pair in event["choices"][0]["token_marks"]]
    assert "".join(text for text, _ in marks) == "aaaa", f"the texts of the marks are {marks}"
    forced = "".join(text for text, mark in marks if mark == "forced")
    assert forced == "aaaa", f"one token was allowed at each place, but only {forced!r} says forced: {marks}"
    plain = await Client(app).request("/v1/completions", body).run()
    assert "token_marks" not in plain.events()[0]["choices"][0], "nobody asked for marks"


def engine_with(tokenizer):
    model = load_model("random:tiny", device="cpu", dtype="float32")
    return load(model, max_rows=4, max_len=256, cache_bytes=1 << 20, tokenizer=tokenizer)


def test_the_tree_shows_what_is_shared_and_nobodys_tokens():
    made = made_engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    shared = list(range(1, 13))  # three blocks of four
    made.generate([shared + [20] * 8, shared + [30] * 4, [99] * 8], params)
    found = picture(made)["tree"]
    nodes = found["nodes"]
    assert found["more"] == 0
    roots = [node for node in nodes if node[0] == -1]
    assert sorted(node[1] for node in roots) == [2, 3], f"two beginnings, of 3 and 2 blocks, but: {nodes}"
    trunk = next(place for place, node in enumerate(nodes) if node[0] == -1 and node[1] == 3)
    assert sorted(node[1] for node in nodes if node[0] == trunk) == [1, 2], f"two ends below it, but: {nodes}"
    assert all(node[2] == 0 for node in nodes), f"nobody runs, but somebody stands in the tree: {nodes}"
    assert all(len(node) == 3 and all(isinstance(value, int) for value in node) for node in nodes)


def test_a_large_tree_is_cut():
    made = made_engine()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    made.generate([[1 + n] * 5 for n in range(60)], params)
    found = picture(made)["tree"]
    assert len(found["nodes"]) == MOST_NODES and found["more"] == 60 - MOST_NODES


def test_an_index_without_a_tree_has_none():
    assert picture(made_engine(index="hash"))["tree"] is None


async def test_a_mark_of_the_wrong_type_is_refused(tmp_path: Path):
    tokenizer = tokenizer_for(tmp_path, 257)
    app = whole_app(Loopback(engine_with(tokenizer)), tokenizer, "tiny")
    status, answer = await Client(app).post("/v1/completions", {"prompt": "x", "return_token_marks": "y"})
    assert status == 400 and "return_token_marks" in answer["error"]["message"]


async def test_the_log_survives_a_full_disk(make, tmp_path, monkeypatch):
    path = tmp_path / "access.log"
    app = make(access_log=str(path))
    await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 2}, x_request_id="mine")
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["id"] == "mine" and entry["status"] == 200 and entry["output_tokens"] >= 1

    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        extension(app, AccessLog),
        "_file",
        type("Full", (), {"write": staticmethod(full), "flush": lambda self: None})(),
    )
    assert (await Client(app).post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[0] == 200
    assert metrics(app).lost_log_lines == 1


async def test_spans_of_requests(make):
    """A client's trace goes on here: queue, prefill and decode below its request, in order, and closed."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    app = make(traces=Traces(provider, "tiny"))
    body = {"prompt": "abc", "max_tokens": 6, "ignore_eos": True}
    trace = "0af7651916cd43dd8448eb211c80319c"
    more = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x_request_id": "mine"}
    asked = [Client(app).post("/v1/completions", body, **more) for _ in range(10)]  # of which 8 run
    await asyncio.gather(*asked)
    spans = kept.get_finished_spans()
    requests = [span for span in spans if span.name == "POST /v1/completions"]
    assert len(requests) == 10 and len(spans) == 40, [span.name for span in spans]
    for request in requests:
        assert (
            f"{request.context.trace_id:032x}" == trace
            and f"{request.parent.span_id:016x}" == more["traceparent"].split("-")[2]
        )
        below = {s.name: s for s in spans if s.parent and s.parent.span_id == request.context.span_id}
        assert set(below) == {"queue", "prefill", "decode"}, f"{set(below)} below a request"
        queue, prefill, decode = below["queue"], below["prefill"], below["decode"]
        times = [request.start_time, queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
        assert times == sorted(times) and decode.end_time <= request.end_time, times
        assert prefill.start_time == queue.end_time and decode.start_time == prefill.end_time
        told = request.attributes
        assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 6)
        assert told["gen_ai.response.finish_reasons"] == ("length",)
        assert told["http.response.status_code"] == 200 and told["ladder.request.id"] == "mine"
    waits = sorted(s.end_time - s.start_time for s in spans if s.name == "queue")
    assert waits[-1] > waits[0], "nobody was seen to wait for a row"

    kept.clear()
    late = body | {"max_tokens": 900, "deadline_ms": 40}
    assert (await Client(app).post("/v1/completions", late))[0] == 504
    await Client(app).post("/v1/completions", body, traceparent=more["traceparent"][:-1] + "0")
    (failed,) = [span for span in kept.get_finished_spans() if span.name.startswith("POST")]
    assert not failed.status.is_ok and failed.attributes["error.type"] == "deadline", (
        "a client whose trace is not kept has a span, or a failure looks like a success"
    )
    assert (await Client(app).post("/v1/completions", body, traceparent="nonsense"))[0] == 200
    assert (await Client(app).post("/v1/completions", {"prompt": ""}))[0] == 400


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

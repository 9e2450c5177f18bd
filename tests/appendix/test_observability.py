"""What the page shows: how tokens came about, and the tree of remembered prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import serving
from common.sampling.params import SamplingParams
from forward import load_model
from paged_cache import BlockPool
from phases.appendix.observability.observer import EngineObserver
from phases.appendix.observability.picture import MOST_NODES, picture
from phases.appendix.server import whole_app
from serving import messages
from serving.messages import AddPrompt, StepReport, StepStats
from serving.worker import Worker
from tests.servers import Client, Loopback, tokenizer_for


def engine(**options: Any):
    model = load_model("random:tiny", device="cpu", dtype="float32")
    size = 128 * BlockPool.bytes_per_block(model.config, 4, model.dtype)
    return serving.load(model, max_rows=4, max_len=256, block_size=4, cache_bytes=size, **options)


class Lists:
    """A channel of two lists."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.reports: list[StepReport] = []

    def receive(self, seconds: float) -> list[Any]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, report: StepReport) -> None:
        self.reports.append(report)


def marks_of(made, *adds: AddPrompt) -> dict[int, list[str]]:
    """For each completion the marks of its tokens, in order."""
    channel = Lists()
    worker = Worker(made, channel, EngineObserver(made))
    channel.commands = list(adds)
    worker.turn()
    while worker.live:
        worker.turn()
    found: dict[int, list[str]] = {}
    for step in channel.reports:
        marks = dict(step.marks)
        for place, number in enumerate(step.numbers):
            found.setdefault(number, []).append(marks.get(place, ""))
    assert not worker.observer.marks._followed and not worker.observer.marks._single, (
        "who has ended is still followed"
    )
    return found


def test_drafts_that_were_right_are_marked_and_only_for_those_who_asked():
    made = engine(drafter="synthetic", draft_accept=1.0, draft_length=3, draft_adaptive=False)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    found = marks_of(made, AddPrompt(0, [1, 2, 3], params, marks=True), AddPrompt(1, [4, 5], params))
    accepted = sum(made.scheduler.drafter.inner.stats.accepted)
    assert accepted, "nothing was drafted: the test shows nothing"
    assert found[0].count("draft") >= 3 and found[0][0] == "", f"marks of request 0: {found[0]}"
    assert set(found[1]) == {""}, f"request 1 did not ask, but has marks {found[1]}"


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
    return serving.load(model, max_rows=4, max_len=256, cache_bytes=1 << 20, tokenizer=tokenizer)


def test_the_tree_shows_what_is_shared_and_nobodys_tokens():
    made = engine()
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
    made = engine()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    made.generate([[1 + n] * 5 for n in range(60)], params)
    found = picture(made)["tree"]
    assert len(found["nodes"]) == MOST_NODES and found["more"] == 60 - MOST_NODES


def test_an_index_without_a_tree_has_none():
    assert picture(engine(index="hash"))["tree"] is None


async def test_a_mark_of_the_wrong_type_is_refused(tmp_path: Path):
    tokenizer = tokenizer_for(tmp_path, 257)
    app = whole_app(Loopback(engine_with(tokenizer)), tokenizer, "tiny")
    status, answer = await Client(app).post("/v1/completions", {"prompt": "x", "return_token_marks": "y"})
    assert status == 400 and "return_token_marks" in answer["error"]["message"]


def test_marks_travel():
    step = StepReport([0], [5], [], StepStats(), marks=[(0, "draft")])
    assert messages.report(messages.encode(step)) == step

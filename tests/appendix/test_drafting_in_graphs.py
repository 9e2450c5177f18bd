"""Drafting inside the graph that verifies; on the CPU what is captured is called."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import continuous
import cuda_graphs
import forward
from common.events import Completion
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.work import Work
from cuda_graphs.capture import Capturer
from forward.attention import RecomputeAttention
from forward.model import Model
from forward.surgery import clone
from paged_cache import PagedEngine
from phases import phase_named
from phases.appendix.drafting_in_graphs.loop import GraphDraftingLoop
from phases.appendix.latency import layers as attention
from phases.appendix.latency.layers import LatencyBlock
from phases.registry import load_engine
from speculative.head import HeadSource
from speculative.ngram import NGramIndex
from tests.compiling import spilled
from tests.equivalence.compare import assert_all_same
from tests.heads import clean_drafts, head_of, hidden_states, save_head
from tests.kernel_layers import only_attention
from tests.schedules import check

PLAIN = {"sampling": "torch"}
AHEAD = dict.fromkeys(("kernels", "graphs", "draft_ahead"), True) | PLAIN
AHEAD |= {
    "graph_tokens": 0,
    "step_tokens": 64,
    "max_len": 64,
    "block_size": 8,
    "cache_bytes": 1 << 20,
}


def load(model: Model, **options: Any) -> Any:
    return load_engine(phase_named("11"), model, **options)


def plain(completions: Sequence[Completion]) -> list[tuple[list[int], str | None]]:
    return [(one.token_ids, one.finish_reason) for one in completions]


def clean(engine: PagedEngine) -> None:
    check(engine)
    engine.check_integrity()
    assert engine.cache.free == engine.cache.allocator.count, "blocks leak"


def ahead_engine(
    model: Model, kind: str, folder: Any, rows: int = 2, **options: Any
) -> PagedEngine:
    """An engine whose drafter guesses inside the graphs; they are called here, not replayed."""
    path = folder / f"{kind}.safetensors"
    if kind == "head":
        save_head(head_of(model), path)
    given = {"drafter": kind, "draft_adaptive": False, "draft_length": 2}
    given |= {} if kind == "ngram" else {"draft_model": str(path)}
    given["max_rows"] = rows
    with nullcontext() if "latency" in options else only_attention():
        return load(model, **{**AHEAD, **given, **options})


@pytest.mark.long
def test_a_lone_request_is_verified_by_the_kernels_for_few(
    model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens in one kernel of attention a layer, padding included, behind its lone tokens."""
    monkeypatch.setattr(LatencyBlock, "small_batch", True)  # as where there are columns
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)
    few, seen = attention.attend_small_batch, []
    monkeypatch.setattr(
        attention,
        "attend_small_batch",
        lambda given, **more: seen.append(len(given.qkv)) or few(given, **more),
    )
    prompts, params = [[5, 6, 7]], [SamplingParams(max_tokens=6, ignore_eos=True)]
    right = continuous.load(model, max_rows=1, max_len=64).generate(prompts, params)
    fused = {"sampling": "triton", "latency": True}
    engine = ahead_engine(model, "head", tmp_path, rows=1, **fused)
    seen.clear()
    made = engine.generate(prompts, params)
    assert isinstance(engine.loop, GraphDraftingLoop) and engine.loop.drafter.replays > 1
    assert seen.count(3) >= 6, (
        f"verified in two layers, and caught up with in two others: {seen}"
    )
    assert plain(made) == plain(right), "a token differs from the engine's without drafts"
    clean(engine)


def of_few_words(model: Model) -> Model:
    """Says hardly anything but the first eight tokens."""
    own = clone(model)
    with torch.no_grad():
        own.lm_head.weight[8:] *= 0.1
    return own


def test_a_later_feature_leaves_the_loop_that_drafts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)
    options = {**AHEAD, "max_rows": 1, "drafter": "ngram", "draft_length": 1}
    engine: Any = load_engine(phase_named("12"), model, masked_graphs=True, **options)
    assert isinstance(engine.loop, GraphDraftingLoop), "steps that draft have lost their loop"
    assert engine.loop.inner.prefetchers, "inputs of masked steps are not sent early"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"), [pytest.param("head", 2, marks=pytest.mark.long), ("ngram", 9)]
)
def test_drafting_inside_the_graph_changes_no_token(
    model: Model, tmp_path: Any, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no more drafts than the decode kernel takes at a time."""
    monkeypatch.setattr(
        Capturer, "capture", lambda self, function: function
    )  # or each is called once before
    prompts, longer = [[5, 6, 7], [9] * 12, [4, 4]], 0
    if kind == "ngram":
        model, longer = of_few_words(model), 14  # or nothing ever repeats
    params = [
        SamplingParams(max_tokens=9 + longer, ignore_eos=True),
        SamplingParams(max_tokens=11 + longer, temperature=0.8, seed=1, ignore_eos=True),
        SamplingParams(
            max_tokens=5, frequency_penalty=0.5, ignore_eos=True
        ),  # ordinary steps meanwhile
    ]
    right = continuous.load(model, max_rows=2, max_len=64).generate(prompts, params)
    engine = ahead_engine(
        model, kind, tmp_path, draft_length=length, max_len=64 if length < 8 else 128
    )
    loop = engine.loop
    assert isinstance(loop, GraphDraftingLoop)
    ahead = loop.drafter
    stage = loop.drafter._stage
    overlapped = 0
    assert ahead.lengths[-1] == min(length, ahead.runner.attention.most_queries - 1)

    def checked(running: Sequence[Request], size: int, farthest: int) -> None:
        nonlocal overlapped
        overlapped += loop.in_flight is None and running[0].in_flight == 2
        for request in running:
            room = len(engine.cache.blocks_of(request.row)) * 8
            assert room >= len(request.tokens) + farthest, (
                f"request {request.id}: drafts without room"
            )
        stage(running, size, farthest)

    ahead._stage = checked  # type: ignore[method-assign]
    landed, blank = ahead.on_step_finished, 0

    def counted(work: Work, accepted: int) -> None:
        nonlocal blank
        if kind == "ngram" and id(work) in ahead.made:
            index = NGramIndex()
            index.extend(work.request.tokens[: work.start + 1])
            found = bool(index.propose(1))
            nothing = not found and work.request.finish_reason is None
            where = f"request {work.request.id}, behind token {work.start}"
            assert work.drafts or not found, f"{where}: what was guessed does not count"
            assert not nothing or accepted or not work.drafts, (
                f"{where}: a guess of nothing counts as wrong"
            )
            computed, known = work.request.num_computed_tokens, work.start + 1 + accepted
            assert work.request.row < 0 or computed == known, (
                f"{where}: {computed} computed, not {known}"
            )
            blank += nothing
        landed(work, accepted)

    ahead.on_step_finished = counted  # type: ignore[method-assign]
    got = engine.generate(prompts, params)
    assert plain(got) == plain(right), "a token differs from the engine's without drafts"
    assert ahead.replays > 3, "no step has drafted on the device"
    assert overlapped, "no step was launched before the one before it had landed"
    if kind == "ngram":
        stats = ahead.stats
        assert sum(stats.accepted) > 5, (
            f"n-grams that were found are never right: {stats.lines()}"
        )
        assert blank, "in every step something was guessed"
    clean(engine)
    clean_drafts(ahead.source)
    # One request is aborted and another comes while a step is on its way.
    (first,), (second,) = (engine.add(prompts[n], params[n], index=n) for n in (0, 1))
    while loop.in_flight is None:
        engine.step()
    engine.abort(first)
    (third,) = engine.add(prompts[2], params[2], index=2)
    while not engine.idle:
        engine.step()
    assert (
        first.finish_reason == "abort"
        and first.output_ids == right[0].token_ids[: len(first.output_ids)]
    )
    for request, expected in ((second, right[1]), (third, right[2])):
        assert request.output_ids == expected.token_ids, (
            f"request {request.id} after an abort beside it"
        )
    clean(engine)
    clean_drafts(ahead.source)
    # Two samples share a block until one of them writes, which may be in such a step.
    both = SamplingParams(max_tokens=9, temperature=0.8, seed=1, n=2, ignore_eos=True)
    expected = continuous.load(model, max_rows=2, max_len=64).generate(prompts[1:2], both)
    assert plain(engine.generate(prompts[1:2], both)) == plain(expected), (
        "samples share what they write"
    )
    clean(engine)


@pytest.mark.parametrize("at_once", [16, 1024])
def test_ngrams_on_the_device_are_those_of_the_host(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in rows of their own, and padding; what the row held before is still behind the text."""
    from phases.appendix.drafting_in_graphs import kernels as lookup

    monkeypatch.setattr(lookup, "AT_ONCE", at_once)
    rng = random.Random(3)
    k = 3
    found = 0
    for _ in range(12):
        tokens = torch.randint(
            4, (4, 90), generator=torch.Generator().manual_seed(rng.randrange(99))
        )
        texts = [
            [rng.randrange(4) for _ in range(rng.choice((1, 2, 3, 5, 17, 60)))]
            for _ in range(3)
        ]
        rows, next_at = torch.tensor([2, 0, 3, 0]), torch.zeros(4, dtype=torch.int64)
        for row, written in zip((2, 0, 3), texts, strict=True):
            tokens[row, : len(written)] = torch.tensor(written)
            next_at[row] = len(written) - 1
        before, host_output = tokens.clone(), torch.zeros(4, 2 * k + 2, dtype=torch.int64)
        at = torch.tensor(
            [5, 0, 7, -1]
        )  # where the step began, which only says who is padding
        places, chain = lookup.StepPositions(at, rows, *[at] * 8), lookup.Chain(*[at] * 5)
        lookup.Step(at, tokens, next_at, host_output, places, chain, k).look_up()
        for request, (row, written) in enumerate(zip((2, 0, 3), texts, strict=True)):
            index, size = NGramIndex(), len(written)
            index.extend(written)
            expected = index.propose(k)
            where = f"request {request}, behind {written}"
            assert host_output[request, k + 2 :].tolist() == (expected or [-1] * k), (
                f"{where}: the host is told"
            )
            assert tokens[row, size : size + k].tolist() == (expected or written[-1:] * k), (
                where
            )
            assert torch.equal(tokens[row, :size], before[row, :size]), (
                f"{where}: the text is another"
            )
            assert torch.equal(tokens[row, size + k :], before[row, size + k :]), (
                f"{where}: more was written"
            )
            found += bool(expected)
        assert torch.equal(tokens[1], before[1]), "padding has drafts"
    assert 10 < found < 36
    # Of a text that is too long to be searched, the end is.
    monkeypatch.setattr(lookup, "MOST_TOKENS", 32)
    long = torch.zeros(1, 90, dtype=torch.int64)
    long[0, :60] = torch.arange(60)
    for end, expected in (([20, 21], [-1]), ([40, 41], [42])):
        long[0, 58:60] = torch.tensor(end)
        host_output = torch.zeros(1, 4, dtype=torch.int64)
        nought = torch.zeros(1, dtype=torch.int64)
        places, chain = lookup.StepPositions(*[nought] * 10), lookup.Chain(*[nought] * 5)
        lookup.Step(nought, long, torch.tensor([59]), host_output, places, chain, 1).look_up()
        assert host_output[0, 3:].tolist() == expected, (
            f"behind {end}, which stood here {60 - end[0]} tokens before"
        )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(75, marks=pytest.mark.long)])
def test_what_stands_between_the_layers_compiles_for_a_gpu(capability: int) -> None:
    assert spilled(capability, "--ahead") == [0] * 5


def test_between_the_layers_of_a_step_that_drafts() -> None:
    """Two requests and a row of padding, two drafts each: the second is right once, then wrong."""
    from phases.appendix.drafting_in_graphs.kernels import Chain, Step, StepPositions

    k = 2
    size = 3
    count = 9
    ints = partial(torch.zeros, dtype=torch.int64)
    given = torch.tensor(
        [[3, 1, -1], [0, 2, 0], [4, 0, 0], [5, 2, 0]]
    )  # row, drafter's row, base, prompt
    next_at = torch.tensor([0, 6, 0, 9])
    at, rows, small_rows, picked = (ints(size) for _ in range(4))
    token_rows, token_at, steps, small_token_rows, small_at = (ints(count) for _ in range(5))
    contexts, small_contexts = (torch.zeros(size, dtype=torch.int32) for _ in range(2))
    small = small_rows, small_token_rows, small_at, small_contexts
    places = StepPositions(at, rows, token_rows, token_at, steps, contexts, *small)
    tokens = ints(4, 20)
    small_tokens = ints(3, 20)
    host_output = ints(size, 2 * k + 2)
    newest = ints(size)
    draft_steps = ints(k, size)
    chain_rows = ints(size)
    chain_at = ints(size)
    chain = Chain(picked, draft_steps, chain_rows, chain_at, contexts)
    step = Step(given, tokens, next_at, host_output, places, chain, k)
    step.find_positions()
    assert at.tolist() == [9, 6, -1] and rows.tolist() == [3, 1, 0]
    assert token_at.tolist() == [9, 10, 11, 6, 7, 8, -1, -1, -1], (
        "a token is read from another place"
    )
    assert small_at.tolist() == [6, 7, 8, 7, 8, 9, -1, -1, -1], (
        "the drafter goes on from another place"
    )
    assert steps.tolist()[:6] == [5, 6, 7, 5, 6, 7], (
        "a token is sampled with another step's noise"
    )
    assert contexts.tolist() == [12, 9, 3] and small_contexts.tolist() == [9, 10, 3]

    sampled = torch.tensor([70, 71, 72, 80, 81, 82, 1, 1, 1])
    ids = torch.tensor([60, 70, 79, 61, 89, 81, 0, 1, 1])  # newest, draft, draft
    step.accept(sampled, ids)
    assert host_output[:, 0].tolist()[:2] == [1, 0], (
        "a right draft does not count, or one behind a wrong draft does"
    )
    assert tokens[3].tolist()[9:13] == [0, 70, 71, 0] and tokens[1].tolist()[6:9] == [0, 80, 0]
    assert not tokens[0].any(), "padding was written"
    assert next_at.tolist() == [0, 7, 0, 11] and picked.tolist()[:2] == [1, 3]
    assert draft_steps[:, :2].tolist() == [[7, 6], [8, 7]], (
        "a draft is drawn with another step's noise"
    )
    assert chain_rows[:2].tolist() == [0, 2] and chain_at.tolist() == [8, 8, -1], (
        "the drafter goes on behind the first draft from another place"
    )
    assert contexts.tolist() == [9, 9, 0], "the drafter sees other keys"

    names = torch.arange(0, 100, 11)
    step.write_drafts(torch.tensor([3, 4, 9]), 1, names, small_tokens, newest)
    assert newest[:2].tolist() == [33, 44], "the drafter goes on from another token"
    assert (int(tokens[3, 13]), int(tokens[1, 9])) == (33, 44), (
        "a draft is verified in another place"
    )
    assert (int(small_tokens[0, 9]), int(small_tokens[2, 9])) == (33, 44), (
        "the drafter reads another draft"
    )
    assert host_output[:2, 5].tolist() == [33, 44]
    step.write_drafts(torch.tensor([33, 44, 9]), 0, None, small_tokens, newest)
    assert newest[:2].tolist() == [33, 44] and host_output[:2, 4].tolist() == [33, 44]


@pytest.mark.slow
@torch.inference_mode()
def test_a_head_inside_the_graph_drafts_what_it_would_say(
    model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels of its own: the oracle is the head's forward pass over the whole text, drafts included."""
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)
    options = {"rows": 2, "draft_length": 3, "prefix_cache": False, "max_len": 96}
    engine = ahead_engine(model, "head", tmp_path, **options)
    assert isinstance(engine.loop, GraphDraftingLoop)
    source, seen = engine.loop.drafter.source, 0
    assert isinstance(source, HeadSource)
    made, carried = source.head, source.carried

    def checked(request: Request, drafts: Sequence[int]) -> None:
        nonlocal seen
        carried(request, drafts)
        ids = torch.tensor(request.tokens)
        features = made.mix(hidden_states(model, ids, made.hooks)[:-1])
        tokens = ids[1:]
        for place, draft in enumerate(drafts):
            out = made.step(tokens, features, torch.arange(len(tokens)), RecomputeAttention())
            logits = made.logits(out[-1])
            if request.params.temperature == 0:
                assert float(logits[draft]) >= float(logits.max()) - 1e-4, (
                    f"request {request.id}, draft {place} behind {len(ids)} tokens is not the head's"
                )
            assert float(logits[draft]) > -math.inf, (
                f"request {request.id} drafts an unknown token {draft}"
            )
            tokens, features = (
                torch.cat((tokens, torch.tensor([draft]))),
                torch.cat((features, out[-1:])),
            )
            seen += 1

    source.carried = checked  # type: ignore[method-assign]
    usual = {"max_tokens": 12, "ignore_eos": True}
    engine.generate(
        [[1, 2, 3], [5] * 20],
        [SamplingParams(**usual), SamplingParams(temperature=0.8, seed=1, **usual)],
    )
    assert seen > 20


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ngram", "head"])
def test_with_real_graphs(kind: str, tmp_path: Any) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    path = tmp_path / "head.safetensors"
    save_head(head_of(model).to("cuda"), path)
    prompts, params = [[5, 6, 7], [9] * 40], SamplingParams(max_tokens=30, ignore_eos=True)
    right = cuda_graphs.load(model, max_rows=2, max_len=96).generate(prompts, params)
    options: dict[str, Any] = {
        "drafter": kind,
        "draft_adaptive": False,
        "max_rows": 2,
        "max_len": 96,
    }
    engine = load(model, **options, **({"draft_model": str(path)} if kind == "head" else {}))
    assert isinstance(engine.loop, GraphDraftingLoop)
    assert_all_same(model, right, engine.generate(prompts, params), [params, params])
    assert engine.scheduler.drafter.stats.steps > 0 and engine.loop.drafter.replays > 0

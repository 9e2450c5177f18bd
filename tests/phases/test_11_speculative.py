"""Phase 11: whoever guesses, and however wrong, the text is the same; and guessing never costs much."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

import continuous
import cuda_graphs
import forward
import speculative
from benchmarks import coupling
from common.errors import UserError
from common.events import Completion, generate
from common.models.hub import model_folder
from common.request import Request
from common.sampling.metadata import SamplingFlags
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.runner import OutputVerifier, Results, Token
from continuous.seams import NO_DRAFTS
from continuous.work import Work
from cuda_graphs.runner import GraphRunner
from forward.model import Model
from forward.surgery import clone
from paged_cache import EngineBuilder, Feature, PagedEngine, PagedSizes, Recipe
from prefix_cache import PrefixCache
from speculative import head, ngram, rejection
from speculative.control import DraftController
from speculative.draft_model import DraftModel
from speculative.feature import draft_engine
from speculative.head import WEIGHTS, HeadSource
from speculative.hidden_state_hooks import HiddenStateHooks, hooked_layers, stream
from speculative.ngram import NGramIndex, NGrams, follow
from speculative.proposer import Proposer
from speculative.speculation import SpeculativeRunner, Verifier
from speculative.stats import SpeculationStats
from speculative.verify_graph import VerifyGraphExecutor, verify_sizes
from tests.equivalence.compare import assert_all_same, next_logits
from tests.heads import clean_drafts, head_of, hidden_states, save_head
from tests.kernel_layers import only_attention
from tests.schedules import check

SMALL = {
    "max_rows": 6,
    "max_len": 96,
    "block_size": 4,
    "cache_bytes": 1 << 20,
    "step_tokens": 64,
}


def asks() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every setting that looks at a position, a step or the tokens before; some repeat themselves."""
    loop = [5, 6, 7, 8] * 5
    bias = {token: 6.0 for token in (11, 12, 13)}
    pairs: list[tuple[list[int], dict[str, Any]]] = [
        (loop, {}),
        (loop, {"temperature": 0.8, "seed": 1}),
        (loop[:3], {"temperature": 0.6, "seed": 2, "top_k": 20}),
        ([*loop, 9], {"temperature": 0.9, "seed": 3, "top_p": 0.7, "n": 2}),
        (loop, {"temperature": 0.7, "seed": 4, "min_p": 0.05, "logprobs": 2}),
        (loop, {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}),
        ([3, 1], {"temperature": 0.5, "seed": 5, "frequency_penalty": 1.5, "logprobs": 0}),
        (loop[:9], {"logit_bias": bias, "presence_penalty": 0.8}),
        (loop[:6], {"min_tokens": 9, "stop_token_ids": (11, 12, 13), "logit_bias": bias}),
        ([200] * 40, {"logprobs": 3}),
    ]
    prompts = [prompt for prompt, _ in pairs]
    defaults = {"max_tokens": 24, "ignore_eos": True}
    return prompts, [SamplingParams(**(defaults | settings)) for _, settings in pairs]


@pytest.fixture(scope="module")
def truth(model: Model) -> list[Completion]:
    return continuous.load(model, max_rows=4, max_len=96).generate(*asks())


class Scripted(Proposer):
    """A `Proposer` that knows what will come, and does something with it."""

    def __init__(
        self,
        outputs: dict[tuple[int, int], list[int]],
        change: Callable[[list[int]], list[int]],
    ):
        self.outputs = outputs
        self.change = change
        self.left = set[Request]()

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        return [self._one(*pair) for pair in zip(requests, lengths, strict=True)]

    def _one(self, request: Request, length: int) -> list[int]:
        assert request.placeholders == 0, (
            f"request {request.id} is guessed for before its tokens are known"
        )
        done = len(request.tokens) - request.prompt_len
        coming = self.outputs.get((request.index, request.sample), [])[done:]
        return self.change((coming + [1] * 99)[: length + 5])

    def on_step_finished(self, work: Work, accepted: int) -> None:
        assert 0 <= accepted <= len(work.drafts)

    def leave(self, request: Request) -> None:
        self.left.add(request)


class Forced(DraftController):
    """Drafts the most whenever `allows` says so."""

    def __init__(self, most: int, allows: Callable[[], bool]) -> None:
        super().__init__(most)
        self.allows = allows

    def decide(self, running: Sequence[Request]) -> list[int] | None:
        self.on = self.allows()
        return [self.most] * len(running) if self.on else None

    def is_gain(self, drafts: Mapping[Request, Sequence[int]], rows: int) -> bool:
        return True


RNG = random.Random(0)
SCRIPTS: dict[str, Callable[[list[int]], list[int]]] = {
    "always right, and beyond what was asked for": lambda coming: coming,
    "always wrong": lambda coming: [(token + 1) % 257 for token in coming],
    "right at first": lambda coming: coming[:2] + [(token + 1) % 257 for token in coming[2:]],
    "wrong, then right": lambda coming: [(coming[0] + 1) % 257, *coming[1:]],
    "any length": lambda coming: (coming[: RNG.randrange(5)] + [7] * 3)[: RNG.randrange(8)],
    "nothing": lambda coming: [],
}


def plain(completions: Sequence[Completion]) -> list[tuple[list[int], str | None]]:
    return [(one.token_ids, one.finish_reason) for one in completions]


def speculate(engine: PagedEngine, speculator: SpeculativeRunner) -> None:
    """As the feature does."""
    engine.scheduler.drafter = speculator
    engine.runner.verifier = Verifier(engine.scheduler.rows.tokens, speculator.source.agree)
    speculator.attach(engine)


def scripted(
    model: Model, truth: list[Completion], script: str, **options: Any
) -> PagedEngine:
    engine = speculative.load(model, **{"drafter": "none", **SMALL, **options})
    outputs = {(one.index, one.sample): one.token_ids for one in truth}
    speculator = SpeculativeRunner(
        Scripted(outputs, SCRIPTS[script]),
        options.get("draft_length", 6),
        adaptive=False,
    )
    speculate(engine, speculator)
    return engine


def clean(engine: PagedEngine) -> None:
    check(engine)
    engine.check_integrity()
    assert engine.cache.free == engine.cache.allocator.count, "blocks leak"


# Exactness.


def test_no_accepted_draft_follows_the_end_of_its_request(
    model: Model, truth: list[Completion]
) -> None:
    engine = scripted(model, truth, "always right, and beyond what was asked for")
    prompt, said = asks()[0][0], truth[0].token_ids
    ends = [said.index(token) + 1 for token in set(said)]  # the token that stops each request
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(said[end - 1],))
        for end in ends
    ]
    requests = [engine.add(prompt, each)[0] for each in params]
    outputs = [output for _ in range(99) for output in engine.step()]
    for request, end in zip(requests, ends, strict=True):
        reasons = [output.finish_reason for output in outputs if output.request is request]
        assert reasons == [None] * (end - 1) + ["stop"], (
            f"request {request.id} ends with token {end}, but was told {len(reasons)}: {reasons}"
        )
    clean(engine)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_draft_changes_a_token(
    model: Model, truth: list[Completion], script: str, overlap: bool
) -> None:
    engine = scripted(model, truth, script, overlap=overlap)
    completions = engine.generate(*asks())
    for one, right in zip(completions, truth, strict=True):
        assert plain([one]) == plain([right]), (
            f"prompt {one.index}, sample {one.sample}, drafts {script}"
        )
    clean(engine)
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    if script.startswith("always right"):
        assert stats.acceptance == 1.0, stats.lines()
        assert len(stats.drafted) == 6, "more was drafted than was asked for"
    elif script == "always wrong":
        assert stats.steps > 0 and sum(stats.accepted) == 0


@pytest.mark.parametrize(
    "script", ["always right, and beyond what was asked for", "right at first"]
)
def test_logprobs_are_those_of_the_tokens_emitted(
    model: Model, truth: list[Completion], script: str
) -> None:
    for one, right in zip(
        scripted(model, truth, script).generate(*asks()), truth, strict=True
    ):
        assert (one.logprobs is None) == (right.logprobs is None)
        for mine, theirs in zip(one.logprobs or (), right.logprobs or (), strict=True):
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4), f"prompt {one.index}"
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_tokens_behind_the_end_are_dropped(model: Model, truth: list[Completion]) -> None:
    stop = truth[0].token_ids[9]
    first = truth[0].token_ids.index(stop)
    params = SamplingParams(max_tokens=24, stop_token_ids=(stop,), ignore_eos=True)
    engine = scripted(model, truth, "always right, and beyond what was asked for")
    (done,) = engine.generate(asks()[0][:1], params)
    assert done.token_ids == truth[0].token_ids[: first + 1] and done.finish_reason == "stop"
    clean(engine)


@pytest.mark.parametrize("most", [1, 2, 3, 6, 7, 8])
def test_the_limit_holds(model: Model, truth: list[Completion], most: int) -> None:
    engine = scripted(model, truth, "always right, and beyond what was asked for")
    (done,) = engine.generate(asks()[0][:1], SamplingParams(max_tokens=most, ignore_eos=True))
    assert done.token_ids == truth[0].token_ids[:most] and done.finish_reason == "length"
    clean(engine)


@pytest.mark.parametrize("prompt_behind", [False, True], ids=["decodes", "and a prompt"])
def test_drafts_take_nobodys_place_in_a_step(
    model: Model, truth: list[Completion], prompt_behind: bool
) -> None:
    """A budget of 8 for six requests that would each take 7: every one has a token of every step."""
    options: dict[str, Any] = {"step_tokens": 8, "max_rows": 7, "overlap": False}
    engine = scripted(model, truth, "always right, and beyond what was asked for", **options)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    decodes = [engine.add([5, 6, number], params, index=0)[0] for number in range(6)]
    for _ in range(8):
        engine.step()
    for request in decodes:
        assert request.output_ids, (
            f"the drafts of others keep request {request.id} from its first token"
        )
    late = engine.add([9] * 40, params, index=1)[0] if prompt_behind else None
    for step in range(1, 16):
        before = {request.id: len(request.output_ids) for request in decodes}
        computed = late.num_computed_tokens if late else 0
        engine.step()
        for request in decodes:
            more = len(request.output_ids) - before[request.id]
            assert more or request.finish_reason, (
                f"step {step}: request {request.id} has no token"
            )
        if late and step > 1 and late.prefilling:
            assert late.num_computed_tokens >= computed + 2, (
                f"step {step}: drafts took the prompt's quarter"
            )
    assert engine.scheduler.drafter.stats.steps > 0, "nobody has guessed"  # type: ignore[attr-defined]


def test_right_drafts_save_steps(model: Model, truth: list[Completion]) -> None:
    """24 tokens: one with the prompt, then 7 at a time."""
    engine = scripted(
        model, truth, "always right, and beyond what was asked for", overlap=False
    )
    engine.generate(asks()[0][:1], asks()[1][0])
    assert engine.stats.steps == 1 + -(-23 // 7)


def test_a_request_with_penalties_is_not_guessed_for(
    model: Model, truth: list[Completion]
) -> None:
    engine = scripted(
        model, truth, "always right, and beyond what was asked for", overlap=False
    )
    prompts, params = asks()
    penalized = [place for place, one in enumerate(params) if one.penalized]
    engine.generate(
        [prompts[place] for place in penalized], [params[place] for place in penalized]
    )
    assert penalized and engine.scheduler.drafter.stats.steps == 0  # type: ignore[attr-defined]


# The real drafters, on everything.


@pytest.mark.slow
def test_the_prefix_cache_finds_as_much_as_without(model: Model) -> None:
    prompts, params = asks()
    hits = []
    for drafter in ("none", "ngram"):
        engine = speculative.load(model, drafter=drafter, draft_adaptive=False, **SMALL)
        for prompt, settings in zip(prompts * 2, params * 2, strict=True):
            engine.generate([prompt], settings)
        assert isinstance(engine.cache, PrefixCache)
        hits.append(engine.cache.stats.hit_rate)
    assert hits[0] == hits[1] > 0.3, "wrong drafts are shared, or right ones are not"


def test_a_step_waits_only_while_its_drafter_does(
    model: Model, truth: list[Completion]
) -> None:
    engine = scripted(model, truth, "nothing")
    order: list[str] = []
    launch, collect = engine.forward, engine.collect
    engine.forward = lambda works: (
        (order.append("launch"), launch(works))[1] if works else None
    )  # type: ignore
    engine.collect = lambda pending: (order.append("collect"), collect(pending))[1]  # type: ignore
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    assert order == ["launch", "collect"] * 4, (
        "a step is scheduled before the tokens before it are known"
    )
    order.clear()
    engine.scheduler.drafter.control = Forced(6, lambda: False)  # type: ignore[attr-defined]
    engine.generate([[1, 2, 3]], params)
    assert order[:3] == ["launch", "launch", "collect"], (
        "steps do not overlap, though nobody guesses"
    )


@pytest.mark.parametrize("kind", ["scripted", "head", "model"])
def test_guessing_may_begin_and_end_at_any_step(
    model: Model, truth: list[Completion], kind: str
) -> None:
    """In overlap with tokens on their way, and behind steps whose hidden states nobody kept."""
    if kind == "scripted":
        engine = scripted(model, truth, "always right, and beyond what was asked for")
    elif kind == "head":
        engine, _ = with_head(model)
    else:
        engine, _ = with_draft_model(model, small_model(model, 0.0))
    speculator = engine.scheduler.drafter
    assert isinstance(speculator, SpeculativeRunner)
    rng = random.Random(4)
    speculator.control = Forced(speculator.most, lambda: rng.random() < 0.6)
    assert plain(engine.generate(*asks())) == plain(truth)
    assert speculator.stats.steps > 0
    if kind == "scripted":
        assert speculator.stats.acceptance == 1.0
    clean(engine)


# N-grams.


def brute(tokens: list[int], orders: Sequence[int], most: int) -> list[int]:
    for order in orders:
        for end in range(len(tokens) - 1, order - 1, -1):
            if tokens[end - order : end] == tokens[-order:]:
                return follow(tokens, end, most)
    return []


def test_ngrams_are_those_of_a_search() -> None:
    rng = random.Random(1)
    for _ in range(60):
        tokens, index = [], NGramIndex()
        for _ in range(rng.randrange(1, 60)):
            tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 5))]
            index.extend(tokens)
            assert index.propose(5) == brute(tokens, ngram.NGRAM_SIZES, 5), tokens


def test_what_repeats_goes_on_repeating() -> None:
    assert follow([9, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_an_index_takes_each_token_once_and_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "MOST_TOKENS", 64)
    index, tokens = NGramIndex(), list[int]()
    for token in range(1000):
        tokens.append(token % 23)
        index.extend(tokens)
        assert len(index.tokens) < 64 and index.seen == len(tokens)
    assert index.propose(3) == [(1000 + n) % 23 for n in range(3)]


def test_a_long_prompt_is_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_NEW", 8)
    proposer, request = NGrams(), Request(0, [1, 2, 3, 4] * 5, 20, 99, SamplingParams())
    found = []
    for taken in (8, 16, 20):
        (made,) = proposer.guess([request], [2])
        assert (made is None) == (taken < 20), "None: the prompt is not taken in yet"
        found.append(made or [])
        assert proposer.indexes[request].seen == taken, (
            "a step takes in at most MOST_NEW tokens"
        )
    assert found == [[], [], [1, 2]], "the n-grams of a part of the prompt guess nothing"


def test_a_prompt_that_is_not_taken_in_yet_counts_as_no_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "MOST_NEW", 8)
    drafter, tried = SpeculativeRunner(NGrams(), 2), list[tuple[int, ...]]()
    monkeypatch.setattr(drafter.control, "add_tries", lambda _, *said: tried.append(said))
    request = Request(0, [1, 2, 3, 4] * 5, 19, 99, SamplingParams())
    for token in (1, 2, 3, 4):
        request.num_computed_tokens = len(request.tokens) - 1
        drafter._rehearse(request)
        request.tokens.append(token)
    assert tried == [(1, 1)], "two steps take the prompt in, one drafts, one compares"


def test_a_request_that_ends_with_its_next_token_is_not_indexed() -> None:
    drafter = SpeculativeRunner(source := NGrams(), 2)
    for limit in (21, 22):
        request = Request(0, [1, 2, 3, 4] * 5, 19, limit, SamplingParams())
        request.num_computed_tokens = 19
        drafter._rehearse(request)
        assert (request in source.indexes) == (limit == 22), (
            f"request 0 of 20 tokens and a limit of {limit}: the last token needs no draft"
        )


def test_stats_for_people() -> None:
    stats = SpeculationStats(marks={})
    assert stats.lines() == ["speculation: nothing was drafted"]
    stats.steps = 1  # whose request ended at its first token: no draft was judged
    assert stats.lines() == ["speculation: nothing was drafted"]
    stats.steps = 0
    request = Request(0, list(range(9)), 4, 99, SamplingParams())
    stats.count(Work(request, 0, 8, 3, (1, 2), (request,)), 1)
    first, one, two = stats.lines()
    assert first == "speculation: 2 drafts in 1 steps, 50% accepted, 2.00 tokens a step"
    assert "draft  1: 100% of 1" in one and "draft  2:   0% of 1" in two
    assert stats.marks == {(0, 0): {5}}, (
        "of request 0's output token 5 was a right draft, and 6 a wrong one"
    )


# Options.

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"drafter": "ngrams"}, "drafter is 'ngrams', .*did you mean 'ngram'"),
    "no model": ({"drafter": "model"}, "draft_model must name a model"),
    "another vocabulary": (
        {"drafter": "model", "draft_model": "random:gpt2"},
        "draft_model has 50257 token ids, but the model has 257",
    ),
    "a model that nobody reads": (
        {"draft_model": "random:tiny"},
        "draft_model is 'random:tiny', but drafter is 'ngram', which reads none: only model, head do",
    ),
    "no weights": ({"drafter": "head", "draft_model": "/nowhere"}, "there is no such file"),
    "off": ({"speculate": False, "drafter": "head"}, "switch it on with speculate=True"),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(model: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        speculative.load(model, **SMALL, **options)


def test_off_is_phase_09(model: Model) -> None:
    for options in (
        {"drafter": "none"},
        {"speculate": False},
        {"speculate": False, "drafter": "none"},
    ):
        engine = speculative.load(model, **SMALL, **options)  # type: ignore[arg-type]
        assert type(engine.loop) is type(cuda_graphs.load(model, **SMALL).loop)
        assert engine.scheduler.drafter is NO_DRAFTS


# A draft model.


def small_model(model: Model, noise: float) -> Model:
    """The model itself with a little noise in its weights: right often, not always."""
    small = forward.load_model("random:tiny", device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(3)
    for name, weight in small.named_parameters():
        own = model.get_parameter(name)
        weight.data.copy_(
            own + noise * own.std() * torch.randn(own.shape, generator=generator)
        )
    return small


def parts_of(model: Model, sizes: dict[str, Any]) -> EngineBuilder:
    builder = EngineBuilder(Recipe(model, PagedSizes(**sizes)))
    builder.model = model
    return builder


def with_draft_model(
    model: Model, small: Model, **options: Any
) -> tuple[PagedEngine, DraftModel]:
    engine = speculative.load(model, drafter="none", **{**SMALL, **options})
    sizes = {**SMALL, **{k: v for k, v in options.items() if k in SMALL}}
    source = DraftModel(draft_engine(parts_of(model, sizes), small, ()))
    speculator = SpeculativeRunner(source, 4, adaptive=False)
    speculate(engine, speculator)
    return engine, source


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
@pytest.mark.slow
def test_a_draft_model_changes_no_token(
    model: Model, truth: list[Completion], noise: float, overlap: bool
) -> None:
    engine, source = with_draft_model(model, small_model(model, noise), overlap=overlap)
    assert plain(engine.generate(*asks())) == plain(truth)
    clean(engine)
    clean_drafts(source)
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    # With penalties it drafts without them; everybody else agrees with himself, noise and all.
    assert stats.acceptance > (0.65 if noise == 0 else 0.03), stats.lines()


def beside(source: DraftModel, oracle: Callable[[list[int], int], list[int]]) -> list[int]:
    """Compare all that a source drafts with an oracle; returns the numbers of drafts, as they come."""
    guess, seen = source.guess, list[int]()

    def compared(requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        found = guess(requests, lengths)
        for request, drafts in zip(requests, found, strict=True):
            right = oracle(request.tokens, len(drafts))
            assert list(drafts) == right, (
                f"request {request.id}, drafts behind {len(request.tokens)} tokens"
            )
            seen.append(len(drafts))
        return found

    source.guess = compared  # type: ignore[method-assign]
    return seen


@torch.inference_mode()
def test_a_draft_model_drafts_what_it_would_say_to_the_whole_text(model: Model) -> None:
    """Whatever was right or wrong before: the oracle recomputes the small model's text from nothing."""
    small = small_model(model, 0.1)
    engine, source = with_draft_model(model, small)

    def recomputed(tokens: list[int], count: int) -> list[int]:
        known = list(tokens)
        for _ in range(count):
            known.append(int(next_logits(small, known).argmax()))
        return known[len(tokens) :]

    rng = random.Random(1)
    seen = beside(source, recomputed)
    # With pauses, in which tokens come that nobody has guessed.
    engine.scheduler.drafter.control = Forced(4, lambda: rng.random() < 0.5)  # type: ignore[attr-defined]
    engine.generate(
        [[1, 2, 3], [5] * 20, list(range(60))], SamplingParams(max_tokens=24, ignore_eos=True)
    )
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert sum(seen) > 20 and 0 < sum(stats.accepted) < sum(stats.drafted), (
        "all drafts were right, or none"
    )


def test_nobody_drafts_beyond_the_end_of_a_row(model: Model) -> None:
    """Requests write ahead together, but one that is nearly as long as the context may not go as far."""
    prompts = [[5, 6, 7] * 31, [1, 2, 3], [7] * 90]  # two of them have 3 and 6 tokens to go
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    engine, source = with_draft_model(model, small_model(model, 0.0))
    starts = list[int]()
    forward = source.runner.forward
    source.runner.forward = lambda works: (
        starts.extend(w.start + w.count for w in works) or forward(works)
    )  # type: ignore[method-assign, func-returns-value, assignment]
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert starts and max(starts) <= 96, "a draft is written beyond the end of a row"
    clean(engine)
    clean_drafts(source)


def test_a_draft_model_without_room_drafts_for_fewer(
    model: Model, truth: list[Completion]
) -> None:
    engine, source = with_draft_model(model, small_model(model, 0.1))
    taken = source.cache.allocator.allocate(source.cache.free - 12)
    assert plain(engine.generate(*asks())) == plain(truth)
    source.cache.allocator.release(taken)
    clean(engine)
    clean_drafts(source)


def test_preemption_and_aborts_leave_nothing_in_the_draft_model(
    model: Model, truth: list[Completion]
) -> None:
    tight = {"cache_bytes": 30 * 4 * model.config.kv_bytes_per_token(model.dtype)}
    engine, source = with_draft_model(model, small_model(model, 0.1), **tight)
    stream = engine.stream(*asks())
    for _ in range(30):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    clean_drafts(source)
    assert plain(engine.generate(*asks())) == plain(truth) and engine.scheduler.preemptions > 0
    clean(engine)
    clean_drafts(source)


def test_the_drafter_forgets_who_has_left(model: Model, truth: list[Completion]) -> None:
    engine = speculative.load(model, **SMALL)
    assert plain(engine.generate(*asks())) == plain(truth)
    drafter: Any = engine.scheduler.drafter
    kept = {
        "guesses": drafter.guesses,
        "rehearsed drafts": drafter._rehearsed,
        "rates": drafter.control._rates,
        "n-grams": drafter.source.indexes,
    }
    for what, of in kept.items():
        assert not of, (
            f"{what} of requests {[one.id for one in of]}, which have left, are kept"
        )


# A head.


def with_head(model: Model, **options: Any) -> tuple[PagedEngine, HeadSource]:
    own = clone(model)  # the hooks stay in it
    engine = speculative.load(own, drafter="none", **{**SMALL, **options})
    made = head_of(model)
    assert engine.runner.model is own
    made.room(2048)
    hooks = HiddenStateHooks(own, made.hooks, SMALL["step_tokens"])
    source = HeadSource(draft_engine(parts_of(model, SMALL), made, ()), hooks)  # type: ignore[arg-type]
    speculator = SpeculativeRunner(source, 3, adaptive=False)
    speculate(engine, speculator)
    return engine, source


@pytest.mark.parametrize("options", [{"overlap": False}, {}], ids=str)
@pytest.mark.slow
def test_a_head_changes_no_token(
    model: Model, truth: list[Completion], options: dict[str, Any]
) -> None:
    engine, source = with_head(model, **options)
    for _ in range(
        2
    ):  # the second time prefixes are found, whose hidden states nobody has seen
        assert plain(engine.generate(*asks())) == plain(truth)
        clean(engine)
        clean_drafts(source)
        assert not source._first and not source._fed and not source._count
    assert engine.scheduler.drafter.stats.steps > 0  # type: ignore[attr-defined]


def test_a_head_is_asked_again_where_there_was_no_turn(model: Model) -> None:
    """Three take turns in steps of two: who is left without one has no new hidden states in the next."""
    prompts, params = [[5, 6], [7, 8], [9, 4]], SamplingParams(max_tokens=12, ignore_eos=True)
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    engine, source = with_head(model, step_tokens=2)
    asked = list[tuple[Request, int]]()
    guess = source.guess

    def watched(requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        asked.extend((request, len(request.tokens)) for request in requests)
        return guess(requests, lengths)

    source.guess = watched  # type: ignore[method-assign]
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert len(set(asked)) < len(asked), "everybody had a turn in every step"
    clean(engine)
    clean_drafts(source)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_a_head_that_comes_back_sees_the_prompt(
    model: Model, tmp_path: Any, overlap: bool
) -> None:
    """Guessing is off for one request and on for the next: the step with its prompt has to be watched."""
    path = tmp_path / "head.safetensors"
    save_head(head_of(model), path)
    engine = speculative.load(
        model, drafter="head", draft_model=str(path), overlap=overlap, **SMALL
    )
    speculator: Any = engine.scheduler.drafter
    allowed = False
    speculator.control = Forced(speculator.most, lambda: allowed)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.generate([[5, 6, 7, 8]], params)
    assert speculator.source._first == {}, (
        "request 0: guessing was off, and somebody has watched"
    )
    allowed = True
    engine.add([9, 8, 7, 6], params)
    for _ in range(6):
        engine.step()
    assert list(speculator.source._first.values()) == [0], (
        f"request 1: of its 4 prompt tokens the head has missed {list(speculator.source._first.values())}"
    )
    assert speculator.stats.steps > 0, "request 1: nothing was guessed"


@torch.inference_mode()
@pytest.mark.parametrize("drafter", ["ngram", "head", "model"])
def test_a_warm_up_that_runs_steps_may_come_first(
    model: Model, drafter: str, tmp_path: Path
) -> None:
    """A feature of a phase below may compile its kernels so; its request gets drafts like any other."""
    found: list[list[int]] = []

    @dataclass(frozen=True)
    class Rehearsing(Feature):
        name, phase = "rehearsing", 6

        def install(self, builder: EngineBuilder) -> None:
            builder.warmups.append(lambda engine: found.append(made_up(engine)))

    def made_up(engine: PagedEngine) -> list[int]:
        return generate(engine, [[5, 6, 7] * 4], SamplingParams(max_tokens=6))[0].token_ids

    save_head(head_of(model), tmp_path / "head")
    draft_model = {"ngram": None, "head": str(tmp_path / "head"), "model": "random:tiny"}
    asked: dict[str, Any] = {"draft_adaptive": False, "draft_model": draft_model[drafter]}
    preset = speculative.PRESET.plus(on=[Rehearsing])
    engine = preset.load(model, drafter=drafter, **asked, **SMALL)
    assert found == [made_up(engine)], f"{drafter}: the warm-up's request got other tokens"


def test_a_head_drafts_what_it_would_say_to_the_whole_text(model: Model) -> None:
    """The oracle recomputes: the model's hidden states of all known tokens, then the head's own."""
    engine, source = with_head(model, prefix_cache=False)
    made = source.head

    def recomputed(known: list[int], count: int) -> list[int]:
        ids = torch.tensor(known)
        features, tokens = made.mix(hidden_states(model, ids, made.hooks)[:-1]), ids[1:]
        for _ in range(count):
            attention = forward.attention.RecomputeAttention()
            made.feed(features)
            out = made(tokens, torch.arange(len(tokens)), attention)
            tokens = torch.cat((tokens, made.logits(out[-1]).argmax()[None]))
            features = torch.cat((features, out[-1:]))
        return tokens[len(ids) - 1 :].tolist()

    seen = beside(source, recomputed)
    engine.generate(
        [[1, 2, 3], [5] * 20, list(range(70))], SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert sum(seen) > 20


@pytest.mark.slow
def test_a_head_goes_to_a_file_and_back(
    model: Model, truth: list[Completion], tmp_path: Any
) -> None:
    made, path = head_of(model), tmp_path / "head.safetensors"
    save_head(made, path)
    again = head.load(path, model)
    assert again.config.num_layers == 1
    for name, value in made.own().items():
        assert torch.allclose(value, again.own()[name], atol=1e-2), name
    defaults: dict[str, Any] = {**SMALL, "step_tokens": None}
    engine = speculative.load(
        model, drafter="head", draft_model=str(path), draft_adaptive=False, **defaults
    )
    assert plain(engine.generate(*asks())) == plain(truth)
    with pytest.raises(UserError, match="Llama family"):
        head.load(
            path, forward.load_model("random:tiny-window", device="cpu", dtype="float32")
        )


def test_a_head_reads_the_layers_that_it_was_trained_on() -> None:
    assert hooked_layers(30) == (2, 15), "SmolLM2's head has learned from these"
    assert hooked_layers(2) == (1, 1), "of a model with fewer layers there are these"
    fused = torch.full((2,), 1.0), torch.full((2,), 2.0)
    assert stream(fused).tolist() == [3.0, 3.0], (
        "a fused layer leaves its last addition to the next"
    )


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_drafter_has_the_rows_of_a_quantized_head(
    model: Model, tmp_path: Any, scheme: str, kernels: bool
) -> None:
    assert not model.config.tie_word_embeddings
    save_head(head_of(model), tmp_path / "head")
    options: dict[str, Any] = {"quantization": scheme, "head": scheme, "kernels": kernels}
    engine = speculative.load(
        model,
        drafter="head",
        draft_model=str(tmp_path / "head"),
        group_size=16,
        **options,
        **SMALL,
    )
    source = engine.scheduler.drafter.source  # type: ignore[attr-defined]
    small, whole = source.runner.model.lm_head, model.get_parameter("lm_head.weight")
    rows = whole[small.ids]
    assert small.weight.shape == rows.shape
    worst = float((small.weight - rows).abs().max() / rows.abs().max())
    assert worst < 0.1, f"{scheme}: rows of the head differ by {worst:.1e} of the largest"


@pytest.mark.parametrize(
    "says",
    [
        "no file of weights",
        "layers is 'x'",
        "ids name no tokens",
        "norm.weight is .*, but must be",
    ],
)
def test_damaged_drafters_are_refused(model: Model, tmp_path: Path, says: str) -> None:
    """A file that somebody has cut or written over."""
    path = tmp_path / "drafter.safetensors"
    save_head(head_of(model), path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        shape = json.loads(file.metadata()["drafter"])
    if says.startswith("layers"):
        shape["layers"] = "x"
    elif says.startswith("ids"):
        tensors["ids"][3] = 10**6
    else:
        tensors["norm.weight"] = tensors["norm.weight"][1:].clone()
    save_file(tensors, path, {"drafter": json.dumps(shape)})
    if says.startswith("no file"):
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=says):
        head.load(path, model)


def test_the_reduced_head_never_names_other_tokens(model: Model) -> None:
    made = head_of(model)
    logits = made.logits(torch.randn(3, model.config.hidden_size))
    assert torch.isinf(logits[:, 1::2]).all() and torch.isfinite(logits[:, ::2]).all()


QUESTIONS = (
    "Why is the sky blue?",
    "Could you write four lines about the harbour at dawn?",
    "Who was Marie Curie?",
    "What is the difference between weather and climate?",
    "Please thank my colleague for her help in two sentences.",
    "How long do I have to boil an egg?",
)


@pytest.mark.weights
@pytest.mark.long
def test_weights_that_are_shipped_load_by_default_and_guess_well() -> None:
    """On questions that nobody was trained on; the text is that of phase 09, token for token."""
    path = WEIGHTS / "smollm2-head.safetensors"
    if not path.is_file():
        pytest.skip("phases/11_speculative/weights has no head")
    folder = model_folder("smollm2")
    large = forward.load_model(str(folder), device="cpu", dtype="float32")
    tokenizer = Tokenizer(folder)
    prompts = [
        tokenizer.chat([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in QUESTIONS
    ]
    rows, params = len(prompts), SamplingParams(max_tokens=64)
    options = {"max_rows": rows, "max_len": 256, "cache_bytes": 256 << 20}
    right = continuous.load(large, max_rows=rows, max_len=256).generate(prompts, params)
    assert path.stat().st_size <= 12e6, f"{path.name} has {path.stat().st_size:,} bytes"
    engine = speculative.load(large, drafter="head", draft_adaptive=False, **options)  # type: ignore[arg-type]
    assert_all_same(large, right, engine.generate(prompts, params), [params] * rows)
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert stats.tokens_per_step >= 1.9, f"head: {stats.lines()}"
    assert (WEIGHTS / "README.md").is_file(), "the weights have no model card"


# The classical way.


def distributions(
    seed: int, vocab: int = 40, spread: float = 1.0, scale: float = 1.5
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, generator=generator) * scale
    draft = target + spread * torch.randn(vocab, generator=generator)
    return target.softmax(0).double(), draft.softmax(0).double()


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """How far counts are from probabilities, in standard deviations of chi-square."""
    expected = p * counts.sum()
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slow
def test_rejection_keeps_the_distribution(seed: int) -> None:
    p, q = distributions(seed, vocab=12)
    second, _ = distributions(seed + 50, vocab=12)
    generator = torch.Generator().manual_seed(seed)
    counts, behind = np.zeros(12), np.zeros(12)
    for _ in range(12_000):
        drafted = rejection.draw(q, generator)
        tokens = rejection.verify(torch.stack((p, second)), q[None], [drafted], generator)
        counts[tokens[0]] += 1
        if len(tokens) == 2:
            behind[tokens[1]] += 1
    assert chi_square(counts, p.numpy()) < 4, (
        "the first token is not distributed as without drafts"
    )
    assert chi_square(behind, second.numpy()) < 4, "the token behind an accepted draft is not"
    assert counts.sum() > behind.sum() > 0


def test_a_wrong_rule_would_be_seen() -> None:
    """A rejected draft replaced by a draw from p, not from the residual: chi-square sees it."""
    p, q = distributions(0, vocab=12)
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros(12)
    for _ in range(12_000):
        token = rejection.draw(q, generator)
        if torch.rand((), generator=generator) * q[token] >= p[token]:
            token = rejection.draw(p, generator)
        counts[token] += 1
    assert chi_square(counts, p.numpy()) > 8


@pytest.mark.parametrize("spread", [0.2, 0.4, 1.0])
def test_acceptance_is_near_the_optimum(spread: float) -> None:
    """No rule in which the drafter does not change the text can promise more than (1 - d) / (1 + d)."""
    gaps = []
    for seed in range(8):
        p, q = distributions(seed, vocab=500, spread=spread, scale=3.5)
        best = float(coupling.optimum(p, q))
        found = coupling.coupled(p.float(), q.float(), 4000, seed)
        promised = best / (2 - best)
        assert promised - 0.03 <= found <= best + 0.03
        assert abs(float(coupling.agreement(p, q)) - found) < 0.03, "the formula of the lesson"
        gaps.append(best - found)
    assert sum(gaps) / len(gaps) < (0.03 if spread < 0.4 else 0.06)


# Graphs, which the CPU calls instead of replaying.

PLAIN = {"sampling": "torch"}
GRAPHS = {"kernels": True, "graphs": True, "graph_tokens": 32, **PLAIN}


def test_a_request_has_graphs_for_two_four_and_all_its_tokens() -> None:
    assert verify_sizes(2, 3) == {1: [2, 4], 2: [4, 8]}, "each number of tokens once"
    assert verify_sizes(1, 6) == {1: [2, 4, 7]}


class EachSampledRequest(OutputVerifier):
    """A verifier that checks that another one has tokens for each sampled request."""

    def __init__(self, inner: OutputVerifier) -> None:
        self.inner = inner

    def write(self, works: Sequence[Work]) -> None:
        self.inner.write(works)

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        results = self.inner.accepted(works, tokens)
        sampled_requests = [
            sampled_request.id for work in works for sampled_request in work.sampled_requests
        ]
        assert len(results) == len(sampled_requests), (
            f"{len(results)} have tokens of a step, but requests {sampled_requests} take"
        )
        return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "overlap"),
    [
        ("always right, and beyond what was asked for", True),
        pytest.param("any length", False, marks=pytest.mark.long),
    ],
)
@only_attention()
def test_verify_graphs_give_the_same_tokens(model: Model, script: str, overlap: bool) -> None:
    prompts = [
        [3, 1],
        [7],
        [5, 6, 7, 8] * 3,
    ]  # the first two, without drafts, fit a graph of four tokens
    defaults = {"max_tokens": 6, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0.8, seed=1, **defaults),
        SamplingParams(**defaults),
        SamplingParams(frequency_penalty=0.5, **defaults),  # no graph samples with penalties
    ]
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    options = {"drafter": "ngram", "draft_length": 3, "max_rows": 2, **GRAPHS}
    engine = scripted(model, right, script, overlap=overlap, **options)
    engine.runner.verifier = EachSampledRequest(engine.runner.verifier)
    assert isinstance(engine.runner, GraphRunner)
    used: list[tuple[int, int, SamplingFlags]] = []
    for key, graph in engine.runner.executor(VerifyGraphExecutor).graphs.items():
        replay = graph.replay
        graph.replay = lambda key=key, replay=replay: (used.append(key), replay())[1]  # type: ignore
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert SamplingFlags.RANDOM in {features for *_, features in used}, (
        "no step that verifies was replayed"
    )
    clean(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_real_graphs_give_the_same_tokens(drafter: str, tmp_path: Any) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    options: dict[str, Any] = {"max_rows": 8, "max_len": 96}
    right = cuda_graphs.load(model, **options).generate(*asks())
    if drafter == "head":
        save_head(head_of(model).to("cuda"), tmp_path / "head")
        options["draft_model"] = str(tmp_path / "head")
    engine = speculative.load(model, drafter=drafter, draft_adaptive=False, **options)
    assert (
        isinstance(engine.runner, GraphRunner)
        and engine.runner.executor(VerifyGraphExecutor).graphs
    )
    assert_all_same(model, right, engine.generate(*asks()), asks()[1])
    assert engine.scheduler.drafter.stats.steps > 0  # type: ignore[attr-defined]
    engine.check_integrity()

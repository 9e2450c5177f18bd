"""Phase 11: whoever guesses, and however wrong, the text is the same; and guessing never costs much."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("triton")

import continuous
import cuda_graphs
import forward
import speculative
from benchmarks.workloads import PASSAGES
from chunked_prefill import ChunkedScheduler
from common.errors import UserError
from common.events import Completion
from common.models.hub import model_folder
from common.request import Request
from common.sampling import ops
from common.sampling.params import SamplingParams
from common.sampling.sampler import Feature, Sampler
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from continuous.seams import NO_DRAFTS
from continuous.work import Work
from cuda_graphs.capture import Capturer
from cuda_graphs.latency import surgery
from cuda_graphs.latency.attention import LatencyAttention
from cuda_graphs.runner import GraphRunner
from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from forward.models.llama import Llama
from forward.surgery import clone
from paged_cache import PagedEngine, PagedSizes, Parts
from phases.appendix.guidance.drafter import GrammarDrafter
from phases.cli import main
from phases.commands.benches import _module as bench_of
from phases.commands.run import Tint
from prefix_cache import PrefixCache, RadixIndex
from quant import SCHEMES, QuantLinear
from quant.export import export
from quant.kernel_layers import KernelLinear
from quant.methods import quantize_model
from speculative import feature, head, loops, ngram, rejection, suffix
from speculative.control import CREDIT, GRACE, SAMPLES, Control, Cost, Rate
from speculative.draft_model import DraftModel
from speculative.feature import draft_engine
from speculative.head import WEIGHTS, Head, HeadSource, ReducedHead
from speculative.ngram import NGramIndex, follow
from speculative.price import Price
from speculative.speculator import Speculator
from speculative.stats import SpeculationStats
from speculative.suffix import BREAK, SuffixAutomaton, Suffixes
from speculative.taps import Taps, layers_of, tapped
from speculative.training import questions, text, unroll
from speculative.training.run import main as train_drafters
from speculative.training.text import Talk
from speculative.verify import verify
from speculative.verify_graph import VerifyPlan, verify_sizes
from tests.compiling import spilled
from tests.equivalence.compare import assert_all_same, next_logits
from tests.fakes import FakeDrafter
from tests.schedules import check, fake_engine, play_seeds

SMALL = {"max_rows": 6, "max_len": 96, "block_size": 4, "cache_bytes": 1 << 20, "step_tokens": 64}


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny", device="cpu", dtype="float32")


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
    usual = {"max_tokens": 24, "ignore_eos": True}
    return prompts, [SamplingParams(**(usual | settings)) for _, settings in pairs]


@pytest.fixture(scope="module")
def truth(model: Model) -> list[Completion]:
    return continuous.load(model, max_rows=4, max_len=96).generate(*asks())


class Scripted:
    """A `Source` that knows what will come, and does something with it."""

    def __init__(self, outputs: dict[tuple[int, int], list[int]], change: Callable[[list[int]], list[int]]):
        self.outputs, self.change, self.left = outputs, change, set[Request]()

    def guess(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        return [self._one(*pair) for pair in zip(requests, lengths, strict=True)]

    def _one(self, request: Request, length: int) -> list[int]:
        assert request.placeholders == 0, f"request {request.id} is guessed for before its tokens are known"
        done = len(request.tokens) - request.prompt_len
        coming = self.outputs.get((request.index, request.sample), [])[done:]
        return self.change((coming + [1] * 99)[: length + 5])

    def landed(self, work: Work, accepted: int) -> None:
        assert 0 <= accepted <= len(work.drafts)

    def leave(self, request: Request) -> None:
        self.left.add(request)


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


def speculate(engine: PagedEngine, speculator: Speculator) -> None:
    """As the feature does."""
    engine.scheduler.drafter = speculator
    engine.loop = loops.watched(engine)
    verify(engine)
    speculator.attach(engine)


def scripted(model: Model, truth: list[Completion], script: str, **options: Any) -> PagedEngine:
    engine = speculative.load(model, **{"drafter": "none", **SMALL, **options})
    outputs = {(one.index, one.sample): one.token_ids for one in truth}
    speculator = Speculator(Scripted(outputs, SCRIPTS[script]), Control(6, adaptive=False))
    speculate(engine, speculator)
    return engine


def clean(engine: PagedEngine) -> None:
    check(engine)
    engine.check_integrity()
    assert engine.cache.free == engine.cache.allocator.count, "blocks leak"


# Exactness.


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_draft_changes_a_token(model: Model, truth: list[Completion], script: str, overlap: bool) -> None:
    engine = scripted(model, truth, script, overlap=overlap)
    completions = engine.generate(*asks())
    for one, right in zip(completions, truth, strict=True):
        assert plain([one]) == plain([right]), f"prompt {one.index}, sample {one.sample}, drafts {script}"
    clean(engine)
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    if script.startswith("always right"):
        assert stats.acceptance == 1.0, stats.lines()
        assert len(stats.drafted) == 6, "more was drafted than was asked for"
    elif script == "always wrong":
        assert stats.steps > 0 and sum(stats.accepted) == 0


@pytest.mark.parametrize("script", ["always right, and beyond what was asked for", "right at first"])
def test_logprobs_are_those_of_the_tokens_emitted(model: Model, truth: list[Completion], script: str) -> None:
    for one, right in zip(scripted(model, truth, script).generate(*asks()), truth, strict=True):
        assert (one.logprobs is None) == (right.logprobs is None)
        for place, (mine, theirs) in enumerate(zip(one.logprobs or (), right.logprobs or (), strict=True)):
            where = f"prompt {one.index}, token {place}"
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4), where
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top], where


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


def test_a_stop_string_in_the_middle_of_drafts_ends_the_text_there(
    model: Model, truth: list[Completion], tmp_path: Any
) -> None:
    letters = {f"<{token}>": token for token in range(257)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<0>"))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    said = truth[0].token_ids
    script = "always right, and beyond what was asked for"
    engine = scripted(model, truth, script, tokenizer=Tokenizer(tmp_path))
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=(f"<{said[3]}><{said[4]}>",))
    (done,) = engine.generate(asks()[0][:1], params)
    first = next(n for n in range(1, 24) if said[n - 1 : n + 1] == said[3:5])
    assert (done.token_ids, done.finish_reason) == (said[: first + 1], "stop"), (
        f"request 0 was to stop behind token {first}, in the middle of its drafts"
    )
    clean(engine)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"kv_cache": "int8"}], ids=str)
def test_quantized_weights_and_caches_say_the_same_with_drafts(
    model: Model, settings: dict[str, Any]
) -> None:
    prompts, params = [[5, 6, 7, 8] * 5, [9] * 12], SamplingParams(max_tokens=16, ignore_eos=True)
    right = speculative.load(model, drafter="none", **{**SMALL, **settings}).generate(prompts, params)
    engine = speculative.load(model, drafter="suffix", draft_adaptive=False, **{**SMALL, **settings})
    got = engine.generate(prompts, params)
    for one, other in zip(right, got, strict=True):
        assert one.token_ids == other.token_ids, f"request {one.index} with {settings} and drafts"
    assert engine.scheduler.drafter.stats.steps > 0  # type: ignore[attr-defined]
    clean(engine)


def test_priorities_and_drafts(model: Model, truth: list[Completion]) -> None:
    """One row, and a line behind it: the more urgent request goes first, and all say what they would."""
    options = {"drafter": "none", "max_rows": 1, "policy": "priority"}
    engine = scripted(model, truth, "right at first", **options)
    prompts, params = asks()
    made = [
        engine.add(prompts[n], params[n], index=n, priority=priority)[0]
        for n, priority in ((0, 5), (1, 9), (2, 1))
    ]
    while not engine.idle:
        engine.step()
    ended = sorted(made, key=lambda request: request.finished or 0.0)
    assert [request.index for request in ended] == [2, 0, 1], "a less urgent request went first"
    for request in made:
        right = next(one for one in truth if one.index == request.index)
        assert request.output_ids == right.token_ids, f"request {request.index} with drafts and priorities"


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
        assert request.output_ids, f"the drafts of others keep request {request.id} from its first token"
    late = engine.add([9] * 40, params, index=1)[0] if prompt_behind else None
    for step in range(1, 16):
        before = {request.id: len(request.output_ids) for request in decodes}
        computed = late.num_computed_tokens if late else 0
        engine.step()
        for request in decodes:
            more = len(request.output_ids) - before[request.id]
            assert more or request.finish_reason, (
                f"step {step}: the drafts of others have taken the token of request {request.id}"
            )
        if late and step > 1 and late.prefilling:
            assert late.num_computed_tokens >= computed + 2, (
                f"step {step}: drafts have taken the quarter of the budget that is kept for prompts"
            )
    assert engine.scheduler.drafter.stats.steps > 0, "nobody has guessed"  # type: ignore[attr-defined]


def test_right_drafts_save_steps(model: Model, truth: list[Completion]) -> None:
    """24 tokens: one with the prompt, then 7 at a time."""
    engine = scripted(model, truth, "always right, and beyond what was asked for", overlap=False)
    engine.generate(asks()[0][:1], asks()[1][0])
    assert engine.stats.steps == 1 + -(-23 // 7)


def test_penalties_see_the_drafts_before_a_position() -> None:
    sampler = Sampler(2, 50, "cpu")
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=1.5)
    sampler.set_row(0, params, [1, 2], [3])
    sampler.set_row(1, params, [1, 2], [3])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows, steps = torch.tensor([0, 0, 0, 1]), torch.tensor([1, 2, 3, 1])
    first = int(sampler.sample(logits[:1], rows[:1], [0], steps[:1]).tokens)
    sampler.set_row(0, params, [1, 2], [3])
    drafts = torch.tensor([[-1, -1], [first, -1], [first, 49], [-1, -1]])
    got = sampler.sample(logits, rows, rows.tolist(), steps, drafts=drafts).tokens.tolist()
    alone = Sampler(1, 50, "cpu")
    for place, before in enumerate(([3], [3, first], [3, first, 49], [3])):
        alone.set_row(0, params, [1, 2], before)
        right = int(
            alone.sample(logits[place : place + 1], rows[:1] * 0, [0], steps[place : place + 1]).tokens
        )
        assert got[place] == right, f"place {place} is penalized for other tokens than {before}"
    counted = sampler.counts[0].nonzero().flatten().tolist()
    kept = {3, got[0], got[1]} | ({got[2]} if got[1] == 49 else set())
    assert set(counted) == kept, "tokens behind a wrong draft are counted, or right ones are not"


def test_which_places_stand_behind_right_drafts() -> None:
    tokens = torch.tensor([4, 5, 6, 9, 1, 2])
    drafts = torch.tensor([[-1, -1], [4, -1], [4, 7], [-1, -1], [-1, -1], [3, -1]])
    assert ops.behind_right_drafts(tokens, drafts).tolist() == [1, 1, 0, 1, 1, 0]


# The real drafters, on everything.


@pytest.mark.parametrize("options", [{}, {"draft_adaptive": False}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafters_change_no_token(
    model: Model, truth: list[Completion], drafter: str, options: dict[str, Any]
) -> None:
    engine = speculative.load(model, drafter=drafter, **{**SMALL, **options})
    for _ in range(2):  # the second time the shared automaton knows the answers
        assert plain(engine.generate(*asks())) == plain(truth)
    clean(engine)
    if options.get("draft_adaptive") is False:
        stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
        assert sum(stats.accepted) > 0, f"{drafter} was never right"


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_preempted_requests_are_guessed_for_again(
    model: Model, truth: list[Completion], drafter: str
) -> None:
    tight = {"cache_bytes": 30 * 4 * model.config.kv_bytes_per_token(model.dtype), "draft_adaptive": False}
    engine = speculative.load(model, drafter=drafter, **{**SMALL, **tight})
    assert plain(engine.generate(*asks())) == plain(truth)
    assert engine.scheduler.preemptions > 0
    clean(engine)


@pytest.mark.slow
def test_the_prefix_cache_finds_as_much_as_without(model: Model) -> None:
    prompts, params = asks()
    hits = []
    for drafter in ("none", "suffix"):
        engine = speculative.load(model, drafter=drafter, draft_adaptive=False, **SMALL)
        for prompt, settings in zip(prompts * 2, params * 2, strict=True):
            engine.generate([prompt], settings)
        assert isinstance(engine.cache, PrefixCache)
        hits.append(engine.cache.stats.hit_rate)
    assert hits[0] == hits[1] > 0.3, "wrong drafts are shared, or right ones are not"


class Waiting(FakeDrafter, loops.Watcher):
    """Guesses at random, sometimes on and sometimes off."""

    on = True

    @property
    def waits(self) -> bool:
        return self.on

    def begin(self, running: Sequence[Request]) -> bool:
        self.on = self.rng.random() < 0.7
        return self.on


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.slow
def test_schedules_with_accepted_lengths_at_random(overlap: bool) -> None:
    drafted = accepted = 0

    def make(rng: random.Random) -> tuple[Engine, Any]:
        blocks = rng.randrange(20, 60)

        def scheduler(table: Any) -> ChunkedScheduler:
            cache = PrefixCache(4, 48, blocks, 4, RadixIndex())
            return ChunkedScheduler(table, cache, step_tokens=rng.randrange(8, 40))

        engine, runner = fake_engine(scheduler, 4, overlap=overlap)
        engine.scheduler.drafter = Waiting(rng.randrange(1000))
        engine.loop = loops.watched(engine)
        return engine, runner

    seeds = [seed for seed in range(1, 240) if seed % 3]  # in every third the player puts its own drafter
    for engine, runner in play_seeds(seeds, make):
        drafted, accepted = drafted + runner.drafted, accepted + runner.accepted
        assert engine.idle
    assert 0 < accepted < drafted


def test_a_step_waits_only_while_its_drafter_does(model: Model, truth: list[Completion]) -> None:
    engine = scripted(model, truth, "nothing")
    order: list[str] = []
    launch, collect = engine.forward, engine.collect
    engine.forward = lambda works: (order.append("launch"), launch(works))[1] if works else None  # type: ignore
    engine.collect = lambda pending: (order.append("collect"), collect(pending))[1]  # type: ignore
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    assert order == ["launch", "collect"] * 4, "a step is scheduled before the tokens before it are known"
    order.clear()
    engine.scheduler.drafter._on = False  # type: ignore[attr-defined]
    engine.scheduler.drafter.control.decide = lambda rows: False  # type: ignore[attr-defined]
    engine.generate([[1, 2, 3]], params)
    assert order[:3] == ["launch", "launch", "collect"], "steps do not overlap, though nobody guesses"


@pytest.mark.parametrize("kind", ["scripted", "head", "model"])
def test_guessing_may_begin_and_end_at_any_step(model: Model, truth: list[Completion], kind: str) -> None:
    """In overlap with tokens on their way, and behind steps whose hidden states nobody kept."""
    if kind == "scripted":
        engine = scripted(model, truth, "always right, and beyond what was asked for")
    elif kind == "head":
        engine, _ = with_head(model)
    else:
        engine, _ = with_draft_model(model, small_model(model, 0.0))
    speculator = engine.scheduler.drafter
    assert isinstance(speculator, Speculator)
    rng = random.Random(4)
    speculator.control.decide = lambda rows: rng.random() < 0.6  # type: ignore[method-assign]
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
            assert index.propose(5) == brute(tokens, ngram.ORDERS, 5), tokens


def test_what_repeats_goes_on_repeating() -> None:
    assert follow([9, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_an_index_takes_each_token_once_and_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_TOKENS", 64)
    index, tokens = NGramIndex(), list[int]()
    for token in range(1000):
        tokens.append(token % 23)
        index.extend(tokens)
        assert len(index.tokens) < 64 and index.seen == len(tokens)
    assert index.propose(3) == [(1000 + n) % 23 for n in range(3)]


# Suffixes.


def longest(tokens: list[int]) -> int:
    """The longest end of `tokens` that stands in it before."""
    for length in range(len(tokens) - 1, 0, -1):
        if any(tokens[at : at + length] == tokens[-length:] for at in range(len(tokens) - length)):
            return length
    return 0


def test_a_suffix_automaton_finds_the_longest_repeated_end() -> None:
    rng = random.Random(2)
    for size in (2, 3, 5):
        tokens, automaton = [], SuffixAutomaton()
        for _ in range(80):
            tokens.append(rng.randrange(size))
            automaton.add(tokens[-1])
            length, end = automaton.repeated()
            assert length == longest(tokens), tokens
            assert tokens[end - length : end] == tokens[len(tokens) - length :] and end < len(tokens), tokens
            assert automaton.repeated() == (length, end), "asked twice, it answers two things"
        assert len(automaton.next) <= 2 * len(tokens) + 1, "more than two states a token"


def test_a_shared_automaton_matches_texts_but_not_across_them() -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(4) for _ in range(25)] for _ in range(6)]
    automaton = SuffixAutomaton()
    for told in texts:
        for token in (*told, BREAK):
            automaton.add(token)
    for _ in range(200):
        query = [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        length, end = automaton.match(query)
        best = max(
            n
            for n in range(len(query) + 1)
            if n == 0 or any(query[-n:] == told[at : at + n] for told in texts for at in range(26 - n))
        )
        assert length == best, query
        assert length == 0 or automaton.tokens[end - length : end] == query[-length:], query


def ended(tokens: list[int], salt: str = "") -> Request:
    request = Request(0, tokens, 1, 999, SamplingParams(), salt=salt)
    request.finish_reason = "stop"
    return request


def test_texts_are_shared_within_a_salt_and_bounded_in_bytes() -> None:
    source = Suffixes(2000 * suffix.BYTES_PER_TOKEN)
    told = ended([1, 2, 3, 4, 5, 6, 7], "a")
    source.guess([told], [3])
    source.leave(told)
    mine, theirs = (Request(1, [9, 2, 3, 4], 4, 99, SamplingParams(), salt=salt) for salt in "ab")
    assert source.guess([mine, theirs], [3, 3]) == [[5, 6, 7], []], "a tenant sees another's text"
    for number in range(40):
        other = ended([number + 10] * 3 + list(range(100, 300)))
        source.guess([other], [1])
        source.leave(other)
        assert source.shared_bytes <= 2000 * suffix.BYTES_PER_TOKEN


def test_a_preempted_request_leaves_nothing_to_others() -> None:
    source = Suffixes(1 << 20)
    request = Request(0, [1, 2, 3, 4, 5], 2, 99, SamplingParams())
    source.guess([request], [1])
    source.leave(request)
    assert source.shared_bytes == 0 and not source.own


# How many to guess.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(rate: float, plain: float, slope: float, fixed: float, rows: int, steps: int = 4000) -> float:
    """Seconds a token with guessing over seconds a token without, for steps of known cost."""
    control, rng, spent, tokens = Control(8), random.Random(0), 0.0, 0
    requests = [Request(n, [1], 1, 10**9, SamplingParams()) for n in range(rows)]
    cost = control.cost(rows)
    for _ in range(steps):
        if control.decide(rows):
            lengths = control.lengths(requests, rows)
            seconds = plain + fixed + slope * sum(lengths)
            came = 0
            for request, length in zip(requests, lengths, strict=True):
                accepted = 0
                while accepted < length and rng.random() < rate:
                    accepted += 1
                came += accepted + 1
                if length:
                    control.saw(request, length, accepted)
            cost.saw_drafts(seconds, rows, sum(lengths), came)
        else:
            seconds, came = plain, rows
            cost.saw_plain(seconds)
        spent, tokens = spent + seconds, tokens + came
    return spent / tokens / (plain / rows)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.4])
def test_guessing_in_vain_costs_at_most_three_percent(rows: int, fixed: float) -> None:
    slope = 0.05 + 0.9 * rows / 256
    steps = 4000 if rows < 64 else 600
    assert simulate(0.0, 1.0, slope / rows, fixed, rows, steps) < 1.03


def test_guessing_pays_where_it_is_right() -> None:
    assert simulate(0.95, 1.0, 0.02, 0.1, 1) < 0.3
    assert simulate(0.8, 1.0, 0.02, 0.1, 4, 2000) < 0.5


def test_where_a_draft_costs_as_much_as_a_token_nobody_guesses() -> None:
    assert simulate(0.7, 1.0, 1.0, 0.0, 1) < 1.03


def clocked(model: Model, script: str, took: Callable[[Any], float]) -> tuple[PagedEngine, Speculator, Clock]:
    """An engine that runs ahead, whose steps take as many seconds as `took` says of each when it lands."""
    engine = scripted(model, [], script)
    speculator = engine.scheduler.drafter
    assert isinstance(speculator, Speculator)
    speculator.control, clock = Control(4), Clock()
    speculator.clock, speculator._on, speculator.in_turn = clock, False, False
    collect = engine.collect

    def timed(pending: Any) -> None:
        clock.now += took(pending)
        collect(pending)

    engine.collect = timed  # type: ignore[method-assign]
    return engine, speculator, clock


def test_real_steps_are_accounted_for_where_they_belong(model: Model) -> None:
    """With the clock of a device that takes a second a step, and 0.1 more for each draft: overlap and all."""
    engine, speculator, clock = clocked(
        model, "always wrong", lambda pending: 1.0 + 0.1 * sum(len(work.drafts) for work in pending.works)
    )
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=90, ignore_eos=True))
    assert list(speculator.control.costs) == [1], "the steps of one request are booked for more"
    cost = speculator.control.costs[1]
    assert cost.plain == pytest.approx(1.0), "steps without drafts take a second"
    assert sum(cost.price.line(1, 0.1)) == pytest.approx(0.1) and speculator.stats.steps > 0
    assert clock.now < 1.04 * 91, "guessing in vain has cost more than it may"


def test_who_has_nothing_to_guess_does_not_make_steps_wait(model: Model) -> None:
    """The first steps are slow, so that steps that wait for the one before look fast. Seen on an H200: a
    drafter stayed on for good without a single draft, and every step took half as long again."""
    waited = steps = 0

    def took(pending: Any) -> float:
        nonlocal waited, steps
        steps += 1
        waited += speculator.waits and steps > 300
        return 3.0 if steps < 3 else 1.5 if speculator.waits or steps < 8 else 1.0

    engine, speculator, _clock = clocked(model, "nothing", took)
    for _ in range(10):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=90, ignore_eos=True))
    assert waited < 60, f"request 0: {waited} of the last 600 steps waited for the one before, with no drafts"


def test_where_the_device_is_the_host_a_slow_moment_is_not_blamed_on_guessing(model: Model) -> None:
    """Steps overlap with nothing there, so one without drafts takes what it takes without guessing. Seen on
    two cores that did something else meanwhile: a head that had nothing to say was off for 600 tokens."""
    steps = 0

    def took(pending: Any) -> float:
        nonlocal steps
        steps += 1
        return 2.0 if 60 <= steps < 160 else 1.0

    engine, speculator, _clock = clocked(model, "nothing", took)
    speculator._watches = speculator._on = speculator.in_turn = True
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for number in range(8):
        engine.generate([[1, 2, 3]], params)
        assert speculator.waits, f"request {number}: guessing has paid for what the machine did meanwhile"
        if number in (2, 7):
            seen, now = speculator.control.costs[1].plain, 2.0 if number == 2 else 1.0
            assert seen == pytest.approx(now, rel=0.02), f"request {number}: plain steps take {now} s now"


@pytest.mark.parametrize("script", ["nothing", "always wrong"])
def test_who_watches_is_judged_by_steps_that_do_not_wait(model: Model, script: str) -> None:
    """A head sees its first request from the prompt on, so that all steps of it wait, and are slow."""
    steps = list[bool]()

    def took(pending: Any) -> float:
        steps.append(speculator.waits)
        return (1.5 if speculator.waits else 1.0) + 0.1 * sum(len(work.drafts) for work in pending.works)

    engine, speculator, clock = clocked(model, script, took)
    speculator._watches = speculator._on = True
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    assert all(steps), "request 0: a step was not watched"
    assert speculator.control.costs[1].plain == pytest.approx(1.5)
    engine.generate([[1, 2, 3]], params)
    assert speculator.control.costs[1].plain == pytest.approx(1.0), (
        "request 1: guessing is compared with steps that wait for each other"
    )
    for _ in range(4):
        engine.generate([[1, 2, 3]], params)
    before = clock.now
    for number in range(5):
        steps.clear()
        engine.generate([[1, 2, 3]], params)
        turned_on = sum(after and not before for before, after in pairwise(steps))
        assert not turned_on, f"request {6 + number}: guessing has begun in the middle of it"
    assert clock.now - before < 1.03 * 5 * 41, "guessing in vain has cost more than it may"


@pytest.mark.parametrize(("watched", "first", "last"), [(True, 6, 8), (False, 1, 2)])
def test_a_few_wrong_drafts_at_the_beginning_say_little(watched: bool, first: int, last: int) -> None:
    """To a head that comes back with a new request only. Others may try again at once."""
    cost, lost = Cost(), 0
    for _ in range(SAMPLES):
        cost.saw_plain(1.0, waited=watched)
    assert cost.decide()
    for _ in range(GRACE):
        cost.saw_drafts(1.6, 1, 4, 1)
    while cost.decide():
        cost.saw_drafts(1.6, 1, 4, 1)
        lost += 1
    assert first <= lost <= last, (
        f"guessing was off after {lost} wrong guesses, each of which costs 0.6 steps"
    )
    cost.unsure = 0
    cost.saw_plain(1.0)
    assert not cost.decide(), "guessing has its first credit again"


def test_a_cost_table_learns_slopes_and_ignores_interruptions() -> None:
    cost = Cost()
    for seconds in (1.0, 1.0, 30.0, 1.0, 1.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        cost.saw_plain(seconds)
    assert cost.plain < 1.1, "one step that was interrupted spoils the table"
    for drafts in (8, 4, 8, 2) * 4:
        cost.saw_drafts(cost.plain + 0.3 + 0.05 * drafts, 2, drafts, 2)
    fixed, each = cost.price.line(2, 0.1)
    assert fixed == pytest.approx(0.3, abs=0.06), "what it costs to have any drafts is not told apart"
    assert each == pytest.approx(0.05, abs=0.015), "a draft more costs something else"


def test_a_line_begins_at_no_cost_until_something_else_is_seen() -> None:
    price = Price()
    assert price.line(3, 0.1) == pytest.approx((0.0, 0.1)), "nothing was seen, and something is known"
    for _ in range(20):
        price.saw(4, 0.6)
    fixed, each = price.line(1, 0.1)
    assert fixed < 0.01 and each == pytest.approx(0.15, rel=0.05), "each of four may cost a fourth"
    price.saw(2, 0.6)
    price.saw(2, 0.6)
    fixed, each = price.line(1, 0.1)
    assert fixed > 0.3 and each < 0.08, "two cost as much as four: it is having any that costs"
    price.saw(8, 0.3)
    fixed, each = price.line(1, 0.1)
    assert each == 0.001 and 0.3 < fixed < 0.6, "more drafts are faster, which cannot be"
    price.forget(0.999)
    assert price.line(1, 0.1) == pytest.approx((0.0, 0.1), abs=0.01), "what is old is still believed"


def of_known_price(fixed: float, each: float, rows: int = 1) -> Control:
    """Its plain steps take a second."""
    control = Control(8)
    for _ in range(SAMPLES):
        control.cost(rows).saw_plain(1.0)
    for drafts in (1, 8, 4, 2) * 10:
        control.cost(rows).price.saw(drafts, fixed + each * drafts)
    control.cost(rows).tried = GRACE
    return control


@pytest.mark.parametrize(
    ("fixed", "each", "chance", "expected"),
    [
        (0.0, 0.2, 0.8, 7),  # 0.8 ** 7 is 0.21
        (0.0, 0.2, 0.1, 0),
        (0.0, 0.01, 0.98, 8),
        (0.6, 0.02, 0.3, 0),  # nine are worth 0.43
        (0.6, 0.02, 0.5, 5),  # 0.5 ** 5 is 0.03, and five are worth 0.97
        (0.2, 0.3, 0.45, 0),  # the first is worth its 0.3, but not the 0.2 of having any
    ],
)
def test_as_many_as_pay(fixed: float, each: float, chance: float, expected: int) -> None:
    control, request = of_known_price(fixed, each), Request(0, [1], 1, 99, SamplingParams())
    rate = control.rates[request]
    rate.right, rate.tried = 1e6 * chance, 1e6
    assert control.lengths([request], 1) == [expected], f"each is right with a chance of {chance}"


def test_having_any_drafts_is_paid_by_all_requests_together() -> None:
    control = of_known_price(0.3, 0.001, rows=4)
    requests = [Request(n, [1], 1, 99, SamplingParams()) for n in range(4)]
    for request in requests:
        control.rates[request].right, control.rates[request].tried = 0.3e6, 1e6
    assert all(control.lengths(requests, 4)), "0.43 of a token, or 0.11 s, are not worth a fourth of 0.3"


def test_who_was_wrong_is_tried_again() -> None:
    """Drafts of the first requests are all wrong, half of those of later ones are right."""
    for wrong in (200, 4000):
        rng = random.Random(0)
        control, spent, steps = Control(4), 0.0, 0
        cost = control.cost(1)
        for number in range(wrong // 100 + 40):
            request = Request(number, [1], 1, 10**9, SamplingParams())
            come, began = 0, spent
            while come < 100:
                steps += 1
                length = control.lengths([request], 1)[0] if control.decide(1) else 0
                right = rng.choice((0, 4)) if number >= wrong // 100 else 0
                if length:
                    control.saw(request, length, min(right, length))
                seconds = 1.0 + 0.4 * (length > 0)
                if cost.on:
                    cost.saw_drafts(seconds, 1, length, 1 + min(right, length))
                else:
                    cost.saw_plain(seconds)
                spent, come = spent + seconds, come + 1 + min(right, length)
            control.leave(request)
        taken = (spent - began) / come
        assert taken < 0.6, f"after {wrong} wrong steps and 4000 others a token takes {taken:.2f} steps"


def test_steps_without_drafts_that_wait_are_not_free() -> None:
    """Having drafts costs 0.6 of a step. But guessing is on, and a step without any takes 0.5 more, too."""
    control, request = of_known_price(0.6, 0.02), Request(0, [1], 1, 99, SamplingParams())
    rate = control.rates[request]
    rate.right, rate.tried = 0.3e6, 1e6
    assert control.lengths([request], 1) == [0]
    for _ in range(40):
        control.cost(1).saw_drafts(1.5, 1, 0, 1)
    assert control.lengths([request], 1) == [3], "a step that waits for nothing is what it is compared with"


def test_what_was_measured_grows_old() -> None:
    """One step was interrupted, or the first few drafts were wrong: that is not believed for ever."""
    for spoilt in ("price", "rate"):
        control = of_known_price(0.0, 0.1)
        if spoilt == "price":
            for drafts in (1, 8, 4, 2):
                control.cost(1).price.saw(drafts, 30.0)
        else:
            for _ in range(9):
                control.overall.saw(4, 0)
        request = Request(0, [1], 1, 99, SamplingParams())
        assert control.lengths([request], 1) == [0], f"the {spoilt} is such that no draft pays"
        asked = 1
        while control.lengths([request], 1) == [0]:
            asked += 1
            assert asked < 400, f"after 400 steps without drafts the {spoilt} is still believed"
        assert asked > 20, f"the {spoilt} is forgotten at once"


def test_a_step_counts_for_twice_what_was_expected_at_most() -> None:
    """One that was interrupted may not use up what guessing may lose; dear drafts are found out anyway."""
    cost = Cost()
    for _ in range(SAMPLES):
        cost.saw_plain(1.0)
    for drafts, longest in ((4, 2.8), (0, 2.0)):
        counts = cost.longest(1, drafts)
        assert counts == pytest.approx(longest), f"a step with {drafts} drafts counts for up to {counts:.1f}"
    cost.tried = GRACE
    for _ in range(6):
        cost.saw_drafts(min(1.6, cost.longest(1, 4)), 1, 4, 3)
    assert cost.longest(1, 4) == pytest.approx(3.2, abs=0.2), "1.6 plain steps are expected"
    believed = []
    for _ in range(12):
        believed.append(min(9.0, cost.longest(1, 4)))
        cost.saw_drafts(believed[-1], 1, 4, 1)
    assert believed[0] < 3.5 and believed[-1] > 6, f"steps of 9.0 count for {[round(b, 1) for b in believed]}"


def test_another_try_begins_anew() -> None:
    control = of_known_price(0.0, 0.1)
    request, cost = Request(0, [1], 1, 99, SamplingParams()), control.cost(1)
    assert control.decide(1)
    for _ in range(30):
        control.saw(request, 4, 0)
    cost.lost = cost.seconds
    assert not control.decide(1), "all is lost, and nobody stops"
    assert control.lengths([request], 1) == [0]
    while not control.decide(1):
        cost.saw_plain(1.0)
    assert control.lengths([request], 1)[0] > 0, "another try, in which nobody guesses"


def test_the_account_looks_back_some_thousand_steps() -> None:
    """An engine that has served for days neither loses 2 % of them at once nor waits as long to try again."""
    control = of_known_price(0.0, 0.1)
    cost = control.cost(1)
    for _ in range(40_000):
        control.decide(1)
        cost.saw_plain(1.0)
    lost = waited = 0
    while control.decide(1):
        cost.saw_drafts(2.0, 1, 1, 1)
        lost += 1
    assert 40 < lost < 120, f"{lost} steps in vain, after 40,000 others, before guessing is off"
    while not control.decide(1):
        cost.saw_plain(1.0)
        waited += 1
    assert 1000 < waited < 8000, f"another try after {waited} steps"


def test_the_first_steps_have_few_drafts() -> None:
    control, request = of_known_price(0.0, 0.001), Request(0, [1], 1, 99, SamplingParams())
    found, control.cost(1).tried = [], 0
    for _ in range(5):
        found += control.lengths([request], 1)
        control.cost(1).saw_drafts(1.0, 1, found[-1], 1)
    assert found == [1, 2, 4, 8, 8]


def test_all_requests_are_asked_at_once() -> None:
    """What a step costs is worked out once for all of them: one by one took a millisecond."""
    control = of_known_price(0.1, 0.001, rows=256)
    requests = [Request(n, [1], 1, 99, SamplingParams()) for n in range(256)]
    lines, line = 0, control.cost(256).price.line

    def counted(rows: int, first: float) -> tuple[float, float]:
        nonlocal lines
        lines += 1
        return line(rows, first)

    control.cost(256).price.line = counted  # type: ignore[method-assign]
    assert len(control.lengths(requests, 256)) == 256 and lines == 1


def test_gains_may_not_be_gambled_away() -> None:
    cost = Cost()
    for _ in range(8):
        cost.saw_plain(1.0)
    for _ in range(1000):
        cost.saw_drafts(1.0, 1, 4, 5)
    assert cost.lost == -CREDIT


def test_rates_follow_what_is_accepted() -> None:
    rate = Rate(0.7)
    assert rate.value == 0.7
    for _ in range(60):
        rate.saw(4, 4)
    assert rate.value > 0.95
    for _ in range(60):
        rate.saw(4, 0)
    assert rate.value < 0.25
    for _ in range(90):
        rate.saw(8, 1)  # one was right, one was wrong, and nobody knows about the other six
    assert rate.value == pytest.approx(0.5, abs=0.05)
    for _ in range(400):
        rate.forget(0.03, 0.9)
    assert rate.value == pytest.approx(0.9, abs=0.01), "what nobody has tried for long is still believed"


# Stats.


def test_stats_by_position_and_marks(model: Model) -> None:
    stats = SpeculationStats(marks={})
    request = Request(0, list(range(9)), 4, 99, SamplingParams(), index=3, sample=1)
    stats.count(Work(request, 0, 8, 4, (1, 2, 3), (request,)), 2)
    stats.count(Work(request, 0, 11, 2, (1,), (request,)), 0)
    assert (stats.drafted, stats.accepted) == ([2, 1, 1], [1, 1, 0])
    assert stats.tokens_per_step == 2.0 and stats.acceptance == 0.5
    assert stats.marks == {(3, 1): {5, 6}}, (
        "the first draft of token 8's step is token 9, place 5 of the output"
    )


def test_accepted_tokens_are_tinted() -> None:
    stats = SpeculationStats()
    tint = Tint(stats)
    request = Request(0, list(range(9)), 4, 99, SamplingParams())
    stats.count(Work(request, 0, 8, 3, (1, 2), (request,)), 1)
    shown = [tint("x", 0, place) for place in (4, 5, 6)]
    assert shown == ["x", "\x1b[32mx\x1b[0m", "x"], "place 5 was guessed and accepted, and no other"
    assert tint("x", 1, 5) == "x", "another prompt's token"


def test_stats_for_people() -> None:
    stats = SpeculationStats()
    assert stats.lines() == ["speculation: nothing was drafted"]
    request = Request(0, list(range(9)), 4, 99, SamplingParams())
    stats.count(Work(request, 0, 8, 3, (1, 2), (request,)), 1)
    first, one, two = stats.lines()
    assert first == "speculation: 2 drafts in 1 steps, 50% accepted, 2.00 tokens a step"
    assert "draft  1: 100% of 1" in one and "draft  2:   0% of 1" in two


def test_what_is_synthetic_says_so(model: Model) -> None:
    engine = speculative.load(
        model, drafter="synthetic", draft_accept=2.5, draft_adaptive=False, draft_length=3, **SMALL
    )
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9, ignore_eos=True))
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert stats.lines()[0].startswith("speculation, synthetic acceptance of 2.5 drafts a step: ")
    assert SpeculationStats().mark == "", "guesses that were verified are marked as synthetic"


@pytest.mark.weights
@pytest.mark.slow
def test_synthetic_numbers_are_marked_where_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--drafter", "synthetic", "--max-tokens", "8", "--device", "cpu", "--prompt", "Hello"]
    with pytest.raises(SystemExit) as ended:
        main(["run", "11", *asked])
    assert ended.value.code == 0
    assert "by synthetic acceptance of 3 drafts a step" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "11", *asked, "--json"])
    assert json.loads(capsys.readouterr().out)["speculation"] == "synthetic acceptance of 3 drafts a step"


def test_stats_and_tints_reach_through_grammars(model: Model) -> None:
    """`--stats` and `Tint` ask the scheduler's drafter, and phase 12 puts another one around ours."""
    speculator = Speculator(ngram.NGrams(), Control(4))
    assert GrammarDrafter(speculator).stats is speculator.stats
    assert GrammarDrafter().stats.lines() == ["speculation: nothing was drafted"]


def test_stats_are_for_phases_that_guess(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "09", "--stats", "--device", "cpu"])
    assert ended.value.code == 2
    assert "--stats is for phases from 11 on, but the phase is 09_cuda_graphs" in capsys.readouterr().err


# Options.

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"drafter": "ngrams"}, "drafter is 'ngrams', .*did you mean 'ngram'"),
    "length": ({"draft_length": 0}, "draft_length is 0, but must be between 1 and 32"),
    "bytes": ({"suffix_bytes": -1}, "suffix_bytes is -1"),
    "no model": ({"drafter": "model"}, "draft_model must name a model"),
    "another vocabulary": (
        {"drafter": "model", "draft_model": "random:gpt2"},
        "draft_model has 50257 token ids, but the model has 257",
    ),
    "a model that nobody reads": (
        {"draft_model": "random:tiny"},
        "draft_model is 'random:tiny', but drafter is 'ngram', which reads none: only model, head, layers do",
    ),
    "no weights": ({"drafter": "head", "draft_model": "/nowhere"}, "there is no such file"),
    "off": ({"speculate": False, "drafter": "suffix"}, "switch it on with speculate=True"),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(model: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        speculative.load(model, **SMALL, **options)


def test_off_is_phase_09(model: Model) -> None:
    for options in ({"drafter": "none"}, {"speculate": False}, {"speculate": False, "drafter": "none"}):
        engine = speculative.load(model, **SMALL, **options)  # type: ignore[arg-type]
        assert type(engine.loop) is type(cuda_graphs.load(model, **SMALL).loop)
        assert engine.scheduler.drafter is NO_DRAFTS


# Synthetic acceptance.


@pytest.mark.parametrize("accept", [0.0, 1.0, 2.5, 3.0])
def test_synthetic_acceptance_is_what_was_asked_for(model: Model, accept: float) -> None:
    engine = speculative.load(
        model, drafter="synthetic", draft_accept=accept, draft_adaptive=False, draft_length=3, **SMALL
    )
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=81, ignore_eos=True))
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert stats.tokens_per_step == pytest.approx(1 + accept, abs=0.2)
    clean(engine)


# A draft model.


def small_model(model: Model, noise: float) -> Model:
    """The model itself with a little noise in its weights: right often, not always."""
    small = forward.load_model("random:tiny", device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(3)
    for name, weight in small.named_parameters():
        own = model.get_parameter(name)
        weight.data.copy_(own + noise * own.std() * torch.randn(own.shape, generator=generator))
    return small


def with_draft_model(model: Model, small: Model, **options: Any) -> tuple[PagedEngine, DraftModel]:
    engine = speculative.load(model, drafter="none", **{**SMALL, **options})
    parts = Parts(model, PagedSizes(**{**SMALL, **{k: v for k, v in options.items() if k in SMALL}}))
    source = DraftModel(draft_engine(parts, small, ()))
    speculator = Speculator(source, Control(4, adaptive=False))
    speculate(engine, speculator)
    return engine, source


def clean_drafts(source: DraftModel | None) -> None:
    if source is None:
        return
    assert not source.shadows, "a request that has ended is still in the draft model"
    assert source.cache.free == source.cache.allocator.count, "blocks of the draft model leak"
    assert source.rows.free == source.rows.count, "rows of the draft model leak"
    source.cache.check()


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


def test_the_model_itself_as_its_drafter_is_always_right(model: Model) -> None:
    engine, source = with_draft_model(model, small_model(model, 0.0))
    prompts = [[1, 2, 3], [4, 5] * 9, [7]]
    params = [
        SamplingParams(max_tokens=30, temperature=0.9, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=1.2, top_k=9, seed=1, ignore_eos=True),
    ]
    engine.generate(prompts, params)
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert stats.acceptance == 1.0, stats.lines()
    clean_drafts(source)


@torch.inference_mode()
def test_a_draft_model_drafts_what_it_would_say_to_the_whole_text(model: Model) -> None:
    """Whatever was right or wrong before: the oracle recomputes the small model's text from nothing."""
    small = small_model(model, 0.1)
    engine, source = with_draft_model(model, small)
    guess, seen = source.guess, 0

    def checked(requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        nonlocal seen
        found = guess(requests, lengths)
        for request, drafts in zip(requests, found, strict=True):
            tokens = list(request.tokens)
            for place, draft in enumerate(drafts):
                right = int(next_logits(small, tokens).argmax())
                assert draft == right, (
                    f"request {request.id}: draft {place} behind {len(request.tokens)} tokens"
                )
                tokens.append(draft)
                seen += 1
        return found

    source.guess = checked  # type: ignore[method-assign]
    rng = random.Random(1)  # with pauses, in which tokens come that nobody has guessed
    engine.scheduler.drafter.control.decide = lambda rows: rng.random() < 0.5  # type: ignore[attr-defined]
    engine.generate([[1, 2, 3], [5] * 20, list(range(60))], SamplingParams(max_tokens=24, ignore_eos=True))
    stats = engine.scheduler.drafter.stats  # type: ignore[attr-defined]
    assert seen > 20 and 0 < sum(stats.accepted) < sum(stats.drafted), "all drafts were right, or none"


def test_nobody_drafts_beyond_the_end_of_a_row(model: Model) -> None:
    """Requests write ahead together, but one that is nearly as long as the context may not go as far."""
    prompts = [[5, 6, 7] * 31, [1, 2, 3], [7] * 90]  # two of them have 3 and 6 tokens to go
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    engine, source = with_draft_model(model, small_model(model, 0.0))
    chains = list[tuple[int, int]]()

    def chain(works: list[Work], steps: int) -> None:
        chains.extend((work.start, steps) for work in works)

    source._chain = chain  # type: ignore[method-assign]
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert chains and all(start + steps < 96 for start, steps in chains), "a graph would write beyond a row"
    clean(engine)
    clean_drafts(source)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_a_draft_model_may_be_a_quantized_checkpoint(tmp_path: Any, kernels: bool) -> None:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(vocab_size=128, num_hidden_layers=2, max_position_embeddings=128, **shape)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    made = forward.load_model(str(tmp_path / "plain"), device="cpu", dtype="float32")
    quantize_model(made, SCHEMES["int8"])
    export(made, tmp_path / "plain", tmp_path / "int8")
    prompts, params = [[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True)
    options = SMALL | {"kernels": kernels, "latency": False, "device": "cpu", "draft_adaptive": False}
    right = speculative.load(str(tmp_path / "plain"), **options, drafter="none").generate(prompts, params)
    engine = speculative.load(
        str(tmp_path / "plain"), **options, drafter="model", draft_model=str(tmp_path / "int8")
    )
    source = engine.scheduler.drafter.source  # type: ignore[attr-defined]
    small = source.runner.model
    assert any(isinstance(part, QuantLinear | KernelLinear) for part in small.modules())
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert engine.scheduler.drafter.stats.acceptance > 0.5  # type: ignore[attr-defined]
    clean_drafts(source)


def test_a_draft_model_without_room_drafts_for_fewer(model: Model, truth: list[Completion]) -> None:
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


def test_long_prompts_reach_the_draft_model_in_pieces(
    model: Model, truth: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "STEP_TOKENS", 7)
    engine, source = with_draft_model(model, small_model(model, 0.0))
    assert source.engine.scheduler.step_tokens == 7
    assert plain(engine.generate(*asks())) == plain(truth)
    assert engine.scheduler.drafter.stats.acceptance > 0.65  # type: ignore[attr-defined]


# A head.


def head_of(model: Model) -> Head:
    assert isinstance(model, Llama)
    torch.manual_seed(1)
    made = Head(model, 1, 32, torch.arange(0, 257, 2, device=model.device)).to(model.device)
    with torch.no_grad():  # as if trained: norms that do something, and attention that looks somewhere
        for name, weight in made.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            elif "q_proj" in name or "k_proj" in name or "qkv" in name:
                weight.mul_(8.0)
    return made.to(model.dtype).requires_grad_(False).eval()


def with_head(model: Model, **options: Any) -> tuple[PagedEngine, HeadSource]:
    own = clone(model)  # the hooks stay in it
    engine = speculative.load(own, drafter="none", **{**SMALL, **options})
    made = head_of(model)
    assert engine.runner.model is own
    made.room(2048)
    taps = Taps(own, made.taps, SMALL["step_tokens"])
    source = HeadSource(draft_engine(Parts(model, PagedSizes(**SMALL)), made, ()), taps)  # type: ignore[arg-type]
    speculator = Speculator(source, Control(3, adaptive=False))
    speculate(engine, speculator)
    return engine, source


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "ahead"])
@pytest.mark.slow
def test_a_head_changes_no_token(model: Model, truth: list[Completion], overlap: bool) -> None:
    engine, source = with_head(model, overlap=overlap)
    for _ in range(2):  # the second time prefixes are found, whose hidden states nobody has seen
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


@torch.inference_mode()
def test_a_head_drafts_what_it_would_say_to_the_whole_text(model: Model) -> None:
    """The oracle recomputes: the model's hidden states of all known tokens, then the head's own."""
    engine, source = with_head(model, prefix_cache=False)
    made, seen = source.head, 0
    guess = source.guess

    def checked(requests: Sequence[Request], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        nonlocal seen
        found = guess(requests, lengths)
        for request, drafts in zip(requests, found, strict=True):
            ids = torch.tensor(request.tokens)
            places = torch.arange(len(ids) - 1)
            features = made.mix(unroll.hidden_states(model, ids[None], made.taps)[0, :-1])
            tokens = ids[1:]
            for place, draft in enumerate(drafts):
                attention = forward.attention.RecomputeAttention()
                out = made.step(tokens, features, places, attention)
                expected = int(made.logits(out[-1]).argmax())
                assert draft == expected, f"request {request.id}, draft {place} behind {len(ids)} tokens"
                tokens = torch.cat((tokens, torch.tensor([draft])))
                features = torch.cat((features, out[-1:]))
                places = torch.arange(len(tokens))
                seen += 1
        return found

    source.guess = checked  # type: ignore[method-assign]
    engine.generate([[1, 2, 3], [5] * 20, list(range(70))], SamplingParams(max_tokens=8, ignore_eos=True))
    assert seen > 20


@pytest.mark.slow
def test_a_head_goes_to_a_file_and_back(model: Model, truth: list[Completion], tmp_path: Any) -> None:
    made, path = head_of(model), tmp_path / "head.safetensors"
    head.save(made, path, {"seconds": 1})
    again = head.load(path, model)
    assert again.config.num_layers == 1
    for name, value in made.own().items():
        assert torch.allclose(value, again.own()[name], atol=1e-2), name
    engine = speculative.load(model, drafter="head", draft_model=str(path), draft_adaptive=False, **SMALL)
    assert plain(engine.generate(*asks())) == plain(truth)
    with pytest.raises(UserError, match="Llama family"):
        head.load(path, forward.load_model("random:tiny-window", device="cpu", dtype="float32"))


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_a_drafter_has_the_rows_of_a_quantized_head(
    model: Model, tmp_path: Any, scheme: str, kernels: bool
) -> None:
    assert not model.config.tie_word_embeddings
    head.save(head_of(model), tmp_path / "head", {})
    options: dict[str, Any] = {"quantization": scheme, "head": scheme, "kernels": kernels, "latency": False}
    engine = speculative.load(
        model, drafter="head", draft_model=str(tmp_path / "head"), group_size=16, **options, **SMALL
    )
    source = engine.scheduler.drafter.source  # type: ignore[attr-defined]
    small, whole = source.runner.model.lm_head, model.get_parameter("lm_head.weight")
    rows = whole[small.ids]
    assert small.weight.shape == rows.shape
    worst = float((small.weight - rows).abs().max() / rows.abs().max())
    assert worst < 0.1, f"{scheme}: rows of the head differ by {worst:.1e} of the largest"


def damaged(model: Model, change: str, path: Any) -> None:
    """A drafter's file that somebody has cut or written over."""
    made = head_of(model)
    head.save(made, path, {})
    tensors = load_file(path)
    shape: Any = {"kind": "head", "layers": 1, "width": made.config.intermediate_size}
    shape |= {"hidden": model.config.hidden_size, "vocab": model.config.vocab_size}
    match change:
        case "no file of weights":
            path.write_bytes(path.read_bytes()[:-7])
            return
        case "holds no drafter":
            shape = [1]
        case "layers is 'x'":
            shape["layers"] = "x"
        case "hidden":
            del shape["hidden"]
        case "ids name no tokens":
            tensors["ids"][3] = 10**6
        case "norm.weight is not there":
            del tensors["norm.weight"]
        case _:
            tensors["norm.weight"] = tensors["norm.weight"][1:].clone()
    save_file(tensors, path, {"drafter": json.dumps(shape)})


@pytest.mark.parametrize(
    "says",
    [
        "no file of weights",
        "holds no drafter",
        "layers is 'x'",
        "hidden",
        "ids name no tokens",
        "norm.weight is not there",
        "norm.weight is .*, but must be",
    ],
)
def test_damaged_drafters_are_refused(model: Model, tmp_path: Any, says: str) -> None:
    damaged(model, says, tmp_path / "drafter.safetensors")
    with pytest.raises(UserError, match=says):
        head.load(tmp_path / "drafter.safetensors", model)


def test_the_reduced_head_never_names_other_tokens(model: Model) -> None:
    made = head_of(model)
    logits = made.logits(torch.randn(3, model.config.hidden_size))
    assert torch.isinf(logits[:, 1::2]).all() and torch.isfinite(logits[:, ::2]).all()


@pytest.mark.parametrize("name", ["draft_adaptive", "draft_ahead"])
def test_switches_are_true_or_false(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 'no', but must be True or False"):
        speculative.Speculate(**{name: "no"})


# Training.


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 5.0)])
def test_training_attends_as_the_model_does(window: int | None, cap: float | None) -> None:
    layer = LayerSpec(0, 6, 2, 8, 0.35, window, cap)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8, generator=generator) for heads in (6, 2, 2))
    off = (unroll.WholeAttention()(layer, q, k, v) - RecomputeAttention()(layer, q, k, v)).abs().max()
    assert off < 1e-5, f"window {window}, soft cap {cap}: off by {off:.1e}"


@torch.inference_mode()
def test_training_unrolls_the_head_as_drafting_does(model: Model) -> None:
    """Each place of step j is what the head makes when its chain began j places before."""
    made = head_of(model)
    assert isinstance(made, Head)
    ids = torch.tensor([[(7 * n) % 250 + 1 for n in range(14)], [(5 * n) % 250 + 1 for n in range(14)]])
    hidden = unroll.hidden_states(model, ids, made.taps)
    steps = unroll.outputs(made, ids, hidden, 4)
    for line, start in ((0, 0), (0, 5), (1, 8)):
        features = made.mix(hidden[line, : start + 1])
        for step, out in enumerate(steps):
            place = start + step
            tokens = ids[line, 1 : place + 2]
            attention = forward.attention.RecomputeAttention()
            right = made.step(tokens, features, torch.arange(place + 1), attention)[-1]
            difference = float((out[line, place] - right).abs().max())
            assert difference < 1e-4, f"step {step} of the chain that began at {start} is off by {difference}"
            features = torch.cat((features, right[None]))


def test_the_loss_falls_and_nothing_but_the_drafter_changes(model: Model) -> None:
    made = head_of(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for value in made.own().values():
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(made.own().values(), lr=3e-3)
    ids, real = unroll.padded(
        [Talk([(3 * n * n + k) % 250 + 1 for n in range(20 + k)], 2, True) for k in range(4)], model.device
    )
    losses = []
    for _ in range(25):
        value = unroll.loss(model, made, ids, real, 2, 3)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0] - 0.005, losses
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


class AlwaysRight:
    """A head whose hidden states are those that the model will have."""

    taps = ()

    def __init__(self, model: Model) -> None:
        self.model, self.ids = model, torch.empty(0)
        self.lm_head = ReducedHead(model.lm_head.weight, torch.arange(257), 257)

    def mix(self, states: Tensor) -> Tensor:
        return states

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, attention: object) -> Tensor:
        return unroll.hidden_states(self.model, self.ids)[:, 1:]


def test_acceptance_counts_chains_of_right_drafts(model: Model) -> None:
    right = AlwaysRight(model)
    talks = []
    for one in continuous.load(model, max_rows=3, max_len=64).generate(
        [[1, 2, 3], [9] * 8], SamplingParams(max_tokens=20, ignore_eos=True)
    ):
        talks.append(Talk(one.prompt_ids + one.token_ids, len(one.prompt_ids), True))
    right.ids = unroll.padded(talks, model.device)[0]
    assert unroll.accepted(model, right, talks) == [1.0] * 4  # type: ignore[arg-type]


class Written:
    """A tokenizer whose chat form is a frame around the content."""

    def chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        return [250, 251, *({"A": [65], "Why": [87]}[messages[0]["content"]]), 2, 252]


@pytest.mark.slow
def test_the_model_asks_and_answers(model: Model) -> None:
    before, between = text.template(Written())  # type: ignore[arg-type]
    assert (before, between) == ([250, 251], [2, 252])
    engine = continuous.load(model, max_rows=4, max_len=300)
    eos = model.config.eos_token_ids[0]
    told: list[int] = []
    talks = text.write(
        engine,
        before,
        [eos, 252],
        seconds=5.0,
        most=3,
        answer_tokens=8,
        begun=lambda rng: [40, 41],
        told=lambda count: told.append(count),
    )
    assert engine.idle
    for talk in talks:
        assert talk.tokens[:4] == [*before, 40, 41], "a question does not begin as it was begun"
        assert talk.tokens[talk.answer - 2 : talk.answer] == [eos, 252]
        assert eos not in talk.tokens[2 : talk.answer - 2], "a question has an end inside"
    assert told == list(range(1, len(talks) + 1))
    groups = list(text.batches(talks, 64, random.Random(0))) if talks else []
    assert sum(map(len, groups)) == len(talks)


@pytest.mark.slow
def test_training_makes_drafters_in_its_time(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    report = train_drafters(["--toy", "--minutes", "0.1", "--out", str(tmp_path)])
    took = time.monotonic() - started
    assert took < 30, f"asked for 6 seconds, it took {took:.0f}"
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    large = forward.load_model("random:tiny", device="cpu", dtype="float32")
    path = tmp_path / "tiny-head.safetensors"
    head.load(path, large)
    assert path.stat().st_size == report["head"]["bytes"]
    assert line["head"]["tokens_per_step"] == pytest.approx(1 + sum(line["head"]["accepted"]), abs=1e-3)
    assert len(report["head"]["history"]) >= 2 and report["head"]["tokens"] > 0
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "`head`" in card and "--minutes 0.1" in card


def test_questions_begin_in_many_ways() -> None:
    rng = random.Random(0)
    words = [f"qx{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(300)]
    begun = [questions.beginning(rng, words) for _ in range(3_000)]
    assert 0.12 < begun.count("") / len(begun) < 0.18, "the model begins about one of seven"
    assert len(set(begun)) > 1_200 and not any("{" in one or "|" in one for one in begun)
    found = {word for word in words if any(word in one for one in begun)}
    assert len(found) > 270, f"of 300 words of the vocabulary {len(found)} are topics"
    assert any("photosynthesis" in one for one in begun), "topics that people chose are gone"
    assert "qx" not in "".join(questions.beginning(rng) for _ in range(300)), "words that nobody gave"
    assert not set(begun) & set(questions.PEOPLE), "what people ask is kept for the evaluation"


def test_words_of_a_vocabulary_stand_alone_and_are_whole() -> None:
    texts = [
        " harbour",
        "harbour",
        " Harbour",
        " bee",
        " piano",
        " piano",
        " can't",
        " naïve",
        " under score",
    ]
    assert questions.words_of(texts) == ["harbour", "piano"]


@pytest.mark.slow
def test_answers_cut_off_by_the_time_are_kept(model: Model) -> None:
    engine = continuous.load(model, max_rows=4, max_len=300)
    eos = model.config.eos_token_ids[0]
    talks = text.write(engine, [250, 251], [eos, 252], seconds=1.5, most=50, answer_tokens=250)
    assert engine.idle and engine.scheduler.rows.free == 4, "what was cut off still holds its row"
    assert all(
        len(talk.tokens) - talk.answer >= text.LEAST_ANSWER for talk in talks if talk.tokens[-1] != eos
    )


@pytest.mark.weights
@pytest.mark.slow
def test_weights_that_are_shipped_load_by_default_and_guess_well() -> None:
    """On questions that nobody was trained on; the text is that of phase 09, token for token."""
    path = WEIGHTS / "smollm2-head.safetensors"
    if not path.is_file():
        pytest.skip("phases/11_speculative/weights has no head: train.py makes it")
    folder = model_folder("smollm2")
    large = forward.load_model(str(folder), device="cpu", dtype="float32")
    tokenizer = Tokenizer(folder)
    prompts = [
        tokenizer.chat([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions.PEOPLE[::3]
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


def test_frequent_tokens() -> None:
    talks = [Talk([5, 5, 5, 2, 2, 9], 1, True)]
    assert text.frequent(talks, 2, 12) == [2, 5] and text.frequent(talks, 4, 12) == [0, 2, 5, 9]


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
    assert chi_square(counts, p.numpy()) < 4, "the first token is not distributed as without drafts"
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
        best = float(rejection.optimum(p, q))
        assert float(rejection.classical(p, q)) == pytest.approx(best, abs=1e-9)
        found = rejection.coupled(p.float(), q.float(), 4000, seed)
        promised = best / (2 - best)
        assert promised - 0.03 <= found <= best + 0.03
        gaps.append(best - found)
    assert sum(gaps) / len(gaps) < (0.03 if spread < 0.4 else 0.06)


def test_the_formula_for_agreement_says_what_draws_say() -> None:
    for seed, spread in ((0, 0.1), (1, 0.5), (2, 1.5)):
        p, q = distributions(seed, vocab=120, spread=spread, scale=3.0)
        drawn = rejection.coupled(p.float(), q.float(), 8000, seed)
        found = float(rejection.agreement(p, q))
        assert found == pytest.approx(drawn, abs=0.02), (
            f"spread {spread}: draws agree in {drawn:.3f} of cases"
        )
        assert found <= float(rejection.optimum(p, q)) + 1e-9
    assert float(rejection.agreement(p, p)) == pytest.approx(1.0)


@pytest.mark.weights
@pytest.mark.slow
def test_sampled_drafts_are_accepted_within_three_hundredths_of_the_optimum() -> None:
    """On SmolLM2's own logits behind real text, with drafters of the quality that is used."""
    model = forward.load_model(str(model_folder("smollm2")), device="cpu", dtype="float32")
    text = Tokenizer(model_folder("smollm2")).encode(PASSAGES[0])[:32]
    bench = bench_of("11_speculative")
    p = bench.probabilities(model, text)
    for noise in (0.01, 0.02):
        q = bench.probabilities(bench.noisy(model, noise), text)
        best, found = float(rejection.optimum(p, q).mean()), float(rejection.agreement(p, q).mean())
        assert best - 0.03 <= found <= best, (
            f"noise {noise}: {found:.3f} of drafts, the optimum is {best:.3f}"
        )


# Graphs, which the CPU calls instead of replaying.

PLAIN = dict.fromkeys(("norms", "rope", "activation", "projections", "sampling"), "torch")
GRAPHS = {"kernels": True, "graphs": True, "graph_tokens": 32, **PLAIN}


def test_verify_sizes_hold_every_small_step() -> None:
    sizes = verify_sizes(40, 5)
    assert list(sizes) == [1, 2, 4, 8, 16, 32] and sizes[1] == [2, 4, 6] and sizes[32] == [64, 128, 192]
    assert all(count <= 512 for counts in verify_sizes(256, 31).values() for count in counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "overlap"), [("always right, and beyond what was asked for", True), ("any length", False)]
)
def test_verify_graphs_give_the_same_tokens(model: Model, script: str, overlap: bool) -> None:
    prompts = [[5, 6, 7, 8] * 3, [3, 1], [7]]
    usual = {"max_tokens": 9, "ignore_eos": True}
    params = [
        SamplingParams(**usual),
        SamplingParams(temperature=0.8, seed=1, **usual),
        SamplingParams(frequency_penalty=0.5, **usual),  # no graph samples with penalties
    ]
    right = continuous.load(model, max_rows=4, max_len=96).generate(prompts, params)
    options = {"drafter": "ngram", "draft_length": 6, "max_rows": 2, **GRAPHS}
    engine = scripted(model, right, script, overlap=overlap, **options)
    assert isinstance(engine.runner, GraphRunner)
    used: list[tuple[int, int, Feature]] = []
    for key, graph in engine.runner.plan(VerifyPlan).graphs.items():
        replay = graph.replay
        graph.replay = lambda key=key, replay=replay: (used.append(key), replay())[1]  # type: ignore
    assert plain(engine.generate(prompts, params)) == plain(right)
    assert Feature.RANDOM in {features for *_, features in used}, "no step that verifies was replayed"
    clean(engine)


@pytest.mark.long
def test_a_head_with_graphs_changes_no_token(model: Model, tmp_path: Any) -> None:
    """Head and model both replay; the head reads the hidden states that graphs leave behind."""
    path = tmp_path / "head.safetensors"
    head.save(head_of(model), path, {})
    prompts = [[5, 6, 7], [9] * 12]
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=0.8, seed=1, ignore_eos=True),
    ]
    right = continuous.load(model, max_rows=2, max_len=32).generate(prompts, params)
    options = {**GRAPHS, "max_rows": 2, "max_len": 32, "block_size": 8, "cache_bytes": 1 << 20}
    options["graph_tokens"] = 0
    eager = speculative.load(
        model, drafter="head", draft_model=str(path), draft_adaptive=False, max_rows=2, max_len=32
    )
    engine = speculative.load(
        model, drafter="head", draft_model=str(path), draft_adaptive=False, draft_length=3, **options
    )
    for made in (eager, engine):
        assert plain(made.generate(prompts, params)) == plain(right)
    source = engine.scheduler.drafter.source  # type: ignore[attr-defined]
    assert source.runner.replays > 0 and source.chains.graphs, "the head's steps are no graphs"
    first, second = (made.scheduler.drafter.stats.acceptance for made in (eager, engine))  # type: ignore
    assert first == pytest.approx(second, abs=0.15), "with graphs the head says something else"
    clean(engine)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_real_graphs_give_the_same_tokens(drafter: str) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    right = cuda_graphs.load(model, max_rows=8, max_len=96).generate(*asks())
    engine = speculative.load(model, drafter=drafter, draft_adaptive=False, max_rows=8, max_len=96)
    assert isinstance(engine.runner, GraphRunner) and engine.runner.plan(VerifyPlan).graphs
    assert_all_same(model, right, engine.generate(*asks()), [p for p in asks()[1] for _ in range(p.n)])
    engine.check_integrity()


@pytest.mark.gpu
def test_a_head_with_real_graphs(tmp_path: Any) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    path = tmp_path / "head.safetensors"
    head.save(head_of(model).to("cuda"), path, {})
    prompts, params = [[5, 6, 7], [9] * 40], SamplingParams(max_tokens=30, ignore_eos=True)
    right = cuda_graphs.load(model, max_rows=2, max_len=96).generate(prompts, params)
    options = {"drafter": "head", "draft_model": str(path), "draft_adaptive": False}
    engine = speculative.load(model, max_rows=2, max_len=96, **options)
    assert_all_same(model, right, engine.generate(prompts, params), [params, params])
    assert engine.scheduler.drafter.stats.steps > 0


# Drafting inside the graph that verifies.

AHEAD = {
    **GRAPHS,
    "graph_tokens": 0,
    "max_len": 64,
    "block_size": 8,
    "cache_bytes": 1 << 20,
    "draft_length": 2,
}


def ahead_engine(model: Model, kind: str, folder: Any, rows: int = 2, **options: Any) -> PagedEngine:
    """An engine whose drafter guesses inside the graphs; they are called here, not replayed."""
    path = folder / f"{kind}.safetensors"
    if kind == "head":
        head.save(head_of(model), path, {})
    drafts = "random:tiny" if kind == "model" else str(path)  # the model itself is always right
    given = {"drafter": kind, "draft_adaptive": False, "draft_length": 2}
    given |= {} if kind == "ngram" else {"draft_model": drafts}
    given["max_rows"] = rows
    return speculative.load(model, **{**AHEAD, **given, **options})


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the verify graph", "in the graph that drafts, too"])
def test_a_lone_request_is_verified_by_the_kernels_for_few(
    model: Model, where: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens in one kernel of attention a layer, padding included, behind its lone tokens."""
    monkeypatch.setattr(surgery, "few_pays", lambda *_: True)  # the interpreter knows float32
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)
    few, seen = LatencyAttention.attend_few, []

    def counted(self: LatencyAttention, layer: Any, qkv: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(len(qkv))
        return few(self, layer, qkv, *rest, **options)

    monkeypatch.setattr(LatencyAttention, "attend_few", counted)
    output = 8 if where == "in the verify graph" else 6
    prompts, params = [[5, 6, 7]], [SamplingParams(max_tokens=output, ignore_eos=True)]
    right = continuous.load(model, max_rows=1, max_len=64).generate(prompts, params)
    fused = {**dict.fromkeys(PLAIN, "triton"), "latency": True, "overlap": False}
    if where == "in the verify graph":
        options = {**AHEAD, "max_rows": 1, "drafter": "ngram", "draft_length": 6, **fused}
        engine = scripted(model, right, "right at first", **options)
        seen.clear()
        made = engine.generate(prompts, params)
        assert set(seen) == {4, 7}, f"the prompt of 3 in a graph of 4, and six drafts: {seen}"
    else:
        engine = ahead_engine(model, "model", tmp_path, rows=1, **{**fused, "overlap": True})
        seen.clear()
        made = engine.generate(prompts, params)
        assert isinstance(engine.loop, loops.InGraph) and engine.loop.ahead.replays > 1
        assert seen.count(3) >= 6, f"verified in two layers, and caught up with in two others: {seen}"
    assert plain(made) == plain(right), "a token differs from the engine's without drafts"
    clean(engine)


def of_few_words(model: Model) -> Model:
    """Says hardly anything but the first eight tokens."""
    own = clone(model)
    with torch.no_grad():
        own.lm_head.weight[8:] *= 0.2
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("head", 2),
        ("model", 2),
        pytest.param("model", 8, marks=pytest.mark.long),
        ("ngram", 2),
        pytest.param("ngram", 9, marks=pytest.mark.long),
    ],
)
def test_drafting_inside_the_graph_changes_no_token(
    model: Model, tmp_path: Any, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few drafts or more than the decode kernel takes at a time."""
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)  # or each is called once before
    prompts, longer = [[5, 6, 7], [9] * 12, [4, 4]], 0
    if kind == "ngram":
        model, longer = of_few_words(model), 30  # or nothing ever repeats
    params = [
        SamplingParams(max_tokens=9 + longer, ignore_eos=True),
        SamplingParams(max_tokens=11 + longer, temperature=0.8, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=5, frequency_penalty=0.5, ignore_eos=True),  # ordinary steps meanwhile
    ]
    right = continuous.load(model, max_rows=2, max_len=64).generate(prompts, params)
    engine = ahead_engine(model, kind, tmp_path, draft_length=length, max_len=64 if length < 8 else 128)
    loop = engine.loop
    assert isinstance(loop, loops.InGraph)
    ahead, stage, overlapped = loop.ahead, loop.ahead._stage, 0
    assert (length < ahead.runner.attention.most_queries) == (length == 2), "tiles are not what is tested"

    def checked(running: Sequence[Request], size: int, farthest: int) -> None:
        nonlocal overlapped
        overlapped += loop.flight is None and running[0].in_flight == 2
        for request in running:
            room = len(engine.cache.blocks_of(request.row)) * 8
            assert room >= len(request.tokens) + farthest, f"request {request.id}: drafts without room"
        stage(running, size, farthest)

    ahead._stage = checked  # type: ignore[method-assign]
    landed, blank = ahead.speculator.landed, 0

    def counted(work: Work, accepted: int) -> None:
        nonlocal blank
        if kind == "ngram" and ahead.landing is not None and id(work) in ahead.landing.lines:
            index = NGramIndex()
            index.extend(work.request.tokens[: work.start + 1])
            found = bool(index.propose(1))
            nothing = not found and work.request.finish_reason is None
            where = f"request {work.request.id}, behind token {work.start}"
            assert work.drafts or not found, f"{where}: what was guessed does not count"
            assert not nothing or accepted or not work.drafts, (
                f"{where}: nothing was guessed, and counts as wrong"
            )
            known = work.start + 1 + accepted
            assert work.request.row < 0 or work.request.num_computed_tokens == known, (
                f"{where}: {work.request.num_computed_tokens} tokens are said to be computed, not {known}"
            )
            blank += nothing
        landed(work, accepted)

    ahead.speculator.landed = counted  # type: ignore[method-assign]
    got = engine.generate(prompts, params)
    assert plain(got) == plain(right), "a token differs from the engine's without drafts"
    assert ahead.replays > 3, "no step has drafted on the device"
    assert overlapped, "no step was launched before the one before it had landed"
    if kind == "model":
        stats = ahead.speculator.stats
        assert stats.accepted[0] > 0.6 * stats.drafted[0], f"the model does not guess itself: {stats.lines()}"
    elif kind == "ngram":
        stats = ahead.speculator.stats
        assert sum(stats.accepted) > 5, f"n-grams that were found are never right: {stats.lines()}"
        assert blank, "in every step something was guessed"
    clean(engine)
    clean_drafts(ahead.source)
    # One request is aborted and another comes while a step is on its way.
    (first,), (second,) = (engine.add(prompts[n], params[n], index=n) for n in (0, 1))
    while loop.flight is None:
        engine.step()
    engine.abort(first)
    (third,) = engine.add(prompts[2], params[2], index=2)
    while not engine.idle:
        engine.step()
    assert first.finish_reason == "abort" and first.output_ids == right[0].token_ids[: len(first.output_ids)]
    for request, expected in ((second, right[1]), (third, right[2])):
        assert request.output_ids == expected.token_ids, f"request {request.id} after an abort beside it"
    clean(engine)
    clean_drafts(ahead.source)
    # Two samples share a block until one of them writes, which may be in such a step.
    both = SamplingParams(max_tokens=9, temperature=0.8, seed=1, n=2, ignore_eos=True)
    expected = continuous.load(model, max_rows=2, max_len=64).generate(prompts[1:2], both)
    assert plain(engine.generate(prompts[1:2], both)) == plain(expected), (
        "samples write into each other's block"
    )
    clean(engine)


@pytest.mark.parametrize("at_once", [16, 1024])
def test_ngrams_on_the_device_are_those_of_the_host(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in rows of their own, and padding; what the row held before is still behind the text."""
    from speculative.ahead import lookup

    monkeypatch.setattr(lookup, "AT_ONCE", at_once)
    rng, k, found = random.Random(3), 3, 0
    for _ in range(12):
        tokens = torch.randint(4, (4, 90), generator=torch.Generator().manual_seed(rng.randrange(99)))
        texts = [[rng.randrange(4) for _ in range(rng.choice((1, 2, 3, 5, 17, 60)))] for _ in range(3)]
        rows, next_at = torch.tensor([2, 0, 3, 0]), torch.zeros(4, dtype=torch.int64)
        for row, written in zip((2, 0, 3), texts, strict=True):
            tokens[row, : len(written)] = torch.tensor(written)
            next_at[row] = len(written) - 1
        before, told = tokens.clone(), torch.zeros(4, 2 * k + 2, dtype=torch.int64)
        at = torch.tensor([5, 0, 7, -1])  # where the step began, which only says who is padding
        lookup.look_up(at, rows, tokens, next_at, told, k)
        for request, (row, written) in enumerate(zip((2, 0, 3), texts, strict=True)):
            index, size = NGramIndex(), len(written)
            index.extend(written)
            expected = index.propose(k)
            where = f"request {request}, behind {written}"
            assert told[request, k + 2 :].tolist() == (expected or [-1] * k), f"{where}: the host is told"
            assert tokens[row, size : size + k].tolist() == (expected or written[-1:] * k), (
                f"{where}: other drafts"
            )
            assert torch.equal(tokens[row, :size], before[row, :size]), f"{where}: the text is another"
            assert torch.equal(tokens[row, size + k :], before[row, size + k :]), f"{where}: more was written"
            found += bool(expected)
        assert torch.equal(tokens[1], before[1]), "padding has drafts"
    assert 10 < found < 36
    # Of a text that is too long to be searched, the end is.
    monkeypatch.setattr(lookup, "MOST_TOKENS", 32)
    long = torch.zeros(1, 90, dtype=torch.int64)
    long[0, :60] = torch.arange(60)
    for end, expected in (([20, 21], [-1]), ([40, 41], [42])):
        long[0, 58:60] = torch.tensor(end)
        told = torch.zeros(1, 4, dtype=torch.int64)
        nought = torch.zeros(1, dtype=torch.int64)
        lookup.look_up(nought, nought, long, torch.tensor([59]), told, 1)
        assert told[0, 3:].tolist() == expected, f"behind {end}, which stood here {60 - end[0]} tokens before"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(75, marks=pytest.mark.long)])
def test_what_stands_between_the_layers_compiles_for_a_gpu(capability: int) -> None:
    assert spilled(capability, "--ahead") == [0] * 5


def test_between_the_layers_of_a_step_that_drafts() -> None:
    """Two requests and a row of padding, two drafts each: the second is right once, then wrong."""
    from speculative.ahead.kernels import accept, find_places, hand_on

    k, size, places = 2, 3, 9
    ints = partial(torch.zeros, dtype=torch.int64)
    given = torch.tensor([[3, 1, -1], [0, 2, 0], [4, 0, 0], [5, 2, 0]])  # row, drafter's row, base, prompt
    next_at = torch.tensor([0, 6, 0, 9])
    at, rows, small_rows, picked = (ints(size) for _ in range(4))
    token_rows, token_at, steps, small_token_rows, small_at = (ints(places) for _ in range(5))
    contexts, small_contexts = (torch.zeros(size, dtype=torch.int32) for _ in range(2))
    find_places(
        given,
        next_at,
        at=at,
        rows=rows,
        token_rows=token_rows,
        token_at=token_at,
        steps=steps,
        contexts=contexts,
        small_rows=small_rows,
        small_token_rows=small_token_rows,
        small_at=small_at,
        small_contexts=small_contexts,
        drafts=k,
    )
    assert at.tolist() == [9, 6, -1] and rows.tolist() == [3, 1, 0]
    assert token_at.tolist() == [9, 10, 11, 6, 7, 8, -1, -1, -1], "a token is read from another place"
    assert small_at.tolist() == [6, 7, 8, 7, 8, 9, -1, -1, -1], "the drafter goes on from another place"
    assert steps.tolist()[:6] == [5, 6, 7, 5, 6, 7], "a token is sampled with another step's noise"
    assert contexts.tolist() == [12, 9, 3] and small_contexts.tolist() == [9, 10, 3]

    tokens, small_tokens, told, newest = ints(4, 20), ints(3, 20), ints(size, 2 * k + 2), ints(size)
    draft_steps, chain_rows, chain_at = ints(k, size), ints(size), ints(size)
    chain = {"chain_rows": chain_rows, "chain_at": chain_at, "chain_contexts": contexts}
    sampled = torch.tensor([70, 71, 72, 80, 81, 82, 1, 1, 1])
    ids = torch.tensor([60, 70, 79, 61, 89, 81, 0, 1, 1])  # newest, draft, draft
    where: dict[str, Any] = {"at": at, "rows": rows, "given": given, "tokens": tokens, "next_at": next_at}
    accept(sampled, ids, told=told, picked=picked, draft_steps=draft_steps, drafts=k, **where, **chain)
    assert told[:, 0].tolist()[:2] == [1, 0], "a right draft does not count, or one behind a wrong draft does"
    assert tokens[3].tolist()[9:13] == [0, 70, 71, 0] and tokens[1].tolist()[6:9] == [0, 80, 0]
    assert not tokens[0].any(), "padding was written"
    assert next_at.tolist() == [0, 7, 0, 11] and picked.tolist()[:2] == [1, 3]
    assert draft_steps[:, :2].tolist() == [[7, 6], [8, 7]], "a draft is drawn with another step's noise"
    assert chain_rows[:2].tolist() == [0, 2] and chain_at.tolist() == [8, 8, -1], (
        "the drafter goes on behind the first draft from another place"
    )
    assert contexts.tolist() == [9, 9, 0], "the drafter sees other keys"

    names = torch.arange(0, 100, 11)
    where |= {"told": told, "small_tokens": small_tokens, "newest": newest, "drafts": k}
    hand_on(torch.tensor([3, 4, 9]), 1, names=names, **where)
    assert newest[:2].tolist() == [33, 44], "the drafter goes on from another token"
    assert (int(tokens[3, 13]), int(tokens[1, 9])) == (33, 44), "a draft is verified in another place"
    assert (int(small_tokens[0, 9]), int(small_tokens[2, 9])) == (33, 44), "the drafter reads another draft"
    assert told[:2, 5].tolist() == [33, 44]
    hand_on(torch.tensor([33, 44, 9]), 0, **where)
    assert newest[:2].tolist() == [33, 44] and told[:2, 4].tolist() == [33, 44]


@pytest.mark.slow
@torch.inference_mode()
def test_a_head_inside_the_graph_drafts_what_it_would_say(
    model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels of its own: the oracle is the head's forward pass over the whole text, drafts included."""
    monkeypatch.setattr(Capturer, "capture", lambda self, function: function)
    options = {"rows": 2, "draft_length": 3, "prefix_cache": False, "max_len": 96}
    engine = ahead_engine(model, "head", tmp_path, **options)
    assert isinstance(engine.loop, loops.InGraph)
    source, seen = engine.loop.ahead.source, 0
    assert isinstance(source, HeadSource)
    made, carried = source.head, source.carried

    def checked(request: Request, drafts: Sequence[int]) -> None:
        nonlocal seen
        carried(request, drafts)
        ids = torch.tensor(request.tokens)
        features = made.mix(unroll.hidden_states(model, ids[None], made.taps)[0, :-1])
        tokens = ids[1:]
        for place, draft in enumerate(drafts):
            attention, places = forward.attention.RecomputeAttention(), torch.arange(len(tokens))
            out = made.step(tokens, features, places, attention)
            logits = made.logits(out[-1])
            if request.params.temperature == 0:
                assert float(logits[draft]) >= float(logits.max()) - 1e-4, (
                    f"request {request.id}, draft {place} behind {len(ids)} tokens is not the head's"
                )
            assert float(logits[draft]) > -math.inf, f"request {request.id} drafts an unknown token {draft}"
            tokens, features = torch.cat((tokens, torch.tensor([draft]))), torch.cat((features, out[-1:]))
            seen += 1

    source.carried = checked  # type: ignore[method-assign]
    usual = {"max_tokens": 12, "ignore_eos": True}
    params = [SamplingParams(**usual), SamplingParams(temperature=0.8, seed=1, **usual)]
    for some, each in (([[1, 2, 3]], params[0]), ([[1, 2, 3], [5] * 20], params)):
        engine.generate(some, each)
    assert seen > 40


@torch.inference_mode()
def test_taps_keep_what_the_layers_put_out(model: Model) -> None:
    own = clone(model)
    places = tapped(own.config.num_layers)
    taps = Taps(own, places, 8)
    ids = torch.tensor([5, 6, 7])
    own(ids, torch.arange(3), forward.attention.RecomputeAttention())
    right = unroll.hidden_states(model, ids[None], places)[0, :, : 2 * model.config.hidden_size]
    # Training attends by another product, whose rounding depends on the processor.
    torch.testing.assert_close(taps.kept[:3], right)
    assert not taps.kept[3:].any()
    kept = taps.kept.clone()
    model(ids + 1, torch.arange(3), forward.attention.RecomputeAttention())
    assert torch.equal(taps.kept, kept), "another engine's model writes into these taps"
    assert not any(layer._forward_hooks for layer in layers_of(model)), "a hook stays in the shared model"


@torch.inference_mode()
def test_a_head_reads_low_middle_and_last_layers(model: Model) -> None:
    made = head_of(model)
    assert isinstance(made, Head)
    states = torch.randn(2, 3 * model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    right = made.mix(states)
    for place, name in enumerate(("low", "middle", "last")):
        other = states.clone()
        other[:, place * model.config.hidden_size] += 5.0
        assert not torch.allclose(made.mix(other), right, atol=1e-4), (
            f"the head does not read the {name} layer"
        )


def test_the_longest_ngram_speaks_first() -> None:
    index = NGramIndex()
    index.extend([5, 2, 3, 9, 1, 2, 3, 8, 5, 2, 3])
    assert index.propose(1) == [9], "the shorter n-gram (2, 3) was asked first"


def test_what_was_accepted_is_learned() -> None:
    control = Control(4)
    speculator = Speculator(ngram.NGrams(), control)
    request = Request(0, [1, 2, 3], 2, 99, SamplingParams())
    for _ in range(8):
        speculator.landed(Work(request, 0, 2, 4, (7, 7, 7), (request,)), 0)
    assert control.rates[request].value < 0.2, "request 0: wrong drafts do not count"


def test_a_head_sees_the_prompt_of_its_first_request(model: Model, tmp_path: Any) -> None:
    """Plain steps are timed before anybody guesses; the head watches them, and the prompt before them."""
    path = tmp_path / "head.safetensors"
    head.save(head_of(model), path, {})
    engine = speculative.load(model, drafter="head", draft_model=str(path), **SMALL)
    engine.add([5, 6, 7, 8], SamplingParams(max_tokens=20, ignore_eos=True))
    source = engine.scheduler.drafter.source  # type: ignore[attr-defined]
    for _ in range(8):
        engine.step()
    assert list(source._first.values()) == [0], "request 0: the head has not seen the prompt"


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_a_head_that_comes_back_sees_the_prompt(model: Model, tmp_path: Any, overlap: bool) -> None:
    """Guessing is off for one request and on for the next: the step with its prompt has to be watched."""
    path = tmp_path / "head.safetensors"
    head.save(head_of(model), path, {})
    engine = speculative.load(model, drafter="head", draft_model=str(path), overlap=overlap, **SMALL)
    speculator: Any = engine.scheduler.drafter
    allowed, speculator._on = False, False
    speculator.control.cost(1).samples = SAMPLES
    speculator.control.cost(1).decide = lambda: allowed
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.generate([[5, 6, 7, 8]], params)
    assert speculator.source._first == {}, "request 0: guessing was off, and somebody has watched"
    allowed = True
    engine.add([9, 8, 7, 6], params)
    for _ in range(6):
        engine.step()
    assert list(speculator.source._first.values()) == [0], (
        f"request 1: of its 4 prompt tokens the head has missed {list(speculator.source._first.values())}"
    )
    assert speculator.stats.steps > 0, "request 1: nothing was guessed"


def test_lengths_that_have_graphs() -> None:
    from speculative.ahead.steps import draft_lengths

    assert [draft_lengths(most) for most in (0, 1, 2, 4)] == [[], [1], [1, 2], [1, 2, 4]]

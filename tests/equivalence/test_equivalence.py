"""Every phase against the naive one: the same tokens, whatever joins, leaves, shares or is preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import chunked_prefill
import forward
import kv_cache
import prefix_cache
from common.events import Completion, TokenEvent, generate
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from forward.model import Model
from tests.equivalence.compare import assert_all_same, margin
from tests.equivalence.engines import ENGINES, SLOW

pytestmark = pytest.mark.usefixtures("poison")
MODELS = ("random:tiny", "random:tiny-window", "random:tiny-moe")
Work = tuple[list[list[int]], list[SamplingParams]]


@cache
def model(name: str) -> Model:
    return forward.load_model(name, device="cpu", dtype="float32")


@cache
def mixed(name: str) -> Work:
    """Lengths 1 to 500, some prefixes shared, every way to end; stop tokens taken from what is generated."""
    rng = random.Random(4)
    shared = [rng.randrange(1, 257) for _ in range(70)]
    prompts = [
        [rng.randrange(1, 257) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 120, 500)
    ]
    prompts += [
        shared[:n] + [rng.randrange(1, 257) for _ in range(m)]
        for n, m in ((64, 0), (64, 1), (70, 9))
    ]
    prompts += [shared[:32], shared[:48]]
    params = [
        SamplingParams(max_tokens=n) for n in (40, 1, 8, 17, 33, 0, 16, 12, 20, 20, 24, 18, 5)
    ]
    free = generate(kv_cache.load(model(name)), prompts, params)
    for at in (0, 4, 8):
        token = free[at].token_ids[len(free[at].token_ids) // 2]
        params[at] = replace(params[at], stop_token_ids=(token,))
    params[9] = replace(params[9], ignore_eos=True)
    return prompts, params


@cache
def truth(name: str) -> list[Completion]:
    return generate(forward.load(model(name)), *mixed(name))


def with_aborts(engine: Engine, work: Work, victims: tuple[int, ...]) -> list[Completion]:
    """Run `work`, one arrival in every second step; `victims` are aborted after three tokens."""
    todo = list(enumerate(zip(*work, strict=True)))
    completions = {
        (index, sample): Completion(index, sample, prompt, 0.0)
        for index, (prompt, settings) in todo
        for sample in range(settings.n)
    }
    for step in range(20_000):
        if todo and step % 2 == 0:
            index, (prompt, settings) = todo.pop(0)
            engine.add(prompt, settings, index=index)
        for request, token, reason, now, logprob, _ in engine.step():
            event = TokenEvent(request.index, token, reason, now, logprob, request.sample)
            completions[request.index, request.sample].add(event)
            if request.index in victims and len(request.output_ids) == 3 and reason is None:
                engine.abort(request)
        if engine.idle and not todo:
            break
    return [*completions.values()]


def assert_clean(engine: Engine) -> None:
    """Rows and blocks are back at the start count."""
    assert engine.idle and engine.scheduler.rows.free == engine.scheduler.rows.count
    engine.scheduler.cache.check()
    cache = engine.scheduler.cache
    engine.check_integrity()
    if hasattr(cache, "allocator"):
        assert cache.free == cache.allocator.count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_the_set_is_worth_comparing(name: str) -> None:
    reasons = [completion.finish_reason for completion in truth(name)]
    assert reasons.count("stop") >= 3 and reasons.count("length") >= 5
    assert len({tuple(completion.token_ids[:4]) for completion in truth(name)}) > 8


WITH_EXPERTS = (
    "02 kv_cache",
    "03 batching",
    "09 overlap",
    "11 ngram",
    "16 experts",
    "16 preempting",
)
PAIRS = [
    (engine, name)
    for engine in [*list(SLOW)[1:], *ENGINES]
    for name in MODELS
    if name != "random:tiny-moe" or engine in WITH_EXPERTS
]


@pytest.mark.parametrize(("engine", "name"), PAIRS)
@pytest.mark.slow
def test_mixed_requests(engine: str, name: str) -> None:
    made = {**SLOW, **ENGINES}[engine](model(name))
    assert_all_same(model(name), truth(name), generate(made, *mixed(name)))
    if isinstance(made, Engine):
        assert_clean(made)
        if "preempting" in engine:
            assert made.scheduler.preemptions > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_abort_of_neighbours(engine: str) -> None:
    name, victims = MODELS[0], (0, 4, 7, 8, 11)
    made = ENGINES[engine](model(name))
    completions = with_aborts(made, mixed(name), victims)
    others = [
        (a, b) for a, b in zip(truth(name), completions, strict=True) if a.index not in victims
    ]
    assert_all_same(model(name), *zip(*others, strict=True))  # type: ignore[arg-type]
    aborted = [one for one in completions if one.finish_reason == "abort"]
    assert len(aborted) >= 3
    for one in aborted:
        assert one.token_ids == truth(name)[one.index].token_ids[: len(one.token_ids)]
    assert_clean(made)


@cache
def sampled(name: str) -> tuple[Work, list[Completion]]:
    """The same prompts with seeds, and what phase 01 draws for them."""
    prompts, _ = mixed(name)
    params = [
        SamplingParams(
            max_tokens=10,
            temperature=0.9,
            seed=index,
            n=1 + index % 3,
            top_k=50,
            presence_penalty=0.5,
        )
        for index in range(len(prompts))
    ]
    return (prompts, params), generate(forward.load(model(name)), prompts, params)


@pytest.mark.parametrize("engine", [*list(SLOW)[1:], *ENGINES])
@pytest.mark.slow
def test_sampled_requests_with_seeds(engine: str) -> None:
    """A request's random numbers depend on its seed and its step alone, so sampling agrees as well."""
    name = MODELS[0]
    (prompts, params), expected = sampled(name)
    made = {**SLOW, **ENGINES}[engine](model(name))
    actual = generate(made, prompts, params)
    assert_all_same(model(name), expected, actual, params)
    samples = [tuple(one.token_ids) for one in actual if one.index == 8]
    assert len(samples) == 3 and len(set(samples)) == 3


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 33])
@pytest.mark.slow
def test_every_chunk_size(chunk: int) -> None:
    name = MODELS[chunk % 2]
    prompts, params = mixed(name)
    keep = [at for at, prompt in enumerate(prompts) if len(prompt) <= 80]
    made = chunked_prefill.load(
        model(name), max_rows=6, step_tokens=chunk + 7, chunk_tokens=chunk, block_size=8
    )
    actual = generate(made, [prompts[at] for at in keep], [params[at] for at in keep])
    expected = [replace(truth(name)[at], index=place) for place, at in enumerate(keep)]
    assert_all_same(model(name), expected, actual)
    assert_clean(made)


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_warm_prefix_cache(name: str, index: str) -> None:
    """The second time most of each prompt is found, and the outputs stay the same."""
    made = prefix_cache.load(model(name), max_rows=4, index=index, block_size=8)
    for _ in range(3):
        assert_all_same(model(name), truth(name), generate(made, *mixed(name)))
        assert_clean(made)
    prompts, _ = mixed(name)
    assert made.cache.stats.hit_tokens > sum(map(len, prompts))  # type: ignore[attr-defined]


def test_the_comparator_sees_a_wrong_token() -> None:
    name = MODELS[0]
    right = truth(name)[0]
    at = next(
        i
        for i in range(3)
        if margin(model(name), right.prompt_ids + right.token_ids[:i]) > 0.01
    )
    wrong = replace(right, token_ids=[*right.token_ids])
    wrong.token_ids[at] += 1
    with pytest.raises(AssertionError, match="apart"):
        assert_all_same(model(name), [right], [wrong])
    with pytest.raises(AssertionError, match="beginning"):
        assert_all_same(model(name), [right], [replace(right, token_ids=right.token_ids[:-1])])


DRAWN = {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.1}
BROKEN = [(name, {}) for name in ENGINES] + [
    (name, DRAWN) for name in ENGINES if "preempting" in name
]


@pytest.mark.parametrize(("name", "sampling"), BROKEN, ids=str)
def test_nan_ends_the_request_that_has_it_and_no_other(
    name: str, sampling: dict[str, Any]
) -> None:
    """A token whose embedding is NaN: in prompts, and generated. Blocks that held NaN are used again."""
    sound, broken = (
        forward.load_model("random:tiny", device="cpu", dtype="float32") for _ in range(2)
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    prompts = [[1, 2, 3], [9] * 20, [4, 50, 5], [50] * 40, [6, 7] * 20, [8]]
    wanted = [one.token_ids for one in generate(forward.load(sound), prompts, params)]
    last = wanted[0][4]
    broken.embed_tokens.weight.data[[50, last]] = float("nan")
    engine = ENGINES[name](broken)
    for _ in range(3):
        found = generate(engine, prompts, params)
        for prompt, full, one in zip(prompts, wanted, found, strict=True):
            if 50 in prompt:
                assert (one.token_ids, one.finish_reason) == ([], "error")
                continue
            ends = [
                place for place, token in enumerate(full[:-1], start=1) if token in (50, last)
            ]
            count = len(one.token_ids)
            assert one.token_ids == full[:count]
            guessed = (
                name.startswith("11") and ends and count
            )  # the token that is NaN stood among the drafts
            assert count == min(ends, default=12) or guessed, f"{prompt} has another's NaN"
            assert one.finish_reason == ("error" if ends else "length")
        engine.check_integrity()

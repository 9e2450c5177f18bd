"""The sampler against a reference that takes one row at a time, in float64, from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import UserError
from common.sampling import noise, ops
from common.sampling.ops import NAN_TOKEN
from common.sampling.params import SamplingParams
from common.sampling.sampler import HostSampled, Sampled, Sampler, TokenBitmask
from tests.dispatch import Operations

Floats = NDArray[np.float64]


# The reference.


def splitmix64_stream(seed: int, count: int) -> list[int]:
    """The generator as published: a counter, and a mixing function of it."""
    outputs, state = [], seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def gumbel(seed: int, step: int, count: int) -> Floats:
    """The noise of a request with this seed at this step for tokens 0 to count - 1, from its definition."""
    key = splitmix64_stream(seed % 2**64, 1)[0]
    word = splitmix64_stream(key, step + 1)[step]
    lower, upper = word % 2**32, word >> 32

    def fold(x: int, bits: int) -> int:
        signed = x - 2**32 if x >> 31 else x
        return x ^ (signed >> bits) % 2**32

    noise = []
    for token in range(count):
        x = fold(upper ^ token, 16) * 0x7FEB352D % 2**32
        x = (fold(x, 15) ^ lower) * 0x846CA68B % 2**32
        v = (fold(x, 16) + ((upper >> 9) + 0.5) / 2**23 % 1) * (1 - 2**-24) / 2**31
        noise.append(-math.log(-math.log1p(-v)))
    return np.array(noise)


def reference(
    logits: Sequence[float] | Floats,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> Floats:
    """The distribution of the next token, one token after another, in float64."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in [*params.stop_token_ids, *([] if params.ignore_eos else eos)]:
            x[token] = -math.inf
    for token in range(len(x)):
        times = list(output).count(token)
        if times or token in prompt:
            factor = params.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if params.greedy:
        p = np.zeros(len(x))
        p[np.argmax(x)] = 1
        return p
    p = np.exp((x - x.max()) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    if params.top_p < 1:
        p /= p.sum()
        mass, kept = 0.0, []
        for token in np.argsort(-p, kind="stable"):
            if mass >= params.top_p:
                break
            kept.append(token)
            mass += p[token]
        p[np.setdiff1d(np.arange(len(p)), kept)] = 0
    return np.asarray(p / p.sum(), dtype=np.float64)


def sampler_for(
    requests: Sequence[dict[str, Any]],
    vocab_size: int,
    *,
    rows: Sequence[int] | None = None,
    device: str = "cpu",
) -> Sampler:
    """A sampler with `requests[i]` in row `rows[i]`."""
    places = range(len(requests)) if rows is None else rows
    sampler = Sampler(max(places, default=0) + 1, vocab_size, device)
    for row, request in zip(places, requests, strict=True):
        settings = dict(request)
        if settings["params"].seed is None:
            settings.setdefault("seed", row)
        sampler.set_row(row, settings.pop("params"), **settings)
    return sampler


def choose(
    sampler: Sampler, logits: Tensor, rows: Sequence[int], steps: Sequence[int] | int = 0
) -> Sampled:
    step = [steps] * len(rows) if isinstance(steps, int) else steps
    return sampler.sample(logits, torch.tensor(rows), torch.tensor(step), sampler.plan(rows))


def chi_square_limit(freedom: int, z: float = 4.0) -> float:
    """What a chi-square statistic exceeds once in about 30,000 (Wilson and Hilferty's approximation)."""
    return float(freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3)


def assert_drawn_from(counts: NDArray[np.int64], p: Floats) -> None:
    assert counts[p == 0].sum() == 0, "a token was drawn that has no probability"
    expected = p[p > 0] * counts.sum()
    assert expected.min() > 5, "the test needs more draws"
    statistic = (((counts[p > 0] - expected) ** 2) / expected).sum()
    assert statistic < chi_square_limit(max(len(expected) - 1, 1))


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Settings with any mixture of features."""

    def sometimes(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=sometimes(0.0, float(rng.uniform(0.3, 2))),
        top_k=sometimes(int(rng.integers(2, 40)), 0),
        top_p=sometimes(float(rng.uniform(0.1, 0.99)), 1.0),
        min_p=sometimes(float(rng.uniform(0.001, 0.3)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        min_tokens=sometimes(int(rng.integers(1, 6)), 0),
        stop_token_ids=sometimes((int(rng.integers(vocab_size)),), ()),
        ignore_eos=bool(rng.random() < 0.2),
        logit_bias=sometimes(
            {int(rng.integers(vocab_size)): float(rng.uniform(-5, 5)) for _ in range(3)}, {}
        ),
        logprobs=sometimes(int(rng.integers(0, 5)), None),
        seed=int(rng.integers(1 << 62)),
    )


def random_request(rng: np.random.Generator, vocab_size: int) -> dict[str, Any]:
    return {
        "params": random_params(rng, vocab_size),
        "prompt_ids": rng.integers(vocab_size, size=int(rng.integers(1, 20))).tolist(),
        "output_ids": rng.integers(vocab_size, size=int(rng.integers(0, 8))).tolist(),
        "eos_ids": [int(rng.integers(vocab_size))],
    }


def test_splitmix64_is_the_published_one() -> None:
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    ]
    assert splitmix64_stream(1234567, 4) == known
    assert noise.stream_key(1234567) % 2**64 == known[0]


def test_noise_is_the_defined_one() -> None:
    for seed, step in ((0, 0), (1, 0), (5, 1000), ((1 << 64) - 1, 7)):
        keys, steps = torch.tensor([noise.stream_key(seed)]), torch.tensor([step])
        found = -(
            -noise.negative_exponentials(keys, steps, torch.arange(3000, dtype=torch.int32))[0]
        ).log()
        expected = gumbel(seed, step, 3000)
        # 1 - v is a multiple of 2**-24, which shows only where it is small: where the noise is lowest.
        exponential = np.exp(-expected)
        limit = 1e-6 + 2**-24 * np.exp(exponential) / exponential
        assert (np.abs(found.double().numpy() - expected) < limit).all()


def correlated(one: Tensor, other: Tensor) -> None:
    """Fail unless two samples in 16 classes each are independent: chi-square over the pairs."""
    pairs = np.bincount(((one >> 27) * 16 + (other >> 27)).flatten().numpy(), minlength=256)
    assert_drawn_from(pairs, np.full(256, 1 / 256))


def test_noise_of_neighbouring_tokens_steps_and_seeds_is_independent() -> None:
    ids = torch.arange(3000, dtype=torch.int32)

    def bits_of(seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
        keys = torch.tensor([noise.stream_key(seed) for seed in seeds])
        lower, upper = noise.random_words(keys, torch.tensor(steps)).split(1, dim=1)
        return noise.noise_bits(upper, lower, ids)

    by_step, by_seed = bits_of([3] * 40, range(40)), bits_of(range(40), [0] * 40)
    for distance in (1, 2, 3, 16, 256, 1024):
        correlated(by_step[:, distance:], by_step[:, :-distance])
    correlated(by_step[1:], by_step[:-1])
    correlated(by_seed[1:], by_seed[:-1])
    correlated(by_step[1:, 1:], by_step[:-1, :-1])
    # Three at a time: whether the exclusive or of two tells about a third.
    correlated(by_step[:, 2:] ^ by_step[:, 1:-1], by_step[:, :-2])


def test_tokens_are_those_of_the_reference() -> None:
    """The same noise on the reference's distribution; only near ties may go another way."""
    rng = np.random.default_rng(2)
    vocab_size = 97
    ties = 0
    for _ in range(40):
        requests = [random_request(rng, vocab_size) for _ in range(25)]
        logits = torch.tensor(rng.normal(size=(25, vocab_size)) * 4, dtype=torch.float32)
        steps = [len(request["output_ids"]) for request in requests]
        tokens = choose(
            sampler_for(requests, vocab_size), logits, range(25), steps
        ).tokens.tolist()
        for row, request in enumerate(requests):
            params = request["params"]
            p = reference(
                logits[row].numpy(),
                params,
                request["prompt_ids"],
                request["output_ids"],
                request["eos_ids"],
            )
            with np.errstate(divide="ignore"):
                perturbed = np.log(p) + (
                    0 if params.greedy else gumbel(params.seed, steps[row], vocab_size)
                )
            second, first = np.sort(perturbed)[-2:]
            if first - second > 1e-5:
                assert tokens[row] == int(np.argmax(perturbed)), (row, params)
            else:
                ties += 1
    assert ties < 10  # of 1,000: otherwise nothing was compared


def test_the_distribution_over_seeds_is_the_same_as_over_steps() -> None:
    """Seeds 0, 1, 2, ... are what people use; their first tokens must not be alike."""
    logits, draws = [0.3, -0.2, 1.0, 0.1, -1.0], 4_000
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(draws)]
    sampler = sampler_for([{"params": one} for one in params], 5)
    tokens = choose(sampler, torch.tensor(logits).expand(draws, -1), range(draws)).tokens
    assert_drawn_from(np.bincount(tokens.numpy(), minlength=5), reference(logits, params[0]))


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """Probability 1e-4, 1e-5 and 1e-6, many tokens of each: counts within four standard deviations."""
    draws = 20_000
    for probability, rare in ((1e-4, 200), (1e-5, 200), (1e-6, 500)):
        logits = [0.0] + [math.log(probability / (1 - rare * probability))] * rare
        sampler = sampler_for([{"params": SamplingParams(temperature=1.0, seed=17)}], rare + 1)
        tokens = choose(
            sampler, torch.tensor(logits).expand(draws, -1), [0] * draws, range(draws)
        ).tokens
        expected = draws * rare * probability
        assert abs(int((tokens > 0).sum()) - expected) < 4 * math.sqrt(expected), probability


def mask_of(allowed: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    words = np.zeros((len(allowed), -(-vocab_size // 32)), dtype=np.uint32)
    for place, tokens in enumerate(allowed):
        for token in tokens:
            words[place, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("vocab_size", [64, 75, 500])
def test_only_allowed_tokens_are_chosen_whatever_else_is_asked_for(vocab_size: int) -> None:
    rng = np.random.default_rng(13)
    allowed = [
        [31, 32, 63],
        [0],
        list(range(vocab_size)),
        [vocab_size - 1, 5],
        rng.permutation(vocab_size)[:20].tolist(),
    ]
    requests = [random_request(rng, vocab_size) for _ in range(5)]
    for request in requests:
        request["params"] = replace(request["params"], min_tokens=0, logprobs=2)
    logits = torch.tensor(rng.normal(size=(5, vocab_size)), dtype=torch.float32)
    before, mask = logits.clone(), mask_of(allowed, vocab_size)
    sampler, same = sampler_for(requests, vocab_size), sampler_for(requests, vocab_size)
    rows, host = torch.arange(5), list(range(5))
    for step in range(30):
        steps = torch.full((5,), step)
        sampled = sampler.sample(
            logits, rows, steps, sampler.plan(host), TokenBitmask(mask, rows)
        )
        for token, choices in zip(sampled.tokens.tolist(), allowed, strict=True):
            assert token in choices
        assert sampled.logprobs is not None
        raw = logits.log_softmax(1).gather(1, sampled.tokens[:, None])[:, 0]
        torch.testing.assert_close(sampled.logprobs[0], raw)
        # The same as if the model had put all others at minus infinity.
        barred = torch.ones(5, vocab_size, dtype=torch.bool)
        for place, choices in enumerate(allowed):
            barred[place, choices] = False
        only = logits.masked_fill(barred, -math.inf)
        expected = same.sample(only, rows, steps, same.plan(host)).tokens
        assert torch.equal(sampled.tokens, expected)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [97, 1001, 50_257])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int) -> None:
    """Alone, together, in another order, in other rows: the same tokens, bit for bit."""
    rng = np.random.default_rng(4)
    count, steps = 19, 4
    requests = [random_request(rng, vocab_size) for _ in range(count)]
    logits = torch.tensor(rng.normal(size=(steps, count, vocab_size)) * 3, dtype=torch.float32)

    def run(members: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
        sampler = sampler_for([requests[member] for member in members], vocab_size, rows=rows)
        starts = [len(requests[member]["output_ids"]) for member in members]
        return [
            choose(
                sampler, logits[step, list(members)], rows, [start + step for start in starts]
            ).tokens.tolist()
            for step in range(steps)
        ]

    together = run(range(count), range(count))
    for member in range(count):
        assert run([member], [0]) == [[tokens[member]] for tokens in together]
    order = rng.permutation(count).tolist()
    assert run(order, range(count)) == [
        [tokens[member] for member in order] for tokens in together
    ]
    some, rows = [3, 7, 11], [5, 0, 2]
    assert run(some, rows) == [[tokens[member] for member in some] for tokens in together]


def test_a_request_without_a_seed_gets_one_that_can_be_given_back() -> None:
    logits, params = torch.zeros(1, 1000), SamplingParams(temperature=1.0)
    one, other = Sampler(2, 1000, "cpu"), Sampler(2, 1000, "cpu")
    seeds = [one.set_row(0, params), one.set_row(1, params)]
    assert seeds[0] != seeds[1]
    assert other.set_row(0, params) not in seeds
    first = [int(choose(one, logits, [0], step).tokens) for step in range(10)]
    other.set_row(1, params, seed=seeds[0])  # after a preemption, in another row
    assert [int(choose(other, logits, [1], step).tokens) for step in range(10)] == first


def test_penalties_follow_the_output_as_it_grows_and_survive_a_preemption() -> None:
    rng, vocab_size = np.random.default_rng(5), 12
    params = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5, max_tokens=500
    )
    prompt = [3, 3, 8]
    sampler = sampler_for([{"params": params, "prompt_ids": prompt}] * 2, vocab_size)
    output: list[int] = []
    for step in range(60):
        logits = (
            rng.normal(size=vocab_size).astype(np.float32)
            + np.arange(vocab_size, dtype=np.float32) / 8
        )
        if step == 30:  # comes back in row 1
            sampler.set_row(0, SamplingParams())
            sampler.set_row(1, params, prompt, output)
        row = int(step >= 30)
        token = int(choose(sampler, torch.tensor(logits)[None], [row], step).tokens)
        assert token == int(np.argmax(reference(logits, params, prompt, output)))
        output.append(token)
    assert len(set(output)) > 6  # the penalties moved it on


def test_a_row_does_not_inherit_the_penalties_of_the_request_before() -> None:
    params = SamplingParams(frequency_penalty=2.0)
    sampler = sampler_for([{"params": params, "output_ids": [1] * 5}], 4)
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0]])
    assert int(choose(sampler, logits, [0], 5).tokens) == 2
    sampler.set_row(0, params)
    assert int(choose(sampler, logits, [0]).tokens) == 1
    params = SamplingParams(repetition_penalty=10.0)
    sampler.set_row(0, params, prompt_ids=[1])
    assert int(choose(sampler, logits, [0]).tokens) == 2
    sampler.set_row(0, params, prompt_ids=[3])
    assert int(choose(sampler, logits, [0]).tokens) == 1


def test_logit_bias_can_force_and_forbid() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 9] = 30
    requests = [
        {"params": SamplingParams(logit_bias=bias)}
        for bias in ({4: 100}, {9: -100, 30: 0.5}, {})
    ]
    sampler = sampler_for(requests, 50)
    assert choose(sampler, logits, [0, 1, 2], 10_000).tokens.tolist() == [4, 30, 9]
    sampler.set_row(
        0, SamplingParams(logit_bias=dict.fromkeys(range(40), -50.0))
    )  # more than the array held
    assert choose(sampler, logits, [0, 1, 2]).tokens.tolist() == [40, 30, 9]
    sampler.set_row(1, SamplingParams())  # and the bias of the request before is gone
    assert choose(sampler, logits, [0, 1, 2]).tokens.tolist() == [40, 9, 9]


def test_only_rows_with_edits_are_edited() -> None:
    few, many = (
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(logit_bias=dict.fromkeys(range(40), -9.0)),
    )
    sampler = sampler_for([{"params": one} for one in (few, SamplingParams(), many, few)], 50)
    assert sampler.plan([1]).edits is None
    edits = sampler.plan([0, 1, 2, 3]).edits
    assert edits is not None and edits.positions.tolist() == [0, *[2] * 40, 3]
    assert choose(sampler, torch.zeros(4, 50), range(4)).tokens.tolist() == [3, 0, 40, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_way_to_stop(temperature: float) -> None:
    eos = 7
    stop = 3
    other = 5
    logits = torch.full((1, 10), -50.0)
    logits[0, [eos, stop, other]] = torch.tensor([50.0, 40.0, 30.0])
    params = SamplingParams(min_tokens=3, stop_token_ids=(stop,), temperature=temperature)
    sampler = sampler_for([{"params": params, "eos_ids": [eos, 10_000]}], 10)
    assert [int(choose(sampler, logits, [0], step).tokens) for step in range(5)] == [
        other
    ] * 3 + [eos] * 2
    sampler.set_row(0, SamplingParams(min_tokens=3, ignore_eos=True), eos_ids=[eos])
    assert (
        int(choose(sampler, logits, [0]).tokens) == eos
    )  # it stops nothing, so it is not held back


@pytest.mark.parametrize("top", [0, 1, 2, 5, 20, 40])
def test_of_equal_logits_the_lowest_token_ids_are_reported_however_many_are_wanted(
    top: int,
) -> None:
    """In half precision many logits are equal, and another request of the batch may want more of them."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).round()
    expected = [sorted(range(40), key=lambda token: (-row[token], token)) for row in logits]
    _, ids, values = ops.raw_logprobs(logits, logits.argmax(1), top)
    assert ids.tolist() == [order[:top] for order in expected]
    assert ids.shape == values.shape == (6, top)


def test_logprobs_are_the_models_own() -> None:
    rng, vocab_size = np.random.default_rng(6), 200
    logits = torch.tensor(rng.normal(size=(4, vocab_size)) * 5, dtype=torch.float32)
    busy = {"temperature": 0.7, "repetition_penalty": 1.5, "logit_bias": {2: 5.0}, "top_k": 3}
    wanted = [None, 0, 3, 20]
    requests = [
        {"params": SamplingParams(logprobs=count, **busy), "prompt_ids": [1, 2]}
        for count in wanted
    ]  # type: ignore[arg-type]
    sampled = choose(sampler_for(requests, vocab_size), logits, range(4))
    x = logits.numpy().astype(np.float64)
    expected = x - np.log(np.exp(x).sum(1, keepdims=True))
    assert sampled.logprob(0) is None
    for row in (1, 2, 3):
        logprob, count = sampled.logprob(row), wanted[row]
        assert logprob is not None
        assert count is not None
        assert logprob.chosen == pytest.approx(
            expected[row, int(sampled.tokens[row])], abs=1e-5
        )
        best = np.argsort(-expected[row])[:count]
        assert [token for token, _ in logprob.top] == best.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(
            expected[row, best].tolist(), abs=1e-5
        )
    assert HostSampled(sampled).get() == [
        (int(sampled.tokens[row]), sampled.logprob(row)) for row in range(4)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        lambda row: row.fill_(math.nan),
        lambda row: row[7].fill_(math.nan),
        lambda row: row.fill_(-math.inf),
        lambda row: row.fill_(math.inf),
        lambda row: row[7].fill_(math.inf),
    ],
    ids=["all-nan", "one-nan", "all-minus-inf", "all-inf", "one-inf"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bad_logits_give_a_token_and_harm_no_neighbour(
    bad: Callable[[Tensor], Tensor], temperature: float
) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=temperature, top_k=50, top_p=0.9, min_p=0.01, seed=1)
    sampler = sampler_for([{"params": params}] * 3, 500)
    good = choose(sampler, logits, range(3)).tokens
    bad(logits[1])
    sampled = choose(sampler, logits, range(3))
    tokens = sampled.tokens
    assert tokens[[0, 2]].tolist() == good[[0, 2]].tolist()
    assert 0 <= int(tokens[1]) < 500, "the device goes on with a token"
    told = [token for token, _ in HostSampled(sampled).get()]
    assert told == [
        int(good[0]),
        NAN_TOKEN if logits[1].isnan().any() else int(tokens[1]),
        int(good[2]),
    ]
    if math.isinf(float(logits[1, 7])) and math.isfinite(float(logits[1, 8])):
        assert int(tokens[1]) == 7


@pytest.mark.parametrize(
    "settings",
    [{}, {"logit_bias": {3: 5.0}}, {"repetition_penalty": 1.2}, {"logprobs": 2}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_told_where_it_may_be_chosen(
    settings: dict[str, Any], temperature: float
) -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    logits[1, 40], logits[2, 7] = math.nan, math.nan
    sampler = sampler_for(
        [{"params": SamplingParams(temperature=temperature, seed=1, **settings)}] * 3, 64
    )
    words = torch.tensor(
        [[-1, -1], [-1, -1], [~(1 << 7), 0]], dtype=torch.int32
    )  # not token 7, nor from 32 on
    rows = torch.arange(3)
    steps, allowed = torch.zeros(3, dtype=torch.int64), TokenBitmask(words, rows)
    sampled = sampler.sample(logits, rows, steps, sampler.plan(range(3)), allowed)
    first, second, third = [token for token, _ in HostSampled(sampled).get()]
    assert second == NAN_TOKEN and 0 <= first < 64 and 0 <= third < 32


EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    min_tokens=2,
    stop_token_ids=(1,),
    logit_bias={5: 1.0},
    logprobs=3,
)


def operations(params: Sequence[SamplingParams]) -> list[str]:
    rows, logits = list(range(len(params))), torch.zeros(len(params), 64)
    sampler = sampler_for([{"params": one, "prompt_ids": [1, 2]} for one in params], 64)
    plan = sampler.plan(rows)
    on_device = torch.tensor(rows)
    steps = torch.zeros(len(rows), dtype=torch.int64)
    with Operations() as record:
        sampler.sample(logits, on_device, steps, plan)
    assert not logits.any(), "logits were changed"
    return record.names


@pytest.mark.parametrize("others", [[], [SamplingParams()], [EVERYTHING]])
def test_sampling_never_reads_from_the_device(others: list[SamplingParams]) -> None:
    """These operations make the host wait, and cannot stand in a CUDA graph."""
    names = operations([EVERYTHING, *others])
    assert not {
        "_local_scalar_dense",
        "item",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal",
    } & set(names)
    assert "scatter_add_" in names  # something was recorded


def test_sampling_has_no_loop_over_rows() -> None:
    greedy, warm = replace(EVERYTHING, temperature=0.0), replace(EVERYTHING, top_k=0, top_p=1)
    for same in (greedy, warm, EVERYTHING):
        assert operations([same] * 30) == operations([same] * 2)


def test_a_plan_for_any_rows_chooses_the_same_tokens() -> None:
    rng = np.random.default_rng(9)
    vocab_size = 120
    count = 25
    requests = [random_request(rng, vocab_size) for _ in range(count)]
    requests[3]["params"] = SamplingParams()
    logits = torch.tensor(rng.normal(size=(count, vocab_size)), dtype=torch.float32)
    logits[3] = 0  # every token is as likely as the first
    steps = torch.zeros(count, dtype=torch.int64)
    one, other = sampler_for(requests, vocab_size), sampler_for(requests, vocab_size)
    rows, rows_host = torch.arange(count), list(range(count))
    plan = other.plan(rows_host).for_any_rows()
    assert len(plan.draws) == 1
    for _ in range(5):
        expected = one.sample(logits, rows, steps, one.plan(rows_host)).tokens
        assert other.sample(logits, rows, steps, plan).tokens.tolist() == expected.tolist()
        steps += 1


def test_a_vocabulary_too_large_for_exact_sums_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size is 3000000, but must be at most 2097152"):
        Sampler(1, 3_000_000, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_what_the_cpu_draws_eagerly_and_from_a_graph() -> None:
    count = 24
    vocab_size = 50_257
    steps = 6
    rng = np.random.default_rng(7)
    requests = [random_request(rng, vocab_size) for _ in range(count - 1)] + [
        {"params": EVERYTHING}
    ]
    logits = torch.tensor(rng.normal(size=(steps, count, vocab_size)) * 3, dtype=torch.float32)
    starts = torch.tensor([len(request.get("output_ids", ())) for request in requests])
    host = sampler_for(requests, vocab_size)
    expected = [
        choose(host, logits[step], range(count), (starts + step).tolist()).tokens
        for step in range(steps)
    ]

    rows, rows_host = torch.arange(count, device="cuda"), list(range(count))
    eager, sampler, warm = (sampler_for(requests, vocab_size, device="cuda") for _ in range(3))
    found = [
        eager.sample(
            logits[step].cuda(), rows, (starts + step).cuda(), eager.plan(rows_host)
        ).tokens.cpu()
        for step in range(steps)
    ]
    # exp is rounded differently, so a draw that falls between two tokens may go the other way, very seldom.
    assert sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True)) <= 1

    plan = sampler.plan(rows_host).for_any_rows()
    static = torch.zeros(count, vocab_size, device="cuda")
    step_now = torch.zeros(count, dtype=torch.int64, device="cuda")
    warm.plan(rows_host)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm.sample(static, rows, step_now, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(static, rows, step_now, plan).tokens
    for step in range(steps):
        static.copy_(logits[step])
        step_now.copy_(starts + step)
        graph.replay()
        assert tokens.cpu().tolist() == found[step].tolist()

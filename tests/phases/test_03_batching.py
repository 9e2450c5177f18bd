"""Phase 03: a row of a batch says what it says alone.

From the smallest part to the whole, so that the first failure is the nearest to its cause.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models
from torch import Tensor

import batching
import forward
import kv_cache
from batching import BatchGenerator, Waste
from batching.attention import PaddedAttention
from common.errors import NotANumber, UserError
from common.events import Completion, generate
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward import Model, random_model
from forward.shapes import SHAPES
from kv_cache.cache import KVCache
from tests.equivalence.compare import assert_all_same

FLOAT32: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
MIXED = 13


def tiny_gpt2(context: int = 1024) -> ModelConfig:
    """Positions are learned here, one row of a table each: a wrong one is not forgiven, as by RoPE."""
    small = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 16,
    }
    config = replace(
        SHAPES["gpt2"], vocab_size=257, intermediate_size=64, sliding_windows=(), **small
    )
    return replace(config, max_position_embeddings=context, eos_token_ids=(0,))


@pytest.fixture(params=["tiny", "tiny-window", "gpt2"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    config = tiny_gpt2() if request.param == "gpt2" else SHAPES[request.param]
    return random_model(config, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return random_model(SHAPES["tiny"], device="cpu", dtype=torch.float32)


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 tokens and outputs of 1 to 40, some sampled, some ending early."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 257) for _ in range(rng.choice([1, 2, 7, 23, 24, 25, 60]))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            ignore_eos=i % 2 == 0,
            stop_token_ids=(i,) if i % 3 == 0 else (),
        )
        for i in range(count)
    ]
    return prompts, params


@dataclass
class Steps:
    """What went through the model in each step."""

    ids: list[list[list[int]]] = field(default_factory=list)
    positions: list[list[list[int]]] = field(default_factory=list)
    logits: list[tuple[int, ...]] = field(default_factory=list)
    caches: list[KVCache] = field(default_factory=list)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(len(ids), len(ids[0])) for ids in self.ids]


def watch(engine: BatchGenerator, prompts: Sequence[Sequence[int]], params: Any) -> Steps:
    """Generate to the end, and note what each step computed."""
    steps = Steps()

    def before(_: object, step: tuple[Tensor, Tensor, PaddedAttention]) -> None:
        steps.ids.append(step[0].tolist())
        steps.positions.append(step[1].tolist())
        steps.caches.append(step[2].cache)

    def head(_: object, __: object, logits: Tensor) -> None:
        steps.logits.append(tuple(logits.shape))

    hooks = [
        engine.model.register_forward_pre_hook(before),
        engine.model.lm_head.register_forward_hook(head),
    ]
    generate(engine, prompts, params)
    for hook in hooks:
        hook.remove()
    return steps


def lasting(*counts: int) -> list[SamplingParams]:
    """A greedy request of each number of tokens."""
    return [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]


# The mask


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunk", [(0, 6), (4, 2), (5, 1)], ids=["prefill", "chunk", "decode"])
def test_a_query_sees_its_own_past_and_no_padding(
    chunk: tuple[int, int], window: int | None
) -> None:
    start, count = chunk
    attention = PaddedAttention(
        KVCache(SHAPES["tiny"], 3, 6, **FLOAT32), torch.tensor([0, 2, 4])
    )
    attention.cache.advance(start)
    attention.begin(count)
    end = start + count
    # What the ring of a window layer holds for a single query has been cut already.
    first = end - window if window is not None and count == 1 else 0
    mask = attention.mask(torch.arange(first, end), window)
    assert mask is not None, "no mask at all: padding is visible"
    seen = mask.expand(3, 1, count, end - first)[:, 0].tolist()  # [B, S, L]
    for row, padding in enumerate([0, 2, 4]):
        for query in range(start, end):
            sees = [first + key for key, shown in enumerate(seen[row][query - start]) if shown]
            past = range(
                padding if window is None else max(padding, query - window + 1), query + 1
            )
            # A padding query sees itself alone: a softmax over nothing is 0/0.
            expected = list(past) if query >= padding else [query]
            assert sees == expected, (
                f"row {row} with {padding} columns of padding: the query in column {query} sees columns "
                f"{sees}, not {expected}"
            )


def test_rows_that_stay_keep_their_own_padding() -> None:
    attention = PaddedAttention(
        KVCache(SHAPES["tiny"], 3, 6, **FLOAT32), torch.tensor([0, 2, 4])
    )
    attention.keep(torch.tensor([0, 2]))
    left = attention.padding.tolist()
    assert left == [0, 4], f"rows 0 and 2 stay with padding 0 and 4, not {left}"
    assert attention.cache.layers[0].keys.shape[0] == 2, (
        "the cache still has the row that left"
    )


# Steps: what is computed


def test_positions_count_from_a_rows_first_token(tiny: Model) -> None:
    steps = watch(batching.load(tiny, batch_size=2), [[8, 9], [1, 2, 3, 4, 5]], lasting(3, 3))
    for row, (prompt, padding) in enumerate([([8, 9], 3), ([1, 2, 3, 4, 5], 0)]):
        given = steps.ids[0][row][padding:]
        assert given == prompt, (
            f"row {row}: after {padding} columns of padding comes {given}, not {prompt}"
        )
        at = [position for step in steps.positions for position in step[row]]
        legal = min(at) >= 0 and max(at) < tiny.max_len
        assert legal, (
            f"row {row}: no table of positions has {at[:padding]}, where its padding is looked up"
        )
        at = at[padding:]
        assert at == list(range(len(at))), (
            f"row {row}: its tokens are at positions {at}, not 0, 1, 2, ..."
        )


def test_a_batch_reads_the_weights_once_a_step(tiny: Model) -> None:
    """The work shrank: sixteen requests take the steps of one, and logits are made where one is sampled."""
    prompts = [[i + 1] * 3 for i in range(16)]
    steps = watch(batching.load(tiny, batch_size=16), prompts, lasting(*[5] * 16))
    assert steps.shapes == [(16, 3)] + [(16, 1)] * 4, (
        f"16 requests of 3 + 5 tokens took {steps.shapes}"
    )
    expected = [(16, 257)] * 5
    assert steps.logits == expected, (
        f"a row a request and step is sampled, but logits are {steps.logits}"
    )


def test_a_batch_ends_with_its_last_row(tiny: Model) -> None:
    """Stopped by tokens 3 and 5, long before the limit of 200: five steps, and not one more."""
    params = [
        SamplingParams(max_tokens=200, min_tokens=n - 1, logit_bias={0: 100.0}) for n in (3, 5)
    ]
    steps = len(watch(batching.load(tiny, batch_size=2), [[1], [2]], params).ids)
    assert steps == 5, f"the last row ended with token 5, but the batch took {steps} steps"


def test_the_cache_has_the_columns_that_are_written(tiny: Model) -> None:
    for limits, expected in (((3, 4), 5 + 4 - 1), ((1, 9000), 5 + (1024 - 2) - 1)):
        # The second batch is left after its first step: how long it may get is known by then.
        engine = batching.load(tiny, batch_size=2)
        caches: list[KVCache] = []
        hook = tiny.register_forward_pre_hook(
            lambda _, step, held=caches: held.append(step[2].cache)
        )
        next(engine.stream([[1, 2, 3, 4, 5], [1, 2]], lasting(*limits)))
        hook.remove()
        columns = caches[0].max_len
        assert columns == expected, (
            f"prompts of 5 and 2, limits {limits}: {columns} columns, not {expected}"
        )


def test_waste_is_counted() -> None:
    """Two rows, lengths 2 and 5, outputs 1 and 4: 3 columns of padding and 3 steps of a finished row."""
    for compact, expected in (
        (False, Waste(computed=2 * 5 + 3 * 2, padding=3, finished=3)),
        (True, Waste(computed=2 * 5 + 3, padding=3, finished=0)),
    ):
        engine = batching.load("random:tiny", device="cpu", batch_size=2, compact=compact)
        generate(engine, [[1, 2], [1, 2, 3, 4, 5]], lasting(1, 4))
        assert engine.waste == expected, (
            f"compact={compact}: counted {engine.waste}, not {expected}"
        )
        assert (
            engine.waste.fraction == (expected.padding + expected.finished) / expected.computed
        )


# Requests: what comes out


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 6, "logit_bias": {0: 100.0}},
        {"n": 3, "temperature": 1.0, "seed": 3},
        {"repetition_penalty": 0.05},  # below 1: what the prompt says is said again
        {"frequency_penalty": 2.0},
        {"temperature": 2.0, "top_k": 7, "seed": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_each_row_has_its_own_settings(tiny: Model, settings: dict[str, Any]) -> None:
    """In the middle of a batch, of which the row before it leaves after its first token."""
    others, own = lasting(1, 12), SamplingParams(max_tokens=9, **settings)
    prompts, params = [[5], [6, 7, 8, 6, 7, 8], [9, 9]], [others[0], own, others[1]]
    expected = generate(kv_cache.load(tiny), prompts, params)
    without = generate(
        kv_cache.load(tiny), prompts[1:2], replace(SamplingParams(), max_tokens=9)
    )
    assert expected[1].token_ids != without[0].token_ids, (
        f"{settings} change nothing: test something else"
    )
    for compact in (False, True):
        engine = batching.load(tiny, batch_size=8, compact=compact)
        assert_all_same(tiny, expected, generate(engine, prompts, params))


@pytest.mark.parametrize("compact", [False, True])
def test_log_probabilities_are_the_rows_own(tiny: Model, compact: bool) -> None:
    """Asked for by two of three rows; the one before them leaves after its first token."""
    prompts = [[5], [6, 7], [8]]
    params = [
        replace(one, logprobs=top)
        for one, top in zip(lasting(1, 6, 4), (None, 2, 0), strict=True)
    ]
    alone = generate(kv_cache.load(tiny), prompts, params)
    together = generate(batching.load(tiny, batch_size=3, compact=compact), prompts, params)
    for one, other in zip(alone, together, strict=True):
        had, has = (len(c.logprobs or ()) for c in (one, other))
        assert had == has, (
            f"request {one.index}: {has} tokens have log-probabilities, not {had}"
        )
        for token, (a, b) in enumerate(
            zip(one.logprobs or (), other.logprobs or (), strict=True)
        ):
            where = f"request {one.index}, token {token}"
            assert b.chosen == pytest.approx(a.chosen, abs=1e-4), (
                f"{where}: {b.chosen}, not {a.chosen}"
            )
            ids = [[token_id for token_id, _ in entry.top] for entry in (a, b)]
            assert ids[0] == ids[1], (
                f"{where}: the most likely tokens are {ids[1]}, not {ids[0]}"
            )


def test_a_stop_string_ends_its_row(tiny: Model, tmp_path: Path) -> None:
    letters = {f"<{token}>": token for token in range(257)}
    backend = tokenizers.Tokenizer(models.WordLevel(letters, unk_token="<0>"))
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    said = generate(kv_cache.load(tiny), [[5]], lasting(6))[0].token_ids
    params = [replace(lasting(6)[0], stop=(f"{said[2]}>",)), lasting(6)[0]]
    stopped, other = generate(
        batching.load(tiny, batch_size=2, tokenizer=tokenizer), [[5], [5]], params
    )
    reason = f"request 0 of a batch was to stop after token 2, {said[2]}; it said {stopped.token_ids}"
    assert (stopped.token_ids, stopped.finish_reason) == (said[:3], "stop"), reason
    assert other.token_ids == said, "request 1 has no stop string, but ended early"


def test_no_tokens_asked_is_one_event(tiny: Model) -> None:
    events = list(batching.load(tiny, batch_size=2).stream([[1], [2], [3]], lasting(2, 0, 1)))
    ends = sorted((e.index, e.token_id is None) for e in events if e.finish_reason is not None)
    assert ends == [(0, False), (1, True), (2, False)], (
        f"(request, ended without a token): {ends}"
    )


def test_a_row_says_nothing_after_its_end(tiny: Model) -> None:
    """And the problem that phase 04 solves: request 2 waits for request 1, though request 0 is long done."""
    engine = batching.load(tiny, batch_size=2)
    order = [event.index for event in engine.stream([[1], [2], [3]], lasting(1, 20, 1))]
    assert order == [0] + [1] * 20 + [2], f"tokens came from requests {order}"


@pytest.mark.parametrize("wrong", [0, True, 2.5, "8"])
def test_a_wrong_size_is_named(tiny: Model, wrong: Any) -> None:
    with pytest.raises(UserError, match=r"^batch_size is .*, but must be .*at least 1"):
        batching.load(tiny, batch_size=wrong)


def test_logits_that_are_no_numbers_are_no_token() -> None:
    engine = batching.load("random:tiny", device="cpu", batch_size=2)
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(NotANumber, match="request 1: the model's logits are not a number"):
        list(engine.stream([[1], [2]], lasting(0, 3)))


def test_finished_row_may_be_dragged_beyond_the_context() -> None:
    """GPT-2 has an embedding for each position and none beyond: a dead row must not look one up."""
    prompts, params = [[1] * 30, [2]], lasting(1, 99)
    for config in (replace(SHAPES["tiny"], max_position_embeddings=32), tiny_gpt2(context=32)):
        model = random_model(config, device="cpu", dtype=torch.float32)
        engine = batching.load(model, batch_size=2)
        positions = [
            p for step in watch(engine, prompts, params).positions for row in step for p in row
        ]
        assert max(positions) <= 31, (
            f"position {max(positions)} of a context of 32, in a row that had ended"
        )
        alone = generate(kv_cache.load(model), prompts, params)
        assert_all_same(model, alone, generate(engine, prompts, params))


# Every model, and everything at once


def test_padding_reaches_no_real_row(model: Model) -> None:
    """A short row's hidden states are those it has without its long neighbour."""
    short, long = [4, 5, 6], list(range(1, 50))

    def last_hidden(rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        padding = torch.tensor([longest - len(row) for row in rows])
        cache = KVCache(model.config, len(rows), longest, **FLOAT32)
        attention = PaddedAttention(cache, padding)
        attention.begin(longest)
        ids = torch.tensor([[9] * (longest - len(row)) + row for row in rows])
        positions = (torch.arange(longest) - padding[:, None]).clamp(min=0)
        hidden: torch.Tensor = model(ids, positions, attention)
        return hidden[:, -1]

    with torch.inference_mode():
        alone, together = last_hidden([short]), last_hidden([short, long])
    assert torch.isfinite(together).all(), (
        "NaN: a padding query saw nothing, and its values reached a row"
    )
    off = float((together[0] - alone[0]).abs().max())
    assert off <= 2e-5, (
        f"the short row's last token moves by {off:.1e} beside a long neighbour"
    )


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Completion]:
    """What phase 02 makes of the mixed requests, one by one."""
    return generate(kv_cache.load(model), *mixed_requests(MIXED))


@pytest.mark.parametrize("batch_size", [1, 3, MIXED])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.slow
def test_tokens_equal_phase_02(
    model: Model, alone: list[Completion], batch_size: int, compact: bool
) -> None:
    engine = batching.load(model, batch_size=batch_size, compact=compact)
    assert_all_same(model, alone, generate(engine, *mixed_requests(MIXED)))


def test_tokens_equal_phase_01(model: Model) -> None:
    prompts, params = mixed_requests(5)
    naive = generate(forward.load(model), prompts, params)
    together = generate(batching.load(model, batch_size=5), prompts, params)
    assert_all_same(model, naive, together)

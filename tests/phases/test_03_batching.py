"""Phase 03: a row of a batch says what it says alone."""

from __future__ import annotations

import random

import pytest
import torch

import batching
import forward
import kv_cache
from batching import Waste
from batching.attention import PaddedAttention
from common.errors import UserError
from common.events import generate
from common.sampling.params import SamplingParams
from forward import Model, load_model
from forward.loading import random_model
from forward.shapes import SHAPES
from kv_cache.cache import KVCache


@pytest.fixture(params=["tiny", "tiny-window"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return load_model(f"random:{request.param}", device="cpu", dtype="float32")


def mixed_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 tokens and outputs of 1 to 40, some sampled, some ending early."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(1, 257) for _ in range(rng.choice([1, 2, 7, 23, 24, 25, 60]))] for _ in range(count)
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


@pytest.mark.parametrize("batch_size", [1, 3, 13])
@pytest.mark.parametrize("compact", [False, True])
def test_tokens_equal_phase_02(model: Model, batch_size: int, compact: bool) -> None:
    prompts, params = mixed_requests(13)
    alone = generate(kv_cache.load(model), prompts, params)
    together = generate(batching.load(model, batch_size=batch_size, compact=compact), prompts, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.finish_reason for c in together] == [c.finish_reason for c in alone]


def test_tokens_equal_phase_01(model: Model) -> None:
    prompts, params = mixed_requests(5)
    naive = generate(forward.load(model), prompts, params)
    together = generate(batching.load(model, batch_size=5), prompts, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in naive]


def test_padding_reaches_no_real_row(model: Model) -> None:
    """A short row's hidden states are those it has without its long neighbour."""
    short, long = [4, 5, 6], list(range(1, 50))

    def last_hidden(rows: list[list[int]]) -> torch.Tensor:
        longest = max(map(len, rows))
        padding = torch.tensor([longest - len(row) for row in rows])
        cache = KVCache(model.config, len(rows), longest, device=torch.device("cpu"), dtype=torch.float32)
        attention = PaddedAttention(cache, padding)
        attention.begin(longest)
        ids = torch.tensor([[9] * (longest - len(row)) + row for row in rows])
        positions = (torch.arange(longest) - padding[:, None]).clamp(min=0)
        hidden: torch.Tensor = model(ids, positions, attention)
        return hidden[:, -1]

    with torch.inference_mode():
        alone, together = last_hidden([short]), last_hidden([short, long])
    assert torch.isfinite(together).all()
    torch.testing.assert_close(together[0], alone[0], atol=2e-5, rtol=0)


def test_a_batch_reads_the_weights_once_a_step() -> None:
    """The work shrank: sixteen requests take the steps of one."""
    model = load_model("random:tiny", device="cpu", dtype="float32")
    steps: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, args: steps.append(tuple(args[0].shape)))
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    generate(batching.load(model, batch_size=16), [[i + 1] * 3 for i in range(16)], params)
    assert steps == [(16, 3)] + [(16, 1)] * 4


def test_waste_is_counted() -> None:
    """Two rows, lengths 2 and 5, outputs 1 and 4: 3 columns of padding and 3 steps of a finished row."""
    generator = batching.load("random:tiny", device="cpu", batch_size=2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4)]
    generate(generator, [[1, 2], [1, 2, 3, 4, 5]], params)
    assert (generator.waste.computed, generator.waste.padding, generator.waste.finished) == (
        2 * 5 + 3 * 2,
        3,
        3,
    )
    assert generator.waste.fraction == 6 / 16
    compacted = batching.load("random:tiny", device="cpu", batch_size=2, compact=True)
    generate(compacted, [[1, 2], [1, 2, 3, 4, 5]], params)
    assert compacted.waste == Waste(computed=2 * 5 + 3, padding=3, finished=0)


def test_next_batch_waits_for_the_longest_row() -> None:
    """The problem that phase 04 solves: request 2 waits for request 1, though request 0 is long done."""
    generator = batching.load("random:tiny", device="cpu", batch_size=2)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 20, 1)]
    order = [event.index for event in generator.stream([[1], [2], [3]], params)]
    assert order == [0] + [1] * 20 + [2]


def test_finished_row_may_be_dragged_beyond_the_context() -> None:
    """GPT-2 has an embedding for each position and none beyond: a dead row must not look one up."""
    from dataclasses import replace

    small = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    config = replace(
        SHAPES["gpt2"],
        vocab_size=50,
        intermediate_size=16,
        max_position_embeddings=32,
        sliding_windows=(),
        eos_token_ids=(),
        **small,
    )
    model = random_model(config, device="cpu", dtype=torch.float32)
    prompts, params = [[1] * 30, [2]], [SamplingParams(max_tokens=n) for n in (1, 31)]
    together = generate(batching.load(model, batch_size=2), prompts, params)
    alone = generate(kv_cache.load(model), prompts, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_leaving_early_is_harmless(model: Model) -> None:
    generator = batching.load(model, batch_size=2)
    stream = generator.stream([[1], [2], [3]], SamplingParams(max_tokens=9, ignore_eos=True))
    next(stream)
    stream.close()
    assert len(generate(generator, [[1]], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 9


def test_bad_input_is_named_before_anything_is_computed(model: Model) -> None:
    with pytest.raises(UserError, match="batch_size is 0"):
        batching.load(model, batch_size=0)
    with pytest.raises(UserError, match="token id -1"):
        batching.load(model).stream([[1], [-1]], SamplingParams())
    assert generate(batching.load(model), [], SamplingParams()) == []

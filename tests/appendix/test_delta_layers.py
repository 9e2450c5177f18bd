"""Layers of Qwen3.5 in few kernels: against torch's, and the begin of a step against the pool's."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.models.config import DeltaConfig, ModelConfig
from common.sampling.params import SamplingParams
from forward import Generator
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from hybrid_cache.pool import HybridPool
from hybrid_cache.states.mixer import Mixer
from hybrid_cache.states.pool import StatePool
from hybrid_cache.states.qwen3_5 import GatedDeltaNet, Qwen35
from paged_cache import BlockPool, LayerBlocks
from paged_cache.attention import PagedBatch
from phases import phase_named
from phases.registry import load_engine
from tests.compiling import spilled
from tests.paged_batches import DEVICE
from tests.phases.test_17_delta import outputs
from triton_paged_attention.attention import TritonPagedAttention

PAGES, NULL = 50, 30


def delta_layer(config: DeltaConfig, rng: torch.Generator) -> GatedDeltaNet:
    """A layer of random weights for inputs of 24 numbers."""
    shape = SimpleNamespace(hidden_size=24, norm_eps=1e-6)
    layer = GatedDeltaNet(cast(ModelConfig, shape), config, 0).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(
            torch.randn(parameter.shape, generator=rng) * parameter.shape[-1] ** -0.5
        )
    return layer.to(DEVICE)


WORKS: list[tuple[int, list[tuple[int, int]], int]] = [
    (4, [(0, 1), (5, 1), (8, 1)], 4),
    (2, [(0, 7), (6, 9), (8, 1)], 4),
    (4, [(3, 130), (2, 3), (9, 1), (0, 2)], 16),
    (4, [(0, 65), (64, 3)], 8),
]
"""Widths of the convolution, works (start, count), and sizes of blocks."""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "works", "block_size"), WORKS)
def test_kernels_leave_the_states_of_torch(
    width: int, works: list[tuple[int, int]], block_size: int
) -> None:
    """Outputs, states at the end of each work (start, count), and those at its cut are torch's."""
    from phases.appendix.delta_layers.kernels import mix
    from phases.appendix.delta_layers.layers import FusedDelta

    rng = torch.Generator().manual_seed(0)
    config = DeltaConfig(3, 6, 12, 20, width, (True, False))
    starts, counts = (np.array(column) for column in zip(*works, strict=True))
    contexts, total = starts + counts, int(counts.sum())
    places = -(-int(contexts.max()) // block_size)
    pools = []
    for _ in range(2):
        pool = StatePool(
            config, 40, 64, block_size, device=torch.device(DEVICE), dtype=torch.float32
        )
        rng.manual_seed(1)
        for part in (pool.recurrent, pool.conv):
            part[:, :-1] = torch.randn(part[:, :-1].shape, generator=rng).to(DEVICE)
        pool.page_slots[: len(works) * places] = torch.randperm(40, generator=rng)[
            : len(works) * places
        ].int()
        lasts = (contexts - 1) // block_size
        cuts = np.where(lasts * block_size > starts, contexts - lasts * block_size, 0)
        if block_size == 16:
            cuts[0] = -5  # guesses
        pool.page_tokens_after[torch.from_numpy(np.arange(len(works)) * places + lasts)] = (
            torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
        )
        pools.append(pool)
    ends = np.cumsum(counts)
    batch = cast(PagedBatch, SimpleNamespace(
        host=SimpleNamespace(query_lens=counts, query_starts=np.r_[0, ends], context_lens=contexts),
        query_starts=torch.tensor(np.r_[0, ends], dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        block_tables=torch.arange(len(works) * places, dtype=torch.int32, device=DEVICE).view(-1, places),
    ))  # fmt: skip
    layer = delta_layer(config, rng)
    x = torch.randn(total, 24, generator=rng).to(DEVICE)
    by_torch, by_kernels = pools
    by_torch.begin(batch)
    wanted = layer(x, cast(Mixer, by_torch))
    by_kernels.begin(batch)
    fused = FusedDelta(layer)
    mixed = mix(by_kernels, fused.weights, fused.in_proj(x), bool((counts == 1).all()))
    found = fused.out_proj(mixed)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_kernels.recurrent, by_torch.recurrent, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_kernels.conv, by_torch.conv, atol=0, rtol=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_begins_as_the_pool_says(seed: int) -> None:
    """Requests of no token, padding, guesses and snapshots: all that a table of pages may say."""
    from phases.appendix.delta_layers.kernels import begin

    rng = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    size, width = (4, 16)[seed % 2], 9
    ends = numbers(1, size * width, 7)
    counts = torch.minimum(numbers(0, 6, 7), ends)
    # padding
    ends[2] = 0
    counts[2] = 1
    counts[3] = 0
    fields: dict[str, Any] = dict.fromkeys(
        field.name for field in dataclasses.fields(PagedBatch)
    )
    fields |= {
        "block_tables": numbers(0, PAGES, 7, width).to(DEVICE),
        "slots": numbers(-1, PAGES * size, int(counts.sum())).long().to(DEVICE),
        "query_starts": torch.cat((counts.new_zeros(1), counts.cumsum(0))).int().to(DEVICE),
        "context_lens": ends.to(DEVICE),
    }
    batch = PagedBatch(**fields)
    states = StatePool.__new__(StatePool)
    states.block_size, states.null = size, NULL
    states.page_slots, states.page_tokens_after = (
        numbers(0, NULL + 1, PAGES).to(DEVICE),
        numbers(-3, 4, PAGES).to(DEVICE),
    )
    pool = HybridPool.__new__(HybridPool)
    pool.block_size = size
    pool.states = states
    pool.page_blocks = numbers(0, 40, 3, PAGES).to(DEVICE)
    wanted, step = pool.begin(batch), states.step
    found = begin(pool, batch)
    assert torch.equal(states.step, step), "states lie elsewhere"
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.block_tables, other.block_tables) and torch.equal(
            one.slots, other.slots
        )


@pytest.fixture(scope="module")
def model() -> Model:
    """Its states decay slowly."""
    made = random_model(SHAPES["tiny-delta"], device=DEVICE, dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-4.0)
    return made


@pytest.mark.slow
def test_tokens_are_those_of_phase_01(model: Model) -> None:
    """Several requests at once, then one alone."""
    from phases.appendix.delta_layers.layers import FusedHybridBlock

    rng, params = (
        random.Random(0),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    )
    prompts = [[rng.randrange(1, 257) for _ in range(length)] for length in (5, 33)]
    expected = outputs(Generator(model).stream(prompts, params))
    options: dict[str, Any] = {
        "kernels": True,
        "delta_layers": True,
        "max_rows": 2,
        "max_len": 64,
    }
    engine: Any = load_engine(
        phase_named("17"), model, block_size=16, step_tokens=60, **options
    )
    layers = engine.runner.model.layers
    assert all(isinstance(layer, FusedHybridBlock) for layer in layers)
    assert outputs(engine.stream(prompts, params)) == expected
    alone = outputs(engine.stream(prompts[1:], params))
    assert alone[0, 0] == expected[1, 0]
    assert isinstance(model, Qwen35) and not isinstance(model.layers[0], FusedHybridBlock), (
        "it is borrowed"
    )


@pytest.mark.parametrize("attention_scaling", [1.0, 1.3])
def test_pairs_stand_apart_and_turn_as_before(attention_scaling: float) -> None:
    """Scores of the reordered heads are those of the heads as they were, sharpened pairs included."""
    from phases.appendix.delta_layers.layers import fuse

    config = SHAPES["tiny-delta"]
    made = random_model(config, device=DEVICE, dtype=torch.float32)
    assert isinstance(made, Qwen35)
    for name, parameter in made.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data.normal_(0.0, 0.3)
    made.attention_scaling = attention_scaling
    spec, positions = made.layer_specs[2], torch.arange(3, 8, device=DEVICE)
    x = torch.randn(5, config.hidden_size, device=DEVICE)
    found: list[torch.Tensor] = []

    class Scores(TritonPagedAttention):
        """Keeps the scores, and returns values instead of attention."""

        def attend(
            self, layer: Any, q: Any, k: Any, v: Any, cache: LayerBlocks
        ) -> torch.Tensor:
            k, v = (
                part.flatten(0, 1)[:5].repeat_interleave(q.shape[1] // part.shape[2], 1)
                for part in cache[:2]
            )
            found.append(torch.einsum("qhd,khd->hqk", q, k))
            return q * 0 + v

    pool = BlockPool(
        dataclasses.replace(config, delta=None),
        1,
        8,
        device=torch.device(DEVICE),
        dtype=torch.float32,
    )
    attention = Scores(pool, config.num_heads)
    attention.batch = cast(Any, SimpleNamespace(slots=torch.arange(5, device=DEVICE)))
    outs = []
    for _ in range(2):
        cos_sin = tuple(part * made.attention_scaling for part in made.rope(positions))
        outs.append(made.layers[spec.index].self_attn(x, cos_sin, attention))  # type: ignore[operator]
        fuse(made)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """A step keeps its states in registers; the products of prompts leave a few hundred bytes outside."""
    step, *others = spilled(90, "--delta")
    assert step == 0 and len(others) == 4 and max(others) < 512, (
        f"bytes outside of registers: {step}, {others}"
    )

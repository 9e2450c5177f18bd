"""Layers of Qwen3.5 in few kernels: against torch's, and the begin of a step against the pool's."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from common.sampling.params import SamplingParams
from forward import Generator
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from hybrid_cache.pool import HybridPool
from hybrid_cache.qwen3_5 import Qwen35
from hybrid_cache.state_pool import StatePool
from paged_cache.attention import PagedBatch
from phases import phase_named
from phases.registry import load_engine
from tests.compiling import spilled
from tests.paged_batches import DEVICE
from tests.phases.test_17_delta import WORKS, compare_kernels, outputs

PAGES, NULL = 50, 30


@pytest.mark.slow
@pytest.mark.parametrize(("width", "works", "block_size"), WORKS[1:])
def test_prompts_in_two_kernels(
    width: int, works: list[tuple[int, int]], block_size: int
) -> None:
    from phases.appendix.delta_layers.kernels import scan

    compare_kernels(scan, width, works, block_size)


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
    states.places, states.tails = (
        numbers(0, NULL + 1, PAGES).to(DEVICE),
        numbers(-3, 4, PAGES).to(DEVICE),
    )
    pool = HybridPool.__new__(HybridPool)
    pool.block_size = size
    pool.states = states
    pool.places = numbers(0, 40, 3, PAGES).to(DEVICE)
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

    def scores(spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found.append(
            torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(len(q[0]) // len(k[0]), 1))
        )
        return q * 0 + v.repeat_interleave(len(q[0]) // len(v[0]), 1)

    outs = []
    for _ in range(2):
        cos_sin = tuple(part * made.attention_scaling for part in made.rope(positions))
        outs.append(made.layers[spec.index].self_attn(x, cos_sin, scores))  # type: ignore[operator, union-attr]
        fuse(made)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """A step keeps its states in registers; the products of prompts leave a few hundred bytes outside."""
    step, *others = spilled(90, "--delta")
    assert step == 0 and len(others) == 5 and max(others) < 512, (
        f"bytes outside of registers: {step}, {others}"
    )

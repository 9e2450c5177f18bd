"""A step is a loop, and features put loops together: for every set of them the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

import continuous
import forward
from benchmarks.engines import engine_of
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from forward.model import Model
from parallel.watch import WatchedLoop
from tests.kernel_layers import only_attention
from tests.ranks_kit import end_worker_groups
from tests.structured_kit import tokenizer

pytest.importorskip("llguidance")

PROMPTS = [[5, 6, 7, 8] * 3, [3, 1], [7]]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=1.0, seed=2, n=2, ignore_eos=True),
]
BOUND = SamplingParams(
    max_tokens=5, temperature=1.0, seed=3, grammar=Grammar.regex("[xyz]{3,9}")
)
SIZES: dict[str, Any] = {
    "max_rows": 4, "max_len": 48, "step_tokens": 48, "block_size": 4, "cache_bytes": 1 << 20
}  # fmt: skip
GRAPHS: dict[str, Any] = {"kernels": True, "graphs": True, "graph_tokens": 0}
SWITCHES = ("overlap", "speculate", "structured")
SETS = list(product([False, True], repeat=3))
# The interpreter takes its time: `make test` tries all three around graphs.
AROUND_GRAPHS = [on if all(on) else pytest.param(on, marks=pytest.mark.long) for on in SETS]


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny-window", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    return tokens(continuous.load(model, max_rows=4, max_len=48), PROMPTS, PARAMS)


@pytest.fixture(scope="module", autouse=True)
def _end_worker_groups() -> Iterator[None]:
    yield
    end_worker_groups()


def tokens(engine: Engine, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params)]


def built(model: Model | str, **options: Any) -> Engine:
    sizes = SIZES | options
    return engine_of(
        "14, with the appendix",
        model,
        device="cpu",
        dtype="float32",
        tokenizer=tokenizer(),
        **sizes,
    )


def must_be_served(
    engine: Engine, expected: list[list[int]], structured: bool, count: int = 3
) -> None:
    prompts, params = PROMPTS[:count], PARAMS[:count]
    if structured:
        prompts, params = [*prompts, [10, 11]], [*params, BOUND]
    found = tokens(engine, prompts, params)
    assert found[: len(expected)] == expected
    for bound in found[len(expected) :]:
        text = tokenizer().decode(
            [token for token in bound if token not in engine.config.eos_token_ids]
        )
        assert set(text) <= set("xyz"), f"the grammar allows x, y and z, not {text!r}"
    assert engine.idle and engine.loop.idle
    engine.check_integrity()


@pytest.mark.parametrize("on", SETS, ids=str)
def test_every_set_of_loops_gives_the_same_tokens(
    on: tuple[bool, ...], model: Model, expected: list[list[int]]
) -> None:
    engine = built(model, **dict(zip(SWITCHES, on, strict=True)))
    must_be_served(engine, expected, structured=on[2])


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("on", AROUND_GRAPHS, ids=str)
@only_attention()
def test_every_set_of_loops_around_graphs(
    on: tuple[bool, ...], model: Model, expected: list[list[int]]
) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    rows = {"max_rows": 2, "draft_length": 2} if on[1] else {"max_rows": 2}
    engine = built(model, **dict(zip(SWITCHES, on, strict=True)), **GRAPHS, **rows)
    must_be_served(engine, expected[:2], structured=on[2], count=2)


@pytest.mark.slow
@pytest.mark.parametrize("on", SETS, ids=str)
def test_every_set_of_loops_in_two_ranks(
    on: tuple[bool, ...], expected: list[list[int]]
) -> None:
    options = dict(zip(SWITCHES, on, strict=True))
    engine = built("random:tiny-window", **options, tensor_parallel=2)
    assert isinstance(engine.loop, WatchedLoop)
    try:
        must_be_served(engine, expected, structured=on[2])
    finally:
        engine.loop.close()

"""Real weights: what the engines of phases 04 to 09 generate is what the plain forward pass would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import chunked_prefill
import continuous
import cuda_graphs
import paged_cache
import prefix_cache
from common.events import generate
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from forward import Model, load_model
from forward.attention import RecomputeAttention
from tests.equivalence.compare import TIE
from tests.prompts import CHAT, PLAIN

pytestmark = [pytest.mark.weights, pytest.mark.slow]
MEMORY = 96 << 20

ENGINES: dict[str, Callable[[Model], Engine]] = {
    "04": lambda model: continuous.load(model, max_rows=4, max_len=512),
    "05": lambda model: paged_cache.load(model, cache_bytes=MEMORY),
    "07": lambda model: chunked_prefill.load(model, cache_bytes=MEMORY, step_tokens=50),
    "08": lambda model: prefix_cache.load(model, cache_bytes=MEMORY, step_tokens=100),
    "09": lambda model: cuda_graphs.load(model, cache_bytes=MEMORY, step_tokens=100),
}


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def real(request: pytest.FixtureRequest) -> Iterator[tuple[Model, list[list[int]]]]:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    tokenizer = Tokenizer(folder)
    texts = [*PLAIN[:4], PLAIN[-1], PLAIN[-1] + "delta", *CHAT[:1]]
    yield load_model(folder, device="cpu", dtype="float32"), [tokenizer.encode(text) for text in texts]


@torch.inference_mode()
def assert_greedy(model: Model, prompt: list[int], output: list[int]) -> None:
    """After every prefix of the output, the model's best token is the one that was chosen."""
    ids = torch.tensor(prompt + output)
    logits = model.logits(model(ids, torch.arange(len(ids)), RecomputeAttention())[len(prompt) - 1 : -1])
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert (logits.max(dim=1).values - chosen).max() < TIE


@pytest.mark.parametrize(
    "engine", [name if name == "09" else pytest.param(name, marks=pytest.mark.long) for name in ENGINES]
)
def test_real_weights(real: tuple[Model, list[list[int]]], engine: str) -> None:
    model, prompts = real
    made = ENGINES[engine](model)
    for _ in range(2 if engine == "08" else 1):
        for done in generate(made, prompts, SamplingParams(max_tokens=24)):
            assert done.finish_reason in ("stop", "length")
            assert_greedy(model, done.prompt_ids, done.token_ids)
    if engine == "08":
        assert made.scheduler.cache.stats.hit_rate > 0.4  # type: ignore[attr-defined]

"""On a GPU, at the shape of a real model: kernels and graphs beside torch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cuda_graphs
import forward
import kv_cache
import prefix_cache
import triton_paged_attention
from benchmarks.engines import engine_of
from common.events import generate
from common.sampling.params import SamplingParams
from tests.equivalence.compare import assert_all_same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
MODEL, DEVICE = "random:qwen3-0.6b", "cuda"
BLOCK = 64
OPTIONS: dict[str, Any] = {"max_rows": 8, "max_len": 2048, "cache_bytes": 2 << 30}


def prompts_of(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def test_the_tokens_of_torch_in_float32() -> None:
    model = forward.load_model(MODEL, device=DEVICE, dtype="float32")
    prompts = prompts_of((1, 5, 17, 64, 100, 700, 1500, 33, 65), model.config.vocab_size)
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True)
        for n in (24, 1, 24, 8, 24, 24, 24, 3, 24)
    ]
    expected = generate(kv_cache.load(model), prompts, params)
    for engine in (
        triton_paged_attention.load(model, **OPTIONS),
        cuda_graphs.load(model, graphs=False, step_tokens=512, **OPTIONS),
        cuda_graphs.load(model, step_tokens=512, **OPTIONS),
        engine_of("09, with the appendix", model, step_tokens=512, **OPTIONS),
    ):
        assert_all_same(model, expected, generate(engine, prompts, params))


def test_logits_in_bfloat16_are_as_near_the_truth_as_those_of_torch() -> None:
    """Prompts end one token behind a block, so whoever finds them in the prefix cache computes one token."""
    model = forward.load_model(MODEL, device=DEVICE, dtype="bfloat16")
    prompts = prompts_of(
        [BLOCK * n + 1 for n in (1, 2, 1, 5, 3, 16, 1, 4)], model.config.vocab_size
    )
    truth = last_logits(forward.load(copy.deepcopy(model).float()), prompts)

    def errors(engine: Any) -> dict[str, float]:
        """Relative errors where prompts are computed, then each one's last token, together and alone."""
        together = [last_logits(engine, prompts) for _ in range(2)]
        alone = torch.cat([last_logits(engine, [prompt]) for prompt in prompts])
        found = dict(zip(("prefill", "decode", "alone"), (*together, alone), strict=True))
        return {name: float((x - truth).norm() / truth.norm()) for name, x in found.items()}

    options = OPTIONS | {
        "step_tokens": 4096
    }  # all in one step: logits then come in the order of the prompts
    naive = float((last_logits(forward.load(model), prompts) - truth).norm() / truth.norm())
    spread = [naive, *errors(prefix_cache.load(model, block_size=BLOCK, **options)).values()]
    engines = {
        "eager": cuda_graphs.load(model, graphs=False, **options),
        "graphs": cuda_graphs.load(model, **options),
        "appendix": engine_of("09, with the appendix", model, **options),
        "small steps": cuda_graphs.load(model, **{**options, "step_tokens": BLOCK}),
    }
    for name, engine in engines.items():
        for step, error in errors(engine).items():
            assert error < 1.1 * max(spread), (
                f"{name}, {step}: {error:.2e}, and torch's own {spread}"
            )


def last_logits(engine: Any, prompts: Sequence[Sequence[int]]) -> Tensor:
    """What an engine thinks of the token after each prompt, `[len(prompts), vocab_size]`."""
    model = getattr(engine, "runner", engine).model
    seen: list[Tensor] = []

    def kept(hidden: Tensor) -> Tensor:
        seen.append(type(model).logits(model, hidden))
        return seen[-1]

    model.logits = kept
    try:
        # Whoever asks for log-probabilities is sampled outside graphs, where the logits can be seen.
        generate(engine, prompts, SamplingParams(max_tokens=1, logprobs=1, ignore_eos=True))
    finally:
        del model.logits
    found = torch.cat(
        [
            logits.float().flatten(0, -2) if logits.dim() > 1 else logits[None]
            for logits in seen
        ]
    )
    assert len(found) == len(prompts)
    return found


@pytest.mark.alone
def test_the_ledger_adds_up() -> None:
    """What is allocated once an engine stands is what its ledger says of weights, rows and cache."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = cuda_graphs.load(
        "random:qwen3-0.6b", device="cuda", max_len=4096, graph_rows=16, graph_tokens=0
    )
    memory_plan, allocated = engine.memory_plan, torch.cuda.memory_allocated() - before
    said = memory_plan.weights + memory_plan.rows + memory_plan.cache
    assert abs(said - allocated) < 0.01 * allocated, (
        f"the ledger says {said}, {allocated} are allocated"
    )

"""Engines in ranks and what their tokens are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from forward.loading import random_model
from parallel import worker_group
from phases import phase_named
from phases.registry import load_engine

PLACE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
SIZES: dict[str, Any] = {"max_rows": 4, "max_len": 64, "step_tokens": 40, "block_size": 4}
SMALL: dict[str, Any] = {**PLACE, **SIZES, "cache_bytes": 1 << 20}
KERNELS: dict[str, Any] = {"kernels": True, "max_len": 32}
TIGHT: dict[str, Any] = {**SMALL, "cache_bytes": 40 << 10}

BEGIN = [5, 6, 7, 8, 9, 10, 11, 12]
PROMPTS = [
    [*BEGIN, 13],
    [*BEGIN, 40, 41, 42],
    [3],
    list(range(20, 52)),
    [*BEGIN, 13, 14],
    [7, 7, 7, 7, 7, 7],
]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(
        max_tokens=8, temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=5, logprobs=3
    ),
    SamplingParams(
        max_tokens=8, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={9: 2.0}
    ),
    SamplingParams(
        max_tokens=10, min_tokens=4, temperature=0.7, seed=8, stop_token_ids=(11, 12, 13)
    ),
]


def end_worker_groups() -> None:
    for workers in list(worker_group._idle.values()):
        workers.kill()
    worker_group._idle.clear()


def tokens_of(
    engine: Any, prompts: Sequence[list[int]] = PROMPTS, params: Any = None
) -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(prompts, params or PARAMS)]


def same(found: list[list[int]], wanted: list[list[int]], what: str) -> None:
    for request, (here, there) in enumerate(zip(found, wanted, strict=True)):
        for place, (token, right) in enumerate(zip(here, there, strict=False)):
            assert token == right, (
                f"{what}: request {request}: token {place} is {token}, not {right}"
            )
        assert len(here) == len(there), (
            f"{what}: request {request}: {len(here)} tokens, not {len(there)}"
        )


def in_ranks(
    model: str, size: int, options: dict[str, Any], prompts: Any = PROMPTS, params: Any = None
) -> Any:
    """Tokens in ranks."""
    given = {"tensor_parallel": size, **options}
    engine: Any = load_engine(phase_named("14"), model, **given)
    try:
        found = tokens_of(engine, prompts, params)
        engine.check_integrity()
        assert engine.cache.free == engine.cache.allocator.count, "blocks are lost in ranks"
        return found
    finally:
        engine.loop.close()


LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 259, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "eos_token_id": 0,
    "rope_theta": 1e4,
}  # fmt: skip


def write_checkpoint(folder: Path, raw: dict[str, Any] = LLAMA) -> None:
    """A checkpoint in files, of random weights."""
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    model = random_model(
        ModelConfig.from_folder(folder), device="cpu", dtype=torch.float32, seed=4
    )
    state = {
        ("" if name.startswith("lm_head") else "model.") + name: tensor.clone().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not raw["tie_word_embeddings"]
    }
    save_file(state, folder / "model.safetensors")

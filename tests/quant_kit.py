"""Tiny checkpoints of every family that can be quantized, and their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fidelity import exactly as exactly
from common.sampling.params import SamplingParams
from forward.model import Model
from quant.formats import DTYPES
from quant.weights import QuantizedWeight
from tests.oracles import logits_of

SMALL = {
    "max_rows": 4,
    "max_len": 64,
    "step_tokens": 64,
    "block_size": 4,
    "cache_bytes": 1 << 20,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42], [3]]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=4, ignore_eos=True),
]
IDS = torch.arange(1, 40)


def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    return logits_of(model, ids)


def families() -> dict[str, Any]:
    import transformers as hf

    shape = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }
    return {
        "llama": hf.LlamaConfig(**shape, tie_word_embeddings=False),
        "qwen2": hf.Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen3": hf.Qwen3Config(**shape, head_dim=16, tie_word_embeddings=False),
        "gemma3": hf.Gemma3TextConfig(
            **shape, head_dim=16, tie_word_embeddings=True, sliding_window=16
        ),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family, with outliers among its inputs."""
    import transformers as hf

    found = {}
    for name, config in families().items():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        for parameter, weight in model.named_parameters():
            if parameter.endswith("layernorm.weight"):
                weight.data[::16] += (
                    3  # a few inputs are larger than the others, as in real models
                )
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight[:, 0] *= 8  # an outlier, as real layers have them
    return weight


def checked(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight, whose tensors are what its scheme says."""
    assert weight.data.dtype == DTYPES[weight.scheme.weights]
    assert weight.scale.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert weight.scale.shape == weight.scheme.scale_shape(*weight.shape)
    assert bool(torch.isfinite(weight.scale).all()) and not bool((weight.scale < 0).any())
    if weight.zero is not None:
        assert weight.zero.dtype == torch.uint8 and weight.zero.shape == weight.scale.shape
    return weight

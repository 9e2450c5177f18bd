"""The roofline, against counts made by hand and by adding up the steps one by one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model_work import (
    Ceilings,
    decode_work,
    generation_work,
    ideal_seconds,
    layer_parameters,
    prefill_work,
    state_bytes,
)
from common.models.config import ModelConfig
from forward.shapes import SHAPES

BF16 = torch.bfloat16


def small(**changes: object) -> ModelConfig:
    raw = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        **changes,
    }
    return ModelConfig.from_hf(raw)


def test_decode_work_by_hand():
    config = small()
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, MLP
    assert layer_parameters(config) == 2 * layer
    weights = 2 * layer + 100 * 8
    work = decode_work(config, BF16, batch=3, context=10)
    assert work.weight_bytes == 2 * weights
    assert work.kv_bytes == 3 * 10 * config.kv_bytes_per_token(BF16)
    assert work.flops == 2 * 3 * weights + 3 * 10 * 2 * (4 * 2 * 4)


def test_states_are_read_and_written():
    """Qwen3.5-0.8B: 18 MiB of states, and its weights without the embedding that is the head as well."""
    config = SHAPES["qwen3.5-0.8b"]
    assert state_bytes(config) == 18 << 20
    one = decode_work(config, BF16, batch=1, context=0)
    assert one.kv_bytes == 36 << 20
    assert one.weight_bytes == pytest.approx(2 * 752_393_024, rel=1e-3)
    assert (
        decode_work(config, BF16, batch=1, context=10).kv_bytes - one.kv_bytes == 10 * 12_288
    )


@pytest.mark.parametrize("config", [small(), SHAPES["tiny-delta"]], ids=["keys", "states"])
def test_generation_is_the_sum_of_its_steps(config):
    prompts, outputs = [5, 9], [4, 2]
    prefill, decode = generation_work(config, BF16, prompts, outputs, batch=2)
    first = prefill_work(config, BF16, prompts)
    # 3 steps: both sequences in the first, then the longer one alone
    steps = [decode_work(config, BF16, 1, context) for context in (6, 10, 7, 8)]
    assert prefill == first
    assert decode.flops == pytest.approx(sum(step.flops for step in steps))
    assert decode.kv_bytes == pytest.approx(sum(step.kv_bytes for step in steps))
    assert decode.weight_bytes == 3 * decode_work(config, BF16, 1, 0).weight_bytes
    alone = generation_work(config, BF16, prompts, outputs, batch=1)
    assert alone[1].weight_bytes == 4 * decode_work(config, BF16, 1, 0).weight_bytes
    assert alone[0].weight_bytes == 2 * first.weight_bytes


def test_published_rooflines():
    """Qwen3 on an H200 with 4.3 TB/s and 800 TFLOP/s: the rates that the peers' numbers stand beside."""
    from benchmarks.workloads import workload

    top = Ceilings(4.3e12, 8e14)
    for shape, name, batch, rate in (
        ("qwen3-0.6b", "offline-256", 256, 36_433),
        ("qwen3-8b", "offline-256", 256, 13_053),
        ("qwen3-8b", "single-512", 1, 284),
    ):
        work = workload(name)
        ideal = generation_work(SHAPES[shape], BF16, work.prompt_lens, work.output_lens, batch)
        assert work.output_tokens / ideal_seconds(ideal, top) == pytest.approx(rate, rel=0.01)

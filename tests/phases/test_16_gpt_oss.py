"""Phase 16: gpt-oss against `transformers`, from both formats of its weights, and behind every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import continuous
import cuda_graphs
import experts
import forward
import kv_cache
import paged_cache
import speculative
from common.errors import UserError
from common.events import generate
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from experts.mxfp4 import E2M1, unpack
from forward.attention import LayerSpec, attend, causal_mask
from forward.loading import load_model, skeleton
from forward.model import Model
from paged_cache.reference import gather
from tests import ranks_kit
from tests.equivalence.compare import assert_all_same
from tests.oracles import assert_same_logits
from tests.paged_batches import DEVICE, TOLERANCE, assert_near, make
from tests.schedules import check

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
AWKWARD: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": YARN,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one expert a token": {"num_experts_per_tok": 1, "num_local_experts": 7},
    "all experts": {"num_experts_per_tok": 5},
    "truncated ramp": {"rope_parameters": {**YARN, "truncate": True}},
    "attention without biases": {"attention_bias": False},
    "sinks that take all": {"sinks": 30.0},
    "sinks that take nothing": {"sinks": -30.0},
}


def oracle(folder: Path, sinks: float = 0.0, **change: Any) -> transformers.GptOssForCausalLM:
    """A model of random weights in `transformers`, saved to a folder; no bias and no sink is 0."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{**AWKWARD, **change}, attn_implementation="eager", experts_implementation="eager"
    )
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # an expert's first ones wide enough for the clamps
                parameter.normal_(0.0, 4.0 if "gate_up" in name else 0.5)
            if name.endswith("sinks"):
                parameter.normal_(sinks, 1.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = oracle(tmp_path, **CASES[case])
    assert_same_logits(load_model(tmp_path, device="cpu", dtype="float32"), reference, case)


# Weights of four bits.


def test_the_sixteen_numbers() -> None:
    """One block with every number twice, the first of a byte in its lower half; scales from 2**-127 on."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    blocks = (codes[::2] | codes[1::2] << 4).view(1, 16).expand(4, 16)
    scales = torch.tensor([0, 126, 127, 250], dtype=torch.uint8)
    numbers = [*E2M1, *(-number for number in E2M1)] * 2
    found = unpack(blocks, scales, torch.float32).view(4, 32).double()
    for row, exponent in zip(found, (-127, -1, 0, 123), strict=True):
        assert row.tolist() == [number * 2.0**exponent for number in numbers]


def pack(folder: Path) -> None:
    """Put MXFP4 experts of random numbers in the place of a saved model's, as openai/gpt-oss-20b has them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    save_file(tensors, file)
    configure(
        folder,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )


def configure(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize("engine", ["forward", "experts"])
def test_a_checkpoint_of_four_bits_equals_transformers(engine: str, tmp_path: Path) -> None:
    reference = oracle(tmp_path)
    pack(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, parameter in reference.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            both = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            parameter.data = convert_moe_packed_tensors(*both, dtype=torch.float32)
    if engine == "forward":
        model = load_model(tmp_path, device="cpu", dtype="float32")
    else:
        model = experts.load(
            tmp_path, device="cpu", dtype="float32", **{**SMALL, "max_len": 64}
        ).runner.model
    assert_same_logits(model, reference)


def test_other_families_and_other_methods_are_refused(tmp_path: Path) -> None:
    oracle(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="'fp8'"):
        load_model(tmp_path, device="cpu")
    configure(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(
        UserError, match=r"missing: .*experts\.down\.scale"
    ):  # the file's weights are plain
        load_model(tmp_path, device="cpu")
    configure(tmp_path, hidden_size=40)
    with pytest.raises(UserError, match="40 inputs cannot be mxfp4"):
        load_model(tmp_path, device="cpu")
    other = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "vocab_size": 97,
        "num_hidden_layers": 3,
    }
    heads = {"num_attention_heads": 4, "max_position_embeddings": 64}
    method = {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **other, **heads, **method})
    )
    with pytest.raises(UserError, match="'mxfp4'"):
        load_model(tmp_path, device="cpu")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another limit": ({"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
    "another slope": ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    "no layers": ({"layer_types": None}, "no field 'layer_types'"),
    "no window": ({"sliding_window": None}, "no field 'sliding_window'"),
    "no scaling": ({"rope_parameters": {"rope_theta": 150.0}}, "no field 'rope_type'"),
    "no theta": ({"rope_parameters": {**YARN, "rope_theta": None}}, "no field 'rope_theta'"),
    "two numbers of experts": ({"experts_per_token": 2}, "means the same field"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configurations_that_are_refused(case: str) -> None:
    change, says = WRONG[case]
    raw = json.loads(transformers.GptOssConfig(**AWKWARD).to_json_string())
    config = ModelConfig.from_hf(raw)
    assert (
        config.experts is not None
        and config.experts.count == 5
        and config.sliding_windows == (5, None, 5)
    )
    with pytest.raises(UserError, match=says):
        ModelConfig.from_hf(raw | change)


def test_the_published_file() -> None:
    """What openai/gpt-oss-20b's config.json says is the shape under that name."""
    raw = {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"],
            "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    shape = forward.shapes.SHAPES["gpt-oss-20b"]
    config = ModelConfig.from_hf(raw)
    assert replace(config, quantization=None, eos_token_ids=shape.eos_token_ids) == shape
    assert sum(weight.numel() for weight in skeleton(shape).parameters()) == 20_914_757_184


# Sinks.


def test_a_sink_is_one_more_key_of_value_0() -> None:
    spec = LayerSpec(0, 4, 2, 8, 0.3)
    q = torch.randn(4, 5, 8)
    k = torch.randn(2, 9, 8)
    v = torch.randn(2, 9, 8)
    sinks = torch.randn(4)
    mask = causal_mask(torch.arange(4, 9), torch.arange(9), 6)[None]
    found = attend(replace(spec, sinks=sinks), q, k, v, mask)
    for head in range(4):
        scores = (q[head] * 0.3 @ k[head // 2].T).masked_fill(~mask[0], float("-inf"))
        weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks[head].exp())
        torch.testing.assert_close(found[head], weights @ v[head // 2])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("size", [-60.0, 0.0, 20.0])
def test_sinks_in_kernels(size: float, window: int | None) -> None:
    """Decodes in one split and in many, of one token and of several, and a prefill."""
    pytest.importorskip("triton")
    from triton_paged_attention.decode import paged_decode
    from triton_paged_attention.prefill import paged_prefill, query_tiles
    from triton_paged_attention.tables import DecodeConfig, PrefillConfig

    for contexts, queries in (
        ([1, 16, 17, 100], [1, 1, 1, 1]),
        ([3, 16, 40, 100], [3, 1, 4, 2]),
    ):
        batch = make(contexts, queries, heads=(6, 2), d=16)
        sinks = torch.randn(6, device=DEVICE) + size
        want = torch.empty_like(batch.q)
        spec = LayerSpec(0, 6, 2, 16, 0.2, window, sinks=sinks)
        for request, (context, count) in enumerate(zip(contexts, queries, strict=True)):
            rows = slice(
                int(batch.query_starts[request]), int(batch.query_starts[request + 1])
            )
            k, v = (
                gather(part, batch.tables[request], context).transpose(0, 1)
                for part in batch.cache[:2]
            )
            places = torch.arange(context, device=DEVICE)
            mask = causal_mask(places[-count:], places, window)[None]
            want[rows] = attend(spec, batch.q[rows].transpose(0, 1), k, v, mask).transpose(
                0, 1
            )
        for splits in (1, 3):
            found = paged_decode(
                spec,
                *batch.arguments,
                query_starts=batch.query_starts,
                max_queries=max(queries),
                config=DecodeConfig(block_n=16, splits=splits),
            )
            assert_near(found, want, 2 * TOLERANCE[torch.float32], f"decode in {splits}")
        config = PrefillConfig(block_m=32, block_n=16)
        tiles = torch.from_numpy(query_tiles(queries, np.array(contexts), 32 // 3)).to(DEVICE)
        out = torch.empty_like(batch.arguments[0])
        found = paged_prefill(spec, *batch.arguments[:3], tiles, config, out)
        assert_near(found, want, 2 * TOLERANCE[torch.float32], "prefill")


# Engines.

SMALL: dict[str, Any] = {"max_rows": 6, "max_len": 160, "step_tokens": 40, "block_size": 4}
ENGINES: dict[str, Any] = {
    "02": lambda model: kv_cache.load(model),
    "04": lambda model: continuous.load(model, max_rows=4, max_len=160),
    "05": lambda model: paged_cache.load(model, max_rows=4, block_size=4, max_len=160),
    "09": lambda model: cuda_graphs.load(model, **SMALL),
    "11": lambda model: speculative.load(model, draft_adaptive=False, **SMALL),
    "16": lambda model: experts.load(model, **SMALL),
    "16, one by one": lambda model: experts.load(model, experts=False, **SMALL),
    "16, preempting": lambda model: experts.load(model, **SMALL, cache_bytes=40 * 4608),
}


def small_model(device: str) -> Model:
    """Random weights whose sinks differ, as 0 hides a head that is mistaken for another."""
    model = load_model("random:tiny-gpt-oss", device=device, dtype="float32")
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_(0.0, 2.0)
    return model


@pytest.fixture(scope="module")
def tiny() -> Model:
    return small_model("cpu")


@pytest.mark.parametrize("name", ENGINES)
def test_the_tokens_are_phase_01_s(name: str, tiny: Model) -> None:
    prompts = [[5, 6, 7, 8] * 9, [5, 6, 7, 8] * 9 + [9], [3], list(range(1, 70)), [200] * 9]
    params = [SamplingParams(max_tokens=24, ignore_eos=True) for _ in prompts]
    params[1] = replace(params[1], temperature=0.8, seed=3)
    expected = generate(forward.load(tiny), prompts, params)
    engine = ENGINES[name](tiny)
    for _ in range(2):  # the second time with a warm cache
        assert_all_same(tiny, expected, generate(engine, prompts, params), params)
    if name > "04":
        check(engine)


@pytest.mark.slow
def test_kernels_give_the_tokens_of_phase_01() -> None:
    """In the interpreter, or on a GPU, where steps are graphs."""
    pytest.importorskip("triton")
    model = small_model(DEVICE)
    prompts = [[5, 6, 7, 8] * 4, [3], list(range(1, 30))]
    params = [SamplingParams(max_tokens=3, ignore_eos=True) for _ in prompts]
    expected = generate(forward.load(model), prompts, params)
    engine = experts.load(model, kernels=True, **SMALL)
    assert_all_same(model, expected, generate(engine, prompts, params), params)


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Heads and their sinks are sharded as in phase 14; of packed experts each rank keeps its own."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    oracle(tmp_path, **heads, vocab_size=259, max_position_embeddings=512)
    pack(tmp_path)
    expected = ranks_kit.tokens_of(experts.load(tmp_path, **ranks_kit.SMALL))
    engine: Any = experts.load(tmp_path, tensor_parallel=2, **ranks_kit.SMALL)
    try:
        ranks_kit.same(ranks_kit.tokens_of(engine), expected, "two ranks")
    finally:
        engine.loop.close()
        ranks_kit.end_worker_groups()

"""Phase 17: Qwen3.5's model and the gated delta rule, against transformers and against sums."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import kv_cache
from common.errors import UserError
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from forward import load_model
from forward.attention import RecomputeAttention
from forward.loading import random_model
from forward.model import Model
from forward.models import family_of
from forward.shapes import SHAPES
from hybrid_cache.delta_rule import DeltaTokens, causal_conv, one_chunk, recurrence, scan, unit

AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,  # not hidden / heads
    "max_position_embeddings": 256,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LINEAR, FULL = "linear_attention", "full_attention"
ORACLES: dict[str, dict[str, Any]] = {
    "every-fourth": {"tie_word_embeddings": True},
    "own-layers": {"layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR], "attention_bias": True},
    "one-head-each": {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 7},
    "half-turned": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
        "partial_rotary_factor": 0.5}},
    "long": {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0,
        "factor": 4.0, "original_max_position_embeddings": 128, "partial_rotary_factor": 0.25}},
}  # fmt: skip


def oracle(name: str, folder: Path) -> Any:
    """A transformers model of random weights, also written to `folder`."""
    options: dict[str, Any] = {**AWKWARD, **ORACLES[name], "attn_implementation": "eager"}
    torch.manual_seed(0)
    model: Any = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**options))
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms start at 0 and 1: make them matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def our_logits(model: Model, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[-1]).expand(ids.shape)
    with torch.inference_mode():
        return model.logits(model(ids, positions, RecomputeAttention()))


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = oracle(name, tmp_path)
    ids = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits
    model = load_model(tmp_path, device="cpu", dtype="float32")
    off = (our_logits(model, ids) - expected).abs().amax(-1)  # [B, S]
    wrong = (~(off <= 1e-4)).nonzero().tolist()  # NaN is wrong as well
    assert not wrong, f"{name}: {len(wrong)} of 140 tokens, first {wrong[0]}: off by {off.max():.1e}"


def test_half_precision_stays_close(tmp_path: Path) -> None:
    """No further from float32 than transformers is."""
    reference = oracle("every-fourth", tmp_path)
    ids = torch.randint(0, 97, (1, 70))
    half = our_logits(load_model(tmp_path, device="cpu", dtype="bfloat16"), ids)
    with torch.inference_mode():
        exact, theirs = reference(ids).logits, reference.bfloat16()(ids).logits.float()
    assert half.dtype == torch.float32
    assert (half - exact).norm() < 1.1 * (theirs - exact).norm()


def test_a_multimodal_checkpoint_is_its_text_model(tmp_path: Path) -> None:
    """Image weights and the layer of further tokens are left out."""
    reference = oracle("every-fourth", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    outer = {"model_type": "qwen3_5", "text_config": raw, "vision_config": {}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.randint(0, 97, (1, 30))
    with torch.inference_mode():
        expected = reference(ids).logits
    model = load_model(tmp_path, device="cpu", dtype="float32")
    torch.testing.assert_close(our_logits(model, ids), expected, atol=1e-4, rtol=0)


RAW = {**AWKWARD, "model_type": "qwen3_5_text"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, but only True"),
        ({"linear_num_value_heads": 4}, "not a multiple of linear_num_key_heads 3"),
        ({"layer_types": [LINEAR]}, "layer_types has 1 entries for 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "'sliding_attention' is not supported, only linear"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "at another"),
        ({"partial_rotary_factor": 1.5}, "must be a number between 0.001 and 1"),
        ({"head_dim": 12}, "head_dim is 12, but rotary embeddings turn pairs"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelConfig.from_hf({**RAW, **change})


def test_published_size() -> None:
    """Qwen3.5-0.8B without the tower that sees: 752 million parameters, of which 254 embed tokens."""
    with torch.device("meta"):
        model = family_of("qwen3_5")(SHAPES["qwen3.5-0.8b"])
    assert sum(p.numel() for p in model.parameters()) == 752_393_024


def test_phases_without_a_state_refuse_the_model_by_name() -> None:
    generator = kv_cache.load("random:tiny-delta", device="cpu", dtype="float32")
    with pytest.raises(UserError, match="phase 17"):
        list(generator.stream([[1, 2]], SamplingParams()))


def tokens(length: int, *, leading: tuple[int, ...] = (), slow: bool = True, seed: int = 0) -> DeltaTokens:
    """Random inputs of a layer of 3 heads; `slow`: the state stays for long."""
    rng = torch.Generator().manual_seed(seed)
    q, k = (unit(torch.randn(*leading, length, 3, 8, generator=rng)) for _ in range(2))
    v = torch.randn(*leading, length, 3, 5, generator=rng)
    decay = -torch.rand(*leading, length, 3, generator=rng) * (0.02 if slow else 30.0)
    beta = torch.rand(*leading, length, 3, generator=rng)
    return DeltaTokens(q, k, v, decay, beta)


def test_one_token_writes_what_the_state_gets_wrong() -> None:
    """Two heads of 1: keys and values are numbers, so the rule can be followed by hand."""
    state = torch.tensor([4.0, 4.0]).view(2, 1, 1)
    ones = torch.ones(1, 2, 1)
    beta = torch.tensor([[1.0, 0.5]])
    given = DeltaTokens(3 * ones, ones, 10 * ones, torch.full((1, 2), 0.5).log(), beta)
    out, after = recurrence(state, given)
    assert after.flatten().tolist() == [10.0, 6.0], "half of 4 is 2; 8 is missing, of which beta is written"
    assert out.flatten().tolist() == [30.0, 18.0]


@pytest.mark.parametrize("slow", [True, False], ids=["slow", "fast"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_scan_equals_recurrence(length: int, slow: bool) -> None:
    given = tokens(length, leading=(2,), slow=slow)
    state = torch.randn(2, 3, 8, 5, generator=torch.Generator().manual_seed(1))
    expected, after = recurrence(state, given)
    out, end = scan(state, given)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(end, after, atol=1e-5, rtol=0)


def test_a_scan_in_parts_is_one_scan() -> None:
    given, state = tokens(50), torch.zeros(3, 8, 5)
    expected, after = recurrence(state, given)
    parts = []
    for first, last in [(0, 7), (7, 8), (8, 50)]:
        out, state = scan(state, given.cut(first, last), chunk=16)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(state, after, atol=1e-5, rtol=0)


def test_the_same_key_twice_is_overwritten() -> None:
    """With full strength and no decay the state keeps the last value of a key, within a chunk as well."""
    k = unit(torch.tensor([[3.0, 4.0], [3.0, 4.0]])).view(2, 1, 2)
    v = torch.tensor([5.0, 7.0]).view(2, 1, 1)
    given = DeltaTokens(k, k, v, torch.zeros(2, 1), torch.ones(2, 1))
    out, _ = one_chunk(torch.zeros(1, 2, 1), given)
    assert out.flatten().tolist() == pytest.approx([5.0, 7.0], abs=1e-4)


@pytest.mark.parametrize("cuts", [[0, 9], [0, 1, 2, 9], [0, 5, 6, 9]])
def test_convolution_in_parts(cuts: list[int]) -> None:
    """Its state is the inputs of the last tokens; at the beginning of a text they are zeros."""
    x, weight = torch.randn(9, 6), torch.randn(6, 4)
    padded = torch.cat((torch.zeros(3, 6), x)).T.unsqueeze(0)
    expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=6)[0].T
    expected = torch.nn.functional.silu(expected)
    before, parts = torch.zeros(3, 6), []
    for first, last in pairwise(cuts):
        out, before = causal_conv(x[first:last], weight, before)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(before, x[-3:])


def test_random_models_are_stable() -> None:
    model = random_model(SHAPES["tiny-delta"], device="cpu", dtype=torch.float32)
    logits = our_logits(model, torch.randint(0, 257, (200,)))
    assert bool(logits.isfinite().all()) and float(logits.std()) < 20

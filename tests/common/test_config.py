"""Model configurations: the parts that no family's oracle test reads."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common.errors import UserError
from common.models.config import ModelConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "eos_token_id": 1,
}


def folder(path: Path, **files: object) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return path


def test_generation_config_names_the_ends_of_a_turn(tmp_path: Path) -> None:
    assert ModelConfig.from_folder(folder(tmp_path, config=LLAMA)).eos_token_ids == (1,)
    both = folder(tmp_path, generation_config={"eos_token_id": [1, 7]})
    assert ModelConfig.from_folder(both).eos_token_ids == (1, 7)


@pytest.mark.parametrize(("hidden", "heads", "layers"), [(2560, 8, 34), (5376, 32, 62)])
def test_googles_files_of_gemma_leave_out_the_defaults(
    hidden: int, heads: int, layers: int
) -> None:
    """As those of the sizes 4B and 27B do."""
    inner = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
    }
    inner |= {
        "num_hidden_layers": layers,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    inner |= {"sliding_window": 1024} | ({"num_attention_heads": heads} if heads != 8 else {})
    found = ModelConfig.from_hf(
        {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": inner}
    )
    expected = transformers.Gemma3TextConfig(**inner)
    assert (found.vocab_size, found.head_dim) == (expected.vocab_size, expected.head_dim)
    assert found.num_heads == expected.num_attention_heads
    assert found.num_kv_heads == expected.num_key_value_heads
    assert found.max_position_embeddings == expected.max_position_embeddings
    assert found.norm_eps == expected.rms_norm_eps


def test_kv_bytes() -> None:
    """2 (key, value) x 3 layers x 2 heads x 2 dimensions x 4 bytes."""
    assert ModelConfig.from_hf(LLAMA).kv_bytes_per_token(torch.float32) == 2 * 3 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "needs a config.json"),
        (b"{", "not valid JSON"),
        (b"[]", "holds a list"),
        (b"", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"vocab_size": NaN}', "NaN is not a JSON value"),
        (b'{"vocab_size": -Infinity}', "-Infinity is not a JSON value"),
        (b'{"vocab_size": 1' + b"0" * 5000 + b"}", "not valid JSON"),
        (b'{"vocab_size": 1, "vocab_size": 2}', "'vocab_size' is there twice"),
        (b"\xef\xbb\xbf{}", "not valid JSON: Unexpected UTF-8 BOM"),
        ("{}".encode("utf-16"), "not valid JSON: .*utf-8"),
        (b" " * 50_000_000, "has 50000000 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if name == "generation_config.json" and content is None:
        pytest.skip("a model needs none")
    folder(tmp_path, config=LLAMA)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
GEMMA_ROPE: dict[str, Any] = {"full_attention": {}, "sliding_attention": {"rope_theta": 9}}
GEMMA = {**LLAMA, "model_type": "gemma3_text"}
MISTRAL = {**LLAMA, "model_type": "mistral"}
QWEN = {**LLAMA, "model_type": "qwen2", "sliding_window": 4}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 10,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
}


MOE = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MOE |= {"shared_expert_intermediate_size": 8}
GPT_OSS = {
    **MOE,
    "model_type": "gpt_oss",
    "layer_types": ["full_attention"] * 3,
    "rope_theta": 9.0,
}
GPT_OSS |= {"sliding_window": 4, "rope_scaling": {"rope_type": "yarn", "factor": 2}}
FAMILIES = {
    **{name: {**MOE, "model_type": name} for name in ("qwen2_moe", "qwen3_moe")},
    **{name: {**LLAMA, "model_type": name} for name in ("llama", "qwen2", "qwen3")},
    "mistral": MISTRAL,
    "gemma3": GEMMA,
    "qwen3_5": {**LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 8},
    "gpt2": GPT2,
    "gpt_oss": GPT_OSS,
}
EXTRAS: dict[str, tuple[str, ...]] = {
    "qkv_bias": ("qwen2_moe",),
    "swiglu_alpha": ("gpt_oss",),
    "swiglu_limit": ("gpt_oss",),
    "scale_attn_weights": ("gpt2",),
    "decoder_sparse_step": ("qwen2_moe", "qwen3_moe"),
    "mlp_only_layers": (),
    "attn_logit_softcapping": (),
    "mscale": (),
    "compression_config": (),
    "use_bidirectional_attention": (),
    "is_causal": tuple(FAMILIES),
}
"""Fields, and the families in which false means something: any is_causal, and what such a family knows."""


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_says_nothing_is_no_reason_to_refuse_a_model(
    family: str, name: str
) -> None:
    plain = ModelConfig.from_hf(FAMILIES[family])
    for value in (None, False, 0):
        given = {**FAMILIES[family], name: value}
        if value is not None and family in EXTRAS[name]:
            with pytest.raises(UserError, match=f"{name} is {value}, but only"):
                ModelConfig.from_hf(given)
        else:
            assert ModelConfig.from_hf(given) == plain, f"{name}: {value} in a {family}"
    # Whoever wrote 5 meant something.
    with pytest.raises(UserError, match=f"{name} is 5, but only"):
        ModelConfig.from_hf({**FAMILIES[family], name: 5})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapper_of_nothing_is_refused_only_where_there_are_wrappers(family: str) -> None:
    given = {**FAMILIES[family], "text_config": None}
    if family in ("gemma3", "qwen3_5"):
        with pytest.raises(UserError, match="text_config is None, but must be an object"):
            ModelConfig.from_hf(given)
    else:
        assert ModelConfig.from_hf(given) == ModelConfig.from_hf(FAMILIES[family])


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (LLAMA, {"hidden_size": 0}, "hidden_size is 0, but must be between 1 and 1048576"),
        (LLAMA, {"hidden_size": None}, "there is no field 'hidden_size'"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True, but must be an integer"),
        (LLAMA, {"num_attention_heads": -4}, "num_attention_heads is -4"),
        (LLAMA, {"num_attention_heads": 3, "num_key_value_heads": 3}, "8, which 3 attention heads do not"),
        (LLAMA, {"vocab_size": 1 << 22}, "vocab_size is 4194304, but must be between 1 and 2097152"),
        (LLAMA, {"vocab_size": [[[[1] * 99] * 99]]}, r"vocab_size is .*\.\.\."),
        (LLAMA, {"head_dim": 5}, "head_dim is 5, but rotary embeddings turn pairs"),
        (LLAMA, {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, but must be between 1e-20 and 1"),
        (LLAMA, {"attention_bias": "false"}, "attention_bias is 'false', but must be true or false"),
        (LLAMA, {"hidden_act": ["silu"]}, "hidden_act is .*, but must be a string"),
        (LLAMA, {"eos_token_id": "1"}, "eos_token_id is '1', but must be an integer, between -1 and 9"),
        (LLAMA, {"eos_token_id": [1, 10]}, "eos_token_id is 10, but must be between -1 and 9"),
        (LLAMA, {"bos_token_id": -2}, "bos_token_id is -2"),
        (LLAMA, {"model_type": ["llama"]}, r"model_type is \['llama'\], but must be a string"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but only 1 is supported"),
        (LLAMA, {"rope_theta": 0}, "rope_theta is 0.0, but must be between 1 and"),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0, but must be between"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "no field 'factor', which the rope_type 'linear'"),
        (LLAMA, {"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "rope_theta": 1}},
            "rope_theta is 1.0, but must be above 1"),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            "rope_type is 'yarn', but type 'lin"),
        (LLAMA, {"rope_theta": 5, "rope_scaling": {"rope_theta": 6}},
            "rope_theta is 5 at one place, and 6 at"),
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_parameters and rope_scaling are both given"),
        (GEMMA, {"rope_scaling": {"type": "linear", "factor": 2}},
            "type is 'linear', but `transformers` ignores"),
        (LLAMA, {"rope_scaling": {"full_attention": {}}}, "rope_scaling has a part for full_attention"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0, but must be"),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, "full_attention, which only Gemma 3"),
        (LLAMA, {"layer_types": ["chunked_attention"] * 3},
            r"layer_types\[0\] 'chunked_attention' is not supported"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4},
            r"layer_types\[0\] 'sliding_attention' is not supported, only full_attention"),
        (QWEN, {"layer_types": ["sliding_attention"] * 3},
            r"layer_types\[0\] 'sliding_attention' is not supported, only full_attention"),
        (LLAMA, {"is_causal": False}, "is_causal is False, but only True is supported"),
        (GPT2, {"per_layer_config": {"1": {"layer_norm_epsilon": 0.5}}}, "per_layer_config is .*, but only"),
        (LLAMA, {"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors'"),
        (LLAMA, {"quantization_config": "awq"}, "quantization_config is 'awq', but must be an object"),
        (LLAMA, {"compression_config": {"quant_method": "fp8"}}, "compression_config is .*, but only None"),
        (LLAMA, {"quantization_config": {}}, "there is no field 'quant_method'"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window is True, but only False is supported"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "mscale": 1.0}}, "mscale is 1.0, but only None"),
        (GEMMA, {"sliding_window": None}, "sliding_window is null"),
        (GEMMA, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (GEMMA, {"original_max_position_embeddings": 8}, "original_max_position_embeddings is 8, but `trans"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA, {"rope_local_base_freq": 5, "rope_parameters": GEMMA_ROPE},
            "rope_theta is 5.0 at one place, and 9"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA, {"rope_parameters": {"full_attention": {}}}, "no field 'sliding_attention'"),
        (GEMMA, {"model_type": "gemma3", "text_config": None}, "text_config is None, but must be an object"),
        (GEMMA, {"text_config": {"model_type": "llama"}}, "a llama inside a gemma3_text"),
        (GPT2, {"n_head": 3}, "8, which 3 attention heads do not divide"),
        (GPT2, {"hidden_size": 6}, "n_embd is 8, but hidden_size 6 means the same field"),
        (GPT2, {"n_inner": 0}, "n_inner is 0"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
)  # fmt: skip
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    ModelConfig.from_hf(base)  # or the refusal would say nothing
    with pytest.raises(UserError, match=says) as caught:
        ModelConfig.from_hf({**base, **change})
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_a_field_of_another_family_says_nothing() -> None:
    assert ModelConfig.from_hf({**LLAMA, "attn_output_gate": False}) == ModelConfig.from_hf(
        LLAMA
    )


@pytest.mark.parametrize(
    ("base", "change", "windows"),
    [
        (QWEN, {"use_sliding_window": False}, (None, None, None)),
        # A file of Mistral's that says nothing means what version 0.1's says, as for `transformers`.
        (MISTRAL, {"num_key_value_heads": None}, (4096,) * 3),
        (MISTRAL, {"num_key_value_heads": None, "sliding_window": 7}, (7,) * 3),
        (MISTRAL, {"sliding_window": None}, (None,) * 3),
    ],
)
def test_windows(
    base: dict[str, Any], change: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_hf({**base, **change}).sliding_windows == windows


def test_a_text_model_inside_a_wrapper() -> None:
    """The ends of a turn are the wrapper's. Its other fields belong to it, as in `transformers`."""
    inner = {**GEMMA, "rms_norm_eps": None, "hidden_size": 12}
    outer = {
        "model_type": "gemma3",
        "text_config": inner,
        "rms_norm_eps": 0.5,
        "rope_theta": 7.0,
    }
    found = ModelConfig.from_hf({**outer, "eos_token_id": [5, 6]})
    assert (
        found == replace(ModelConfig.from_hf(inner), eos_token_ids=(5, 6))
        and found.family == "gemma3"
    )


def test_a_refused_field_names_its_file(tmp_path: Path) -> None:
    folder(tmp_path, config=LLAMA, generation_config={"eos_token_id": [1, "2"]})
    with pytest.raises(
        UserError, match=r"generation_config\.json: eos_token_id is '2', but must be an"
    ):
        ModelConfig.from_folder(tmp_path)
    folder(tmp_path, config={**LLAMA, "vocab_size": 0})
    with pytest.raises(UserError, match=r"/config\.json: vocab_size is 0, but"):
        ModelConfig.from_folder(tmp_path)


def test_nothing_is_said_by_null_and_no_token_by_minus_one() -> None:
    nothing = [
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "rms_norm_eps",
        "hidden_act",
        "quantization_config",
    ]
    assert ModelConfig.from_hf({**LLAMA, **dict.fromkeys(nothing)}) == ModelConfig.from_hf(
        LLAMA
    )
    config = ModelConfig.from_hf({**LLAMA, "bos_token_id": -1, "eos_token_id": [-1, 3]})
    assert (config.bos_token_id, config.eos_token_ids) == (None, (3,))
    assert ModelConfig.from_hf({**LLAMA, "eos_token_id": -1}).eos_token_ids == ()


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": None},
        {"partial_rotary_factor": None, "rope_theta": 500.0},
        {"partial_rotary_factor": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 500.0}},
    ],
    ids=str,
)
def test_the_share_of_a_head_that_rotates_in_qwen3_5(said: dict[str, Any]) -> None:
    """Its default is for a field that is absent: null is all of a head, as with `transformers`."""
    raw = {**LLAMA, "num_hidden_layers": 4, "head_dim": 16, **said}
    rope = transformers.Qwen3_5TextConfig(**copy.deepcopy(raw)).rope_parameters
    expected = rope.get("partial_rotary_factor", 1.0)
    found = ModelConfig.from_hf({**raw, "model_type": "qwen3_5_text"}).rope
    assert found is not None and found.share == expected, (
        f"{said}: {found and found.share} of a head rotates, but {expected} with transformers"
    )

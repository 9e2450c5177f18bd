"""The fields of Hugging Face's ``config.json``: spelling, type, limits and default, family by family.

The defaults are those of `transformers`. The highest values lie well above any published model's, and low
enough that no table made from them is a surprise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.models.fields import Field

_DENSE = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_5")
_SPARSE = ("qwen2_moe", "qwen3_moe", "gpt_oss")
FAMILIES = {name: name for name in _DENSE + _SPARSE} | {
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen3_5",
}
"""Hugging Face ``model_type`` -> family name."""
MODEL_TYPE = Field("model_type", str, choices=tuple(FAMILIES))

_LONGEST = 1 << 24  # tokens
_SIZES = {
    "hidden_size": Field("hidden_size", int, 1, 1 << 20),
    "vocab_size": Field("vocab_size", int, 1, 1 << 21),
    "intermediate_size": Field("intermediate_size", int, 1, 1 << 22),
    "num_layers": Field("num_hidden_layers", int, 1, 1 << 10),
    "num_heads": Field("num_attention_heads", int, 1, 1 << 12),
    "num_kv_heads": Field("num_key_value_heads", int, 1, 1 << 12, None),
    "head_dim": Field("head_dim", int, 1, 1 << 12, None),
    "max_position_embeddings": Field("max_position_embeddings", int, 1, _LONGEST),
    "norm_eps": Field("rms_norm_eps", float, 1e-20, 1.0, 1e-6),
    "activation": Field("hidden_act", str, default="silu"),
    "tie_word_embeddings": Field("tie_word_embeddings", bool, default=False),
}
_BIASED = {**_SIZES, "attention_bias": Field("attention_bias", bool, default=False)}


def _defaults(**values: Any) -> dict[str, Field]:
    """Return {name: `Field` of `config.json`} for each of `values`: a field's name and its default."""
    return {name: replace(_BIASED[name], default=value) for name, value in values.items()}


FIELDS: dict[str, dict[str, Field]] = {
    "gpt2": {
        "hidden_size": Field("n_embd hidden_size", int, 1, 1 << 20),
        "vocab_size": _SIZES["vocab_size"],
        "intermediate_size": Field("n_inner", int, 1, 1 << 22, None),
        "num_layers": Field("n_layer num_hidden_layers", int, 1, 1 << 10),
        "num_heads": Field("n_head num_attention_heads", int, 1, 1 << 12),
        "max_position_embeddings": Field(
            "n_positions max_position_embeddings", int, 1, _LONGEST
        ),
        "norm_eps": Field("layer_norm_epsilon", float, 1e-20, 1.0, 1e-5),
        "activation": Field("activation_function", str, default="gelu_new"),
        "tie_word_embeddings": Field("tie_word_embeddings", bool, default=True),
        "scale_by_layer": Field("scale_attn_by_inverse_layer_idx", bool, default=False),
    },
    "llama": {**_BIASED, "mlp_bias": Field("mlp_bias", bool, default=False)},
    "mistral": {
        **_SIZES,
        "num_kv_heads": Field("num_key_value_heads", int, 1, 1 << 12, 8, null_counts=True),
    },
    "qwen2": _SIZES,
    "qwen3": {**_BIASED, **_defaults(head_dim=128)},
    "qwen2_moe": {**_SIZES, **_defaults(num_kv_heads=16)},
    "qwen3_moe": {**_BIASED, **_defaults(num_kv_heads=4)},
    "gpt_oss": {
        **_BIASED,
        **_defaults(attention_bias=True, num_kv_heads=8, head_dim=64, norm_eps=1e-5),
    },
    "gemma3": {
        **_BIASED,
        # Google's own files of the larger sizes leave out what transformers has as its default.
        **_defaults(
            vocab_size=262_208, max_position_embeddings=131_072, tie_word_embeddings=True
        ),
        **_defaults(num_heads=8, num_kv_heads=4, head_dim=256),
        "activation": Field("hidden_activation", str, default="gelu_pytorch_tanh"),
        "final_soft_cap": Field("final_logit_softcapping", float, 1e-3, 1e6, None),
    },
    "qwen3_5": {**_BIASED, **_defaults(head_dim=256)},
}
"""Family -> field of `ModelConfig` -> the `Field` of ``config.json`` that it is read from."""

_EXPERTS = {
    "count": Field("num_experts num_local_experts", int, 1, 1 << 12),
    "top_k": Field("num_experts_per_tok", int, 1, 1 << 12),
    "intermediate_size": Field("moe_intermediate_size", int, 1, 1 << 22),
    "normalize": Field("norm_topk_prob", bool, default=False),
}
EXPERTS = {
    "qwen2_moe": {
        **_EXPERTS,
        "shared_size": Field("shared_expert_intermediate_size", int, 1, 1 << 22),
    },
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {
        "count": _EXPERTS["count"],
        "top_k": Field("num_experts_per_tok experts_per_token", int, 1, 1 << 12),
        "intermediate_size": _SIZES["intermediate_size"],
    },
}
"""Family with experts -> field of `ExpertConfig` -> the `Field` of ``config.json`` that it is read from."""
NEEDED = {"gpt_oss": ("layer_types", "sliding_window", "rope_theta", "rope_type")}
"""Fields for which `transformers` has defaults of that family's own."""
QUERY_SCALE = Field("query_pre_attn_scalar", float, 1e-3, 1e6, 256.0)
LOCAL_THETA = Field("rope_local_base_freq", float, 1.0, 1e15, None)
ROPE_PARAMETERS = Field("rope_parameters", dict, default={})
ROPE_SCALING = Field("rope_scaling", dict, default={})
ORIGINAL = Field("original_max_position_embeddings", int, 2, _LONGEST)
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
ROPE = {
    "theta": Field("rope_theta", float, 1.0, 1e15),
    "kind": Field("rope_type type", str, default="default", choices=tuple(ROPE_NEEDS)),
    "factor": Field("factor", float, 1.0, 1e6, None),
    "low_freq_factor": Field("low_freq_factor", float, 1e-3, 1e6, 1.0),
    "high_freq_factor": Field("high_freq_factor", float, 1e-3, 1e6, 4.0),
    "beta_fast": Field("beta_fast", float, 1e-3, 1e6, 32.0),
    "beta_slow": Field("beta_slow", float, 1e-3, 1e6, 1.0),
    "truncate": Field("truncate", bool, default=True),
    "attention_factor": Field("attention_factor", float, 1e-3, 1e3, None),
    "share": Field("partial_rotary_factor", float, 1e-3, 1.0, 1.0),
}
ROPE_DEFAULTS = {"qwen3_5": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}}
WINDOW = Field("sliding_window", int, 1, _LONGEST, 4096, null_counts=True)
WINDOW_PATTERN = Field("sliding_window_pattern _sliding_window_pattern", int, 1, 1 << 10, 6)
LAYER_TYPES = Field("layer_types", list, default=None)
LAYER_TYPE = Field("layer_types", str, choices=("full_attention", "sliding_attention"))
FULL_LAYER_TYPE = Field("layer_types", str, choices=("full_attention",))
WINDOWED = ("mistral", "gemma3", "gpt_oss")
"""Families whose layers may have windows. Files of Qwen carry a window that is switched off."""
FULL_INTERVAL = Field("full_attention_interval", int, 1, 1 << 10, 4)
DELTA_LAYER_TYPE = Field("layer_types", str, choices=("linear_attention", "full_attention"))
DELTA = {
    "key_heads": Field("linear_num_key_heads", int, 1, 1 << 12, 16),
    "value_heads": Field("linear_num_value_heads", int, 1, 1 << 12, 32),
    "key_dim": Field("linear_key_head_dim", int, 1, 1 << 12, 128),
    "value_dim": Field("linear_value_head_dim", int, 1, 1 << 12, 128),
    "conv_width": Field("linear_conv_kernel_dim", int, 2, 1 << 6, 4),
}

ONLY = {
    "use_bidirectional_attention": False,
    "is_causal": True,
    "per_layer_config": {},
    "transformers_weights": None,  # the name of a file to load instead of model.safetensors
    "add_cross_attention": False,
    "qkv_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_sliding_window": False,
    "scale_attn_weights": True,
    "decoder_sparse_step": 1,  # layers without experts, which no published mixture has
    "mlp_only_layers": [],
    "mscale": None,
    "mscale_all_dim": None,
    "compression_config": None,  # what quantization_config was called first
    "attn_logit_softcapping": None,  # Gemma 3 has the field, but `transformers` does not apply it
}
"""Fields that change what is computed, and the one value that is computed here."""
KNOWN_BY = {
    "qkv_bias": ("qwen2_moe",),
    "swiglu_alpha": ("gpt_oss",),
    "swiglu_limit": ("gpt_oss",),
    "scale_attn_weights": ("gpt2",),
    "decoder_sparse_step": ("qwen2_moe", "qwen3_moe"),
}
"""The families that have such a field, if not all do: in others nothing reads it."""
DELTA_ONLY = {"attn_output_gate": True, "hidden_act": "silu"}
"""As `ONLY`, for models with layers of Gated DeltaNet, whose convolution has the activation of the MLP."""
WRAPPED = ("gemma3", "qwen3_5")
"""Families of which there are multimodal models, with the language model's fields in ``text_config``."""
OUTSIDE = ("model_type", "tie_word_embeddings", "bos_token_id", "quantization_config")
"""Fields of a multimodal model's outer object that hold for the language model inside."""

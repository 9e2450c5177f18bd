"""What a checkpoint's ``config.json`` says about the model, in one vocabulary for all families.

Hugging Face spells the same fact in several ways (``n_embd`` and ``hidden_size``, ``rope_theta`` and
``rope_parameters``). This module is the only place that knows those spellings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError

FAMILIES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
"""Hugging Face ``model_type`` -> our family name."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    ``kind`` is ``default``, ``linear`` (every frequency divided by ``factor``) or ``llama3`` (only the
    low frequencies divided, with a smooth band between; Llama 3.1's ``config.json``).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    ``sliding_windows[i]`` is layer ``i``'s window in tokens, the query's own position included, or
    ``None`` for full attention. ``rope_local`` is the embedding of the sliding-window layers where a
    family gives them one of their own (Gemma 3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    attention_scale: float
    rope: RopeConfig | None = None
    rope_local: RopeConfig | None = None
    sliding_windows: tuple[int | None, ...] = ()
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    scale_by_layer: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse shapes that no attention layer can have."""
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads is {self.num_heads}, which is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise UserError(
                f"layer_types has {len(self.sliding_windows)} entries for {self.num_layers} layers"
            )

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read ``folder/config.json``.

        Raises:
            UserError: the file is missing, is not JSON, or describes a model we do not have.
        """
        path = Path(folder) / "config.json"
        if not path.exists():
            raise UserError(f"{path} does not exist: a model folder needs a config.json")
        raw = _read_json(path)
        generation = Path(folder) / "generation_config.json"
        if generation.exists():  # chat models name the tokens that end a turn only here
            ends = _read_json(generation).get("eos_token_id")
            raw = raw if ends is None else {**raw, "eos_token_id": ends}
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Translate a Hugging Face configuration (the parsed ``config.json``)."""
        model_type = raw.get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is None:
            raise UserError(f"model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}")
        if "text_config" in raw:  # a multimodal wrapper: the language model is inside
            ends = raw.get("eos_token_id")
            raw = {**raw, **raw["text_config"]} | ({} if ends is None else {"eos_token_id": ends})
        try:
            return _gpt2(raw) if family == "gpt2" else _rope_family(family, raw)
        except KeyError as error:
            raise UserError(f"config.json of this {model_type} model has no field {error}") from None

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token keeps, over all layers (windows ignored)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds a {type(raw).__name__}, but a configuration is an object")
    return raw


def _gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = raw["n_embd"], raw["n_head"]
    return ModelConfig(
        family="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=raw["n_positions"],
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=raw.get("activation_function", "gelu_new"),
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
        attention_scale=(hidden // heads) ** -0.5 if raw.get("scale_attn_weights", True) else 1.0,
        attention_bias=True,
        mlp_bias=True,
        scale_by_layer=raw.get("scale_attn_by_inverse_layer_idx", False),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _rope_family(family: str, raw: Mapping[str, Any]) -> ModelConfig:
    gemma = family == "gemma3"
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or (256 if gemma else hidden // heads)
    windows = _sliding_windows(family, raw)
    rope, rope_local = _ropes(raw, gemma)
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        activation=raw.get("hidden_activation") or raw.get("hidden_act") or "silu",
        tie_word_embeddings=raw.get("tie_word_embeddings", gemma),
        attention_scale=(raw.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        rope=rope,
        rope_local=rope_local,
        sliding_windows=windows,
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        attention_soft_cap=raw.get("attn_logit_softcapping"),
        final_soft_cap=raw.get("final_logit_softcapping"),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
    )


def _sliding_windows(family: str, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window, from ``layer_types`` or from the older fields that imply it."""
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None  # Qwen's files carry a window that is switched off
    types = raw.get("layer_types")
    if types is None and family == "gemma3":
        pattern = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if types is None and family in ("qwen2", "qwen3"):
        first = raw.get("max_window_layers", layers)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if types is None or window is None:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _ropes(raw: Mapping[str, Any], gemma: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """The global and, for Gemma 3, the local rotary embedding, from either generation of field names."""
    parameters = raw.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        return _rope(parameters["full_attention"]), _rope(parameters["sliding_attention"])
    if parameters:
        return _rope(parameters), _rope({"rope_theta": 10_000.0}) if gemma else None
    theta = raw.get("rope_theta", 1_000_000.0 if gemma else 10_000.0)
    local = _rope({"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}) if gemma else None
    return _rope({**(raw.get("rope_scaling") or {}), "rope_theta": theta}), local


def _rope(parameters: Mapping[str, Any]) -> RopeConfig:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rope_type {kind!r} is not supported, only default, linear and llama3")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("partial_rotary_factor must be 1: partially rotated heads are not supported")
    return RopeConfig(
        theta=float(parameters["rope_theta"]),
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", 8192)),
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)

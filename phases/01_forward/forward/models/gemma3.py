"""Gemma 3 (arXiv 2503.19786): Qwen3's query and key norms, and four ideas of its own.

Norms multiply by ``1 + weight``; each block also normalizes what attention and MLP return; embeddings
are scaled by ``sqrt(hidden)``; five of six layers see only a sliding window, with a RoPE of their own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.config import ModelConfig
from forward.attention import Attention, LayerSpec
from forward.layers import Embedding, GatedMLP
from forward.model import Model
from forward.models.qwen3 import Qwen3Attention
from forward.rope import Rope


class Gemma3RMSNorm(nn.Module):
    """RMSNorm that stores its weight less 1, so that it multiplies by ``1 + weight``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., size]`` normalized, in ``x``'s dtype; the sum ``1 + weight`` is in float32."""
        return F.rms_norm(
            x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps
        ).to(x.dtype)


class Gemma3Attention(Qwen3Attention):
    """Qwen3's attention (norms on query and key heads) with norms that multiply by ``1 + weight``."""

    norm_class = Gemma3RMSNorm


class Gemma3Block(nn.Module):
    """A block of Gemma 3: attention and MLP, each between two norms."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = Gemma3RMSNorm(size, eps)
        self.self_attn = Gemma3Attention(config, spec)
        self.post_attention_layernorm = Gemma3RMSNorm(size, eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.activation)
        self.post_feedforward_layernorm = Gemma3RMSNorm(size, eps)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Return ``x [..., hidden]`` plus attention's and the MLP's outputs.

        cos_sin: RoPE's cosines and sines of this layer's kind. attention: mixes the tokens.
        """
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), cos_sin, attention)
        )
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3(Model):
    """Gemma 3's text model; the vision tower of the larger checkpoints is ignored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None and config.rope_local is not None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope_global = Rope(config.rope, config.head_dim)
        self.rope_local = Rope(config.rope_local, config.head_dim)
        self.layers = nn.ModuleList(Gemma3Block(config, spec) for spec in self.layer_specs)
        self.norm = Gemma3RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the final hidden states ``[..., hidden]`` of token ids ``[...]`` and their positions."""
        x = self.embed_tokens(input_ids)  # [..., hidden]
        scale = self.config.hidden_size**0.5
        x = x * torch.tensor(scale, dtype=x.dtype)  # rounded as in training
        everywhere, nearby = self.rope_global(positions), self.rope_local(positions)
        for layer, spec in zip(self.layers, self.layer_specs, strict=True):
            x = layer(x, everywhere if spec.sliding_window is None else nearby, attention)
        return self.norm(x)

    @staticmethod
    def rename(name: str) -> str | None:
        """Return a checkpoint's name without prefixes such as ``model.``; None for vision tensors."""
        if name.startswith(
            ("vision_tower.", "multi_modal_projector.", "model.vision", "model.multi_modal")
        ):
            return None
        for prefix in ("language_model.", "model.language_model.", "model."):
            name = name.removeprefix(prefix)
        return name

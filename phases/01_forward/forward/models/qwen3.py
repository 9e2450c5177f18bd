"""Qwen3 (arXiv 2505.09388): Llama with every query and key head RMS-normalized before RoPE.

The norm bounds the attention scores, which keeps training stable and lets Qwen3 drop Qwen2's biases.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from common.models.config import ModelConfig
from forward.attention import LayerSpec
from forward.layers import RMSNorm
from forward.models.llama import Llama, LlamaAttention, LlamaBlock


class Qwen3Attention(LlamaAttention):
    """Llama's attention with a norm of query heads and one of key heads, each with a weight of size D."""

    norm_class: ClassVar[type[Any]] = RMSNorm

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        self.q_norm = self.norm_class(spec.head_dim, config.norm_eps)
        self.k_norm = self.norm_class(spec.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``q [..., H, D]`` and ``k [..., KH, D]``, normalized, and ``v [..., KH, D]`` of ``x``.

        x: ``[..., hidden]``.
        """
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3Block(LlamaBlock):
    """A Llama block around `Qwen3Attention`."""

    attention_class = Qwen3Attention


class Qwen3(Llama):
    """A Llama of `Qwen3Block`."""

    block_class = Qwen3Block

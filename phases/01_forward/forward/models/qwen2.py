"""Qwen2 and Qwen2.5 (arXiv 2412.15115): Llama with biases on the query, key and value projections."""

from __future__ import annotations

from torch import nn

from common.models.config import ModelConfig
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases on the query, key and value projections, and none on the output's."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        for name in ("q_proj", "k_proj", "v_proj"):
            linear: nn.Linear = getattr(self, name)
            setattr(self, name, nn.Linear(linear.in_features, linear.out_features, bias=True))


class Qwen2Block(LlamaBlock):
    """A Llama block around `Qwen2Attention`."""

    attention_class = Qwen2Attention


class Qwen2(Llama):
    """A Llama of `Qwen2Block`."""

    block_class = Qwen2Block

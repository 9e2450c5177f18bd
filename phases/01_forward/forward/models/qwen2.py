"""Qwen2 and Qwen2.5 (arXiv 2412.15115): Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from common.models.config import ModelConfig
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases on the query, key and value projections, and none on the output's."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(replace(config, attention_bias=True), spec)
        queries, bias = self.o_proj.in_features, config.attention_bias
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)


class Qwen2Block(LlamaBlock):
    """A Llama block around `Qwen2Attention`."""

    attention_class = Qwen2Attention


class Qwen2(Llama):
    """A Llama of `Qwen2Block`."""

    block_class = Qwen2Block

"""Qwen3-MoE (arXiv 2505.09388) and Qwen2-MoE: Qwen3 and Qwen2 with `Experts` in the place of MLPs."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from common.models.config import ModelConfig
from experts.layer import Experts
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock
from forward.models.qwen2 import Qwen2Attention
from forward.models.qwen3 import Qwen3Attention


class Qwen3MoeBlock(LlamaBlock):
    """A Llama block with `Qwen3Attention`, and with a mixture of experts as its MLP."""

    attention_class: ClassVar[type[LlamaAttention]] = Qwen3Attention
    mlp: nn.Module  # type: ignore[assignment]  # `LlamaBlock` has one kind only

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        self.mlp = Experts(config)


class Qwen2MoeBlock(Qwen3MoeBlock):
    """A Llama block with `Qwen2Attention`, and with a mixture of experts as its MLP."""

    attention_class: ClassVar[type[LlamaAttention]] = Qwen2Attention


class Qwen2Moe(Llama):
    """The mixture-of-experts models of Qwen2 and Qwen1.5: a Llama of `Qwen2MoeBlock`s with shared experts."""

    block_class: ClassVar[type[LlamaBlock]] = Qwen2MoeBlock


class Qwen3Moe(Llama):
    """The mixture-of-experts models of Qwen3: a Llama of `Qwen3MoeBlock`s."""

    block_class: ClassVar[type[LlamaBlock]] = Qwen3MoeBlock

"""gpt-oss (arXiv 2508.10925): a Llama with attention sinks, and with experts that are stored in four bits.

- A *sink* is one more column of the softmax: for each query head a learned score, of a key that every query
  sees and whose value is 0. A head that finds nothing can so give its weight to nothing.
- Every other layer has a sliding window. All projections have biases, as have the router and the experts.
- An expert computes `down((up + 1) * gate * sigmoid(1.702 * gate))`; gates and ups are clamped before.
- Its matrices come as *MXFP4*: 32 numbers of four bits share a power of two (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models.config import ModelConfig
from experts.grouped_experts import GroupedExperts
from experts.layer import ExpertRouter, Experts
from experts.mxfp4 import BLOCK, MXFP4
from experts.weights import ExpertWeights, Swiglu
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock

SWIGLU = Swiglu("silu", limit=7.0)
LEAVES = {"": "data", "_blocks": "data", "_scales": "scale", "_bias": "bias"}
"""What follows `_proj` in a checkpoint's name of experts, and the parameter of `ExpertWeights`."""


class GptOssAttention(LlamaAttention):
    """Llama's attention with a learned sink for each query head: a score that only enters the softmax's sum.

    sinks: `[H]`, the learned scores. spec: sizes and scale of the layer.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads))

    @property
    def spec(self) -> LayerSpec:
        """Return the layer's `LayerSpec` (sizes, scale, sinks), made at each call, since sinks are
        loaded later.
        """
        return replace(self._plain, sinks=self.sinks)

    @spec.setter
    def spec(self, plain: LayerSpec) -> None:
        self._plain = plain


class GptOssBlock(LlamaBlock):
    """A Llama block with `GptOssAttention`, and experts with biases and clamped gates."""

    attention_class: ClassVar[type[LlamaAttention]] = GptOssAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        mlp = Experts(config)  # its `normalize` equals a softmax over the chosen alone
        hidden, inside = config.hidden_size, mlp.facts.intermediate_size
        mlp.gate = ExpertRouter(hidden, mlp.facts.count, bias=True)
        mlp.experts = GroupedExperts(
            empty_weights(config, 2 * inside, hidden),
            empty_weights(config, hidden, inside),
            SWIGLU,
        )
        self.mlp = mlp  # type: ignore[assignment]


class GptOss(Llama):
    """The gpt-oss model: a Llama of `GptOssBlock`s.

    It reads its MXFP4 checkpoints itself: features that quantize weights, or read quantized ones, see a model
    without quantization.
    """

    block_class: ClassVar[type[LlamaBlock]] = GptOssBlock

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if is_packed(config):
            self.config = replace(config, quantization=None)

    @staticmethod
    def rename(name: str) -> str | None:
        """Return the model's name for a checkpoint's tensor; never None.

        Examples: `mlp.experts.down_proj_blocks` becomes `mlp.experts.down.data`, `mlp.router` becomes
            `mlp.gate`.
        """
        name = name.removeprefix("model.").replace(".mlp.router.", ".mlp.gate.")
        owner, found, leaf = name.partition("_proj")
        if not found or ".mlp.experts." not in owner:
            return name
        return f"{owner}.{LEAVES.get(leaf, leaf)}"

    @staticmethod
    def transform(name: str, tensor: Tensor) -> Tensor:
        """Return a checkpoint's tensor in the model's layout. name: the model's name for it.

        Experts `[E, in, out]` become `[E, out, in]`; gates and ups, which the checkpoint interleaves,
        become all gates and then all ups.
        """
        if name.endswith((".gate_up.data", ".down.data")) and tensor.ndim == 3:
            tensor = tensor.mT  # MXFP4 has four dimensions, the outputs before the inputs
        if ".gate_up." in name:
            return torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)
        return tensor


def is_packed(config: ModelConfig) -> bool:
    """Return True if the checkpoint has its experts in four bits (MXFP4), else False."""
    return config.quantization is not None and config.quantization["quant_method"] == MXFP4


def empty_weights(config: ModelConfig, outputs: int, inputs: int) -> ExpertWeights:
    """Return uninitialized weights `[E, outputs, inputs]` of all experts of a layer, plain or MXFP4.

    config: names the checkpoint's format, and the number of experts E.

    Raises:
        UserError: the inputs of an MXFP4 matrix are no multiple of 32.
    """
    assert config.experts is not None
    shape = (config.experts.count, outputs, inputs)
    bias = torch.empty(shape[:2])
    if not is_packed(config):
        return ExpertWeights(torch.empty(shape), bias=bias)
    if inputs % BLOCK:
        raise UserError(
            f"a matrix of {inputs} inputs cannot be {MXFP4}: {BLOCK} of them share a scale"
        )
    scales = torch.empty(*shape[:2], inputs // BLOCK, dtype=torch.uint8)
    blocks = torch.empty(*scales.shape, BLOCK // 2, dtype=torch.uint8)
    return ExpertWeights(blocks, scales, bias)

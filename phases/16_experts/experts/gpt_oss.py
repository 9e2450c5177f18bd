"""gpt-oss (arXiv 2508.10925): Llama's skeleton, with sinks, and experts that a checkpoint keeps in four bits.

- A *sink* is one more column of the softmax: for each query head a learned score, of a key that every query
  sees and whose value is 0. A head that finds nothing can so give its weight to nothing.
- Every other layer sees a window. All projections have biases, the router and the experts have them, too.
- An expert computes `down((up + 1) * gate * sigmoid(1.702 * gate))`, gates and ups clamped before.
- Its matrices come as *MXFP4*: 32 numbers of four bits share a power of two (OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from common.models.config import ModelConfig
from experts.kernels.stack import ExpertStack, Swiglu
from experts.layer import ExpertList, ExpertRouter, Experts
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock

SWIGLU = Swiglu("silu", limit=7.0)
MXFP4 = "mxfp4"
BLOCK = 32
"""Numbers that share a power of two."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of four bits without their sign, which is the highest bit."""


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack MXFP4: each number is one of 16, times its block's power of two. Both are exact in bfloat16.

    Args:
        blocks: `[..., blocks, 16]` uint8, two numbers a byte, the first in its lower half.
        scales: `[..., blocks]` uint8, the exponents plus 127.
        dtype: of the result.

    Returns:
        `[..., 32 * blocks]`.
    """
    table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., blocks, 32]
    powers = torch.exp2(scales.float() - 127).unsqueeze(-1)
    return (table[halves.int()] * powers).to(dtype).flatten(-2)


class PackedStack(nn.Module):
    """A linear layer for each expert: `blocks` and `scales` as `unpack` takes them, and bias `[E, out]`."""

    def __init__(self, count: int, outputs: int, inputs: int) -> None:
        super().__init__()
        if inputs % BLOCK:
            raise UserError(
                f"a matrix of {inputs} inputs cannot be {MXFP4}: {BLOCK} of them share a scale"
            )
        shape = (count, outputs, inputs // BLOCK)
        self.blocks = nn.Parameter(
            torch.empty(*shape, BLOCK // 2, dtype=torch.uint8), requires_grad=False
        )
        self.scales = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(count, outputs))

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`; the expert's weight is unpacked at every call."""
        weight = unpack(self.blocks[expert], self.scales[expert], self.bias.dtype)
        return F.linear(x, weight, self.bias[expert])

    def only(self, own: range) -> ExpertStack:
        """Return some experts as kernels read them; one at a time is unpacked."""
        blocks, scales, bias = (
            t[own.start : own.stop] for t in (self.blocks, self.scales, self.bias)
        )
        each = [unpack(*one, bias.dtype) for one in zip(blocks, scales, strict=True)]
        return ExpertStack(torch.stack(each), bias=bias.clone())


class ClampedMLPs(ExpertList):
    """The experts of a layer, which lie in stacks from the start."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        facts, hidden = config.experts, config.hidden_size
        assert facts is not None
        self.count, inside = facts.count, facts.intermediate_size

        def empty(outputs: int, inputs: int) -> PackedStack | ExpertStack:
            size = (self.count, outputs, inputs)
            plain = ExpertStack(torch.empty(size), bias=torch.empty(size[:2]))
            return PackedStack(*size) if packed(config) else plain

        self.gate_up, self.down = empty(2 * inside, hidden), empty(hidden, inside)

    def __iter__(self) -> Iterator[Any]:
        """Return each expert as a function of its tokens."""
        return (partial(self.expert, number) for number in range(self.count))

    def expert(self, number: int, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        return self.down.multiply(number, SWIGLU(self.gate_up.multiply(number, x)))

    def only(self, own: range) -> ExpertList:
        """See `ExpertList.only`."""
        self.gate_up = self.gate_up.only(own)
        self.down = self.down.only(own)
        self.count = len(own)
        return self

    def stacks(self, kind: str) -> tuple[ExpertStack, ExpertStack, Swiglu]:
        """See `ExpertList.stacks`: these lie in stacks already, perhaps packed."""
        everything = range(self.count)
        return self.gate_up.only(everything), self.down.only(everything), SWIGLU


class GptOssAttention(LlamaAttention):
    """Llama's attention with a sink for each query head, which goes to the seam with the layer's facts."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        self.sinks = nn.Parameter(torch.empty(spec.num_heads))

    @property
    def spec(self) -> LayerSpec:
        """The layer's facts. Made anew, because the weights are loaded after the layer is made."""
        return replace(self._plain, sinks=self.sinks)

    @spec.setter
    def spec(self, plain: LayerSpec) -> None:
        self._plain = plain


class GptOssBlock(LlamaBlock):
    """A Llama block around these."""

    attention_class: ClassVar[type[LlamaAttention]] = GptOssAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        mlp = Experts(
            config
        )  # the softmax is over the chosen alone, which `normalize` comes to
        mlp.gate = ExpertRouter(config.hidden_size, mlp.facts.count, bias=True)
        mlp.experts = ClampedMLPs(config)
        self.mlp = mlp  # type: ignore[assignment]


class GptOss(Llama):
    """A Llama of `GptOssBlock`. It reads its own kind of quantized checkpoint, so that no feature has to."""

    block_class: ClassVar[type[LlamaBlock]] = GptOssBlock

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        if packed(config):
            self.config = replace(config, quantization=None)

    @staticmethod
    def rename(name: str) -> str | None:
        """`mlp.experts.down_proj_blocks` is `mlp.experts.down.blocks`, and `mlp.router` is `mlp.gate`."""
        name = name.removeprefix("model.").replace(".mlp.router.", ".mlp.gate.")
        owner, found, leaf = name.partition("_proj")
        if not found or ".mlp.experts." not in owner:
            return name
        return f"{owner}.{leaf.removeprefix('_') or 'data'}"

    @staticmethod
    def transform(name: str, tensor: Tensor) -> Tensor:
        """Plain matrices are stored as `[E, in, out]`; gate 0, up 0, gate 1, up 1 and so on take turns."""
        if name.endswith((".gate_up.data", ".down.data")):
            tensor = tensor.mT
        return (
            torch.cat([tensor[:, ::2], tensor[:, 1::2]], dim=1)
            if ".gate_up." in name
            else tensor
        )


def packed(config: ModelConfig) -> bool:
    """Return True if the checkpoint has its experts as MXFP4."""
    return config.quantization is not None and config.quantization["quant_method"] == MXFP4

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
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from common.models.config import ModelConfig
from experts.kernels.stack import ExpertStack, Swiglu
from experts.layer import ExpertRouter, Experts
from forward.attention import LayerSpec
from forward.models.llama import Llama, LlamaAttention, LlamaBlock

SWIGLU = Swiglu("silu", limit=7.0, interleaved=True)
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


class Matrices(nn.Module):
    """A linear layer for each expert.

    bias: `[E, out]`. weight: `[E, out, in]`; or, packed, `blocks` and `scales` as `unpack` takes them.
    """

    blocks: Tensor
    scales: Tensor

    def __init__(self, count: int, inputs: int, outputs: int, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.bias = nn.Parameter(torch.empty(count, outputs))
        if not packed:
            self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
            return
        if inputs % BLOCK:
            raise UserError(f"a matrix of {inputs} inputs cannot be {MXFP4}: {BLOCK} of them share a scale")
        shape = (count, outputs, inputs // BLOCK)
        self.register_buffer("blocks", torch.empty(*shape, BLOCK // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(shape, dtype=torch.uint8))

    def matrix(self, expert: int) -> Tensor:
        """Return an expert's weight, `[out, in]`; a packed one is unpacked at every call."""
        if not self.packed:
            return self.weight[expert]
        return unpack(self.blocks[expert], self.scales[expert], self.bias.dtype)

    def stack(self) -> ExpertStack:
        """Return all of them as kernels read them, unpacked."""
        if not self.packed:
            return ExpertStack(self.weight, bias=self.bias)
        whole = self.bias.new_empty(*self.scales.shape[:2], BLOCK * self.scales.shape[2])
        for expert, matrix in enumerate(whole):
            matrix.copy_(self.matrix(expert))
        return ExpertStack(whole, bias=self.bias)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        return F.linear(x, self.matrix(expert), self.bias[expert])


class ClampedMLPs(nn.Module):
    """The experts of a layer. Rows of `gate_up` are gate 0, up 0, gate 1, up 1 and so on."""

    def __init__(self, config: ModelConfig, packed: bool) -> None:
        super().__init__()
        assert config.experts is not None
        self.count, inside = config.experts.count, config.experts.intermediate_size
        self.gate_up = Matrices(self.count, config.hidden_size, 2 * inside, packed)
        self.down = Matrices(self.count, inside, config.hidden_size, packed)

    def __iter__(self) -> Iterator[partial[Tensor]]:
        """Return each expert as a function of its tokens."""
        return (partial(self.expert, number) for number in range(self.count))

    def expert(self, number: int, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, hidden]`."""
        return self.down.multiply(number, SWIGLU(self.gate_up.multiply(number, x)))

    def stacks(self) -> tuple[ExpertStack, ExpertStack, Swiglu]:
        """See `Stacks`: phase 16's feature has nothing to stack."""
        return self.gate_up.stack(), self.down.stack(), SWIGLU


class BiasedRouter(ExpertRouter):
    """A router with a bias."""

    def __init__(self, hidden_size: int, count: int) -> None:
        super().__init__(hidden_size, count)
        self.bias = nn.Parameter(torch.empty(count))

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden]` -> `[T, E]` float32."""
        return F.linear(x, self.weight, self.bias).float()


class GptOssExperts(Experts):
    """`Experts` of other MLPs. The softmax is over the chosen alone, which `normalize` comes to."""

    def __init__(self, config: ModelConfig, packed: bool) -> None:
        super().__init__(config)
        self.gate = BiasedRouter(config.hidden_size, self.facts.count)
        self.experts = ClampedMLPs(config, packed)  # type: ignore[assignment]  # iterated over, all the same


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
        self.mlp = GptOssExperts(config, packed(config))  # type: ignore[assignment]


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
        return f"{owner}.{leaf.removeprefix('_') or 'weight'}"

    @staticmethod
    def transform(name: str, tensor: Tensor) -> Tensor:
        """Plain matrices are stored as `[E, in, out]`."""
        return tensor.mT if name.endswith((".gate_up.weight", ".down.weight")) else tensor


def packed(config: ModelConfig) -> bool:
    """Return True if the checkpoint has its experts as MXFP4."""
    return config.quantization is not None and config.quantization["quant_method"] == MXFP4

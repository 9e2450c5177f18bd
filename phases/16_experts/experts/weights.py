"""`ExpertWeights`: the weights of all experts for one product, in one tensor, with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from experts.mxfp4 import unpack
from forward.layers import activation
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight

READ_BY_KERNELS = {("fp8", None), ("fp8", "fp8"), ("int8", None)}
"""Formats of weights and inputs that the grouped kernels multiply."""


class Swiglu(NamedTuple):
    """The activation between an expert's two products: it gates the first one's output.

    kind: name of the gate's activation, such as "silu", a key of `triton_paged_attention.linear.KINDS`.
    limit: 0 computes `activation(gate) * up`. Otherwise gates are clamped to at most `limit`, ups to
        -limit .. limit, and the result is gpt-oss's `gate * sigmoid(1.702 gate) * (up + 1)`.
    """

    kind: str = "silu"
    limit: float = 0.0

    def __call__(self, both: Tensor) -> Tensor:
        """Return the gated output `[..., I]` of gates and then ups, in `both [..., 2 I]`; in plain torch."""
        gate, up = both.chunk(2, dim=-1)
        if not self.limit:
            return activation(self.kind)(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class ExpertWeights(nn.Module):
    """One weight matrix `[N, K]` for each of `E` experts, in one tensor.

    data: `[E, N, K]`, plain numbers or those of eight bits; or MXFP4, `[E, N, K / 32, 16]` uint8.
    scale: float32 for eight bits: `[E, N]` (one for each output) or `[E, N / 128, K / 128]`, rounded up (one
        for each block); for MXFP4 `[E, N, K / 32]` uint8; None for plain numbers.
    bias: `[E, N]` or None. MXFP4 always has a bias, whose dtype is that of the unpacked weights.
    scheme: the eight-bit format of phase 10; None for plain numbers and MXFP4.
    """

    data: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        data: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__()
        self.scheme = scheme
        for name, tensor in (("bias", bias), ("data", data), ("scale", scale)):
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)

    @property
    def rounds_input(self) -> bool:
        """Return True if the product's input is rounded to e4m3 (eight bits), with a scale for each token."""
        return self.scheme is not None and self.scheme.activations is not None

    @property
    def block_scales(self) -> bool:
        """Return True if blocks of 128 x 128 weights share a scale."""
        return self.scheme is not None and self.scheme.scales == "block"

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """Return the outputs `[T, N]` of one expert's matrix and bias for `x [T, K]`, in plain torch.

        expert: its number on this rank. The weights must be plain or MXFP4.
        """
        return F.linear(
            x, self.plain(expert), None if self.bias is None else self.bias[expert]
        )

    def plain(self, expert: int) -> Tensor:
        """Return one expert's weight `[N, K]` in the model's dtype; MXFP4 is unpacked at each call.

        expert: its number on this rank.
        """
        if self.data.dtype != torch.uint8:
            return self.data[expert]
        assert self.scale is not None and self.bias is not None
        return unpack(self.data[expert], self.scale[expert], self.bias.dtype)

    def unpacked(self) -> ExpertWeights:
        """Return the same weights in a form that kernels read: MXFP4 as plain numbers, others unchanged.

        The experts are unpacked one by one.
        """
        if self.data.dtype != torch.uint8:
            return self
        plain = torch.stack([self.plain(expert) for expert in range(len(self.data))])
        return ExpertWeights(plain, bias=self.bias)

    def only(self, own: range) -> ExpertWeights:
        """Return a copy that has only the experts with the numbers `own`, renumbered from 0.

        It does not share memory, so that of the other experts can be freed.
        """
        data, scale, bias = (
            None if t is None else t[own.start : own.stop].clone()
            for t in (self.data, self.scale, self.bias)
        )
        assert data is not None
        return ExpertWeights(data, scale, bias, self.scheme)


def stack_layers(experts: Sequence[Sequence[nn.Module]]) -> ExpertWeights:
    """Return linear layers of many experts, stacked into one tensor.

    Args:
        experts: for each expert, its layers that read the same input, such as gates and ups; their outputs
            are concatenated. Layers are plain or phase 10's of eight bits, all in one format.

    Raises:
        UserError: experts are quantized in a format that no kernel here reads, or in several.
    """
    parts = [_join(layers) for layers in experts]
    if any(part.scheme != parts[0].scheme for part in parts):
        raise UserError("experts of one layer are quantized differently")
    tensors = {
        name: torch.stack([part.get_parameter(name) for part in parts])
        for name, _ in parts[0].named_parameters()
    }
    return ExpertWeights(**tensors, scheme=parts[0].scheme)


def _join(layers: Sequence[nn.Module]) -> ExpertWeights:
    """Return the weights of one expert's layers that read the same input, their outputs concatenated.

    Returns:
        Weights `[N, K]`, without the dimension `E` of experts.

    Raises:
        UserError: a layer is in a quantized format that no kernel here reads.
    """
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    weights = [layer.weight for layer in layers if isinstance(layer, QuantLinear)]
    if not weights:
        return ExpertWeights(torch.cat([layer.weight for layer in layers]), bias=bias)  # type: ignore[misc]
    formats = {(weight.scheme.weights, weight.scheme.activations) for weight in weights}
    if len(weights) < len(layers) or not formats <= READ_BY_KERNELS:
        raise UserError("experts are read as they are, in fp8 or in int8, not in w8a8 or int4")
    weight = QuantizedWeight.cat(weights)
    return ExpertWeights(weight.data, weight.scale, bias, weight.scheme)

"""The weights of all experts for one product, one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from forward.layers import activation
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight


class Swiglu(NamedTuple):
    """The function between an expert's two products.

    kind: of the gate's activation, a key of `triton_paged_attention.linear.KINDS`.
    limit: 0, or gpt-oss's form: gates at most and ups within this, `gate * sigmoid(1.702 gate) * (up + 1)`.
    """

    kind: str = "silu"
    limit: float = 0.0

    def __call__(self, both: Tensor) -> Tensor:
        """`[..., 2 I]` -> `[..., I]`, in plain torch."""
        gate, up = both.chunk(2, dim=-1)
        if not self.limit:
            return activation(self.kind)(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class ExpertStack(nn.Module):
    """One weight `[N, K]` for each expert.

    data: `[E, N, K]`, plain numbers or those of eight bits.
    scale: float32, of eight bits: `[E, N]` (channel), or `[E, N / 128, K / 128]` (block), rounded up.
    bias: `[E, N]` or None.
    scheme: phase 10's, of eight bits.
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
            kept = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, kept)

    @property
    def rounds(self) -> bool:
        """True if the input is rounded to e4m3, token by token."""
        return self.scheme is not None and self.scheme.activations is not None

    @property
    def in_blocks(self) -> bool:
        """True if blocks of a weight share a scale."""
        return self.scheme is not None and self.scheme.scales == "block"

    def each(self, change: Callable[[Tensor], Tensor]) -> ExpertStack:
        """Return the stack of what `change` makes of each tensor."""
        scale, bias = (None if t is None else change(t) for t in (self.scale, self.bias))
        return ExpertStack(change(self.data), scale, bias, self.scheme)

    def only(self, own: range) -> ExpertStack:
        """Return some experts alone, copied, so that the others are let go of."""
        return (
            self
            if len(own) == len(self.data)
            else self.each(lambda t: t[own.start : own.stop].clone())
        )

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """`[T, K]` times one expert's plain weight: `[T, N]`."""
        return F.linear(x, self.data[expert], None if self.bias is None else self.bias[expert])


def stacked(experts: Sequence[Sequence[nn.Module]]) -> ExpertStack:
    """Stack the linear layers of experts: for each expert those of one input, their outputs end to end.

    Each may be plain or phase 10's of eight bits, all in the same way.

    Raises:
        UserError: experts are quantized in a way that no kernel here reads, or not all alike.
    """
    parts = [_joined(layers) for layers in experts]
    if any(part.scheme != parts[0].scheme for part in parts):
        raise UserError("experts of one layer are quantized differently")
    names = [name for name, _ in parts[0].named_parameters()]
    tensors = {
        name: torch.stack([part.get_parameter(name) for part in parts]) for name in names
    }
    return ExpertStack(**tensors, scheme=parts[0].scheme)


def _joined(layers: Sequence[nn.Module]) -> ExpertStack:
    """One expert's layers of one input, their outputs end to end: a stack without its first dimension."""
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    weights = [layer.weight for layer in layers if isinstance(layer, QuantLinear)]
    if not weights:
        return ExpertStack(torch.cat([layer.weight for layer in layers]), bias=bias)  # type: ignore[misc]
    kinds = {(weight.scheme.weights, weight.scheme.activations) for weight in weights}
    if len(weights) < len(layers) or not kinds <= {
        ("fp8", None),
        ("fp8", "fp8"),
        ("int8", None),
    }:
        raise UserError("experts are read as they are, in fp8 or in int8, not in w8a8 or int4")
    weight = QuantizedWeight.cat(weights)
    return ExpertStack(weight.data, weight.scale, bias, weight.scheme)

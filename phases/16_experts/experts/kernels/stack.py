"""The weights of all experts for one product, one behind the other, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    interleaved: the rows of a stack are gate 0, up 0, gate 1, up 1; otherwise all gates, then all ups.
    """

    kind: str = "silu"
    limit: float = 0.0
    interleaved: bool = False

    def __call__(self, both: Tensor) -> Tensor:
        """`[..., 2 I]` -> `[..., I]`, in plain torch."""
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, dim=-1)
        if not self.limit:
            return activation(self.kind)(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@dataclass(frozen=True)
class ExpertStack:
    """One weight `[N, K]` for each expert.

    data: `[E, N, K]`, plain numbers or those of eight bits.
    scale: float32, of eight bits: `[E, N]` (channel), or `[E, N / 128, K / 128]` (block), rounded up.
    bias: `[E, N]` or None.
    scheme: phase 10's, of eight bits.
    """

    data: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    scheme: Scheme | None = None

    @property
    def rounds(self) -> bool:
        """True if the input is rounded to e4m3, token by token."""
        return self.scheme is not None and self.scheme.activations is not None

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """`[T, K]` times one expert's plain weight: `[T, N]`."""
        return F.linear(x, self.data[expert], None if self.bias is None else self.bias[expert])


def stacked(experts: Sequence[Sequence[nn.Module]]) -> ExpertStack:
    """Stack the linear layers of experts: for each expert those of one input, their outputs end to end.

    Each may be plain or phase 10's of eight bits, all in the same way. One expert at a time is copied.

    Raises:
        UserError: experts are quantized in a way that no kernel here reads, or not all alike.
    """
    made: list[Tensor | None] = [None, None, None]
    scheme: Scheme | None = None
    for number, layers in enumerate(experts):
        data, scale, bias, own = _joined(layers)
        if number and own != scheme:
            raise UserError("experts of one layer are quantized differently")
        scheme = own
        for place, tensor in enumerate((data, scale, bias)):
            if tensor is None:
                continue
            if made[place] is None:
                made[place] = tensor.new_empty(len(experts), *tensor.shape)
            made[place][number].copy_(tensor)  # type: ignore[index]
    whole, scales, biases = made
    assert whole is not None
    return ExpertStack(whole, scales, biases, scheme)


def _joined(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None, Tensor | None, Scheme | None]:
    """One expert's layers of one input as data, scales, bias and scheme."""
    biases = [layer.bias for layer in layers if isinstance(layer.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    if all(isinstance(layer, nn.Linear) for layer in layers):
        return torch.cat([layer.weight for layer in layers]), None, bias, None  # type: ignore[misc]
    weights = [layer.weight for layer in layers if isinstance(layer, QuantLinear)]
    kinds = {(weight.scheme.weights, weight.scheme.activations) for weight in weights}
    if len(weights) < len(layers) or not kinds <= {("fp8", None), ("fp8", "fp8"), ("int8", None)}:
        raise UserError("experts are read as they are, in fp8 or in int8, not in w8a8 or int4")
    weight = QuantizedWeight.cat([weight.per_channel() for weight in weights])
    return weight.data, weight.scale, bias, weight.scheme

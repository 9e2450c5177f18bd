"""Linear layers that know their weights, so that nobody else has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_paged_attention.kernels.activation import gated
from triton_paged_attention.kernels.norms import NormWeights, rms_norm


class FusedLinear(nn.Module):
    """One linear layer, or several of one input as one matrix product with their outputs end to end.

    Whoever holds one asks it to apply itself, with what stands before and after it, and never looks at its
    weights. So another format of weights is a subclass with its own `of` and `product`, and a faster way for
    some numbers of tokens is one with its own `forward`.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias  # [out, in], [out]

    @classmethod
    def of(cls, *parts: nn.Linear) -> Self:
        """The parts' weights end to end, copied; a single part's are shared."""
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), "some parts have a bias, and some have none"
        return cls(_end_to_end([part.weight for part in parts]), _end_to_end(biases) if biases else None)

    def product(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`, the bias added."""
        return F.linear(x, self.weight, self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        norm: NormWeights | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`residual + act(product(norm(x)))`, each part if it is given: `[..., in]` -> `[..., out]`.

        norm: of the input. gate: an activation, a key of `activation.KINDS`; then the outputs are gates and
        as many ups, and `act(gates) * ups [..., out / 2]` comes back.
        """
        out = self.product(x if norm is None else rms_norm(x, *norm))
        out = out if gate is None else gated(out, gate)
        return out if residual is None else out + residual

    def write(self, x: Tensor, out: Tensor) -> None:
        """`forward(x)` into `out`, `[T, in]` -> `[T, out]`; uncopied, where it is a product and no more."""
        if type(self).product is FusedLinear.product and self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            out.copy_(self(x))


def _end_to_end(tensors: Sequence[Tensor]) -> nn.Parameter:
    if len(tensors) == 1 and isinstance(tensors[0], nn.Parameter):
        return tensors[0]
    return nn.Parameter(torch.cat(tuple(tensors)), requires_grad=False)


def join(*parts: nn.Module) -> FusedLinear:
    """Linear layers of one input as one; a layer of another format knows itself how it is joined."""
    for part in parts:
        if (joined := getattr(part, "joined", None)) is not None:
            return joined(*parts)
    kind = type(parts[0]) if isinstance(parts[0], FusedLinear) else FusedLinear
    return kind.of(*parts)  # type: ignore[arg-type]  # each kind takes its own


class SideBySide(FusedLinear):
    """The same function with the layers apart, for comparison."""

    def __init__(self, *parts: nn.Module) -> None:
        nn.Module.__init__(self)
        self.parts = nn.ModuleList(parts)

    def product(self, x: Tensor) -> Tensor:
        """See `FusedLinear.product`."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

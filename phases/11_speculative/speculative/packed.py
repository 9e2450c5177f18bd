"""Linear layers for the few rows of a step that verifies, on a CPU.

A decode step on a CPU takes as long as its weights take to read, and a few rows more should be nearly free.
But PyTorch's float32 product is MKL's, which for a handful of rows rearranges the whole weight matrix first.
oneDNN, which PyTorch has as well, takes a matrix that was rearranged once. `ladder bench 11` measures both.
It costs the memory of the weights once more, so it is done for small models only.

Phase 01 flips the product where that pays, which is as fast for four rows and slower from there on. Measured
as its table was (two cores of an AMD EPYC, Zen 4, weights of 1536 x 576, GB/s of weights read):

    rows         4     6     8    12    16    24    32
    x @ W.T      9    11    10     9     8     7     6
    W @ x.T     21    16    15     8    10     8     7
    rearranged  26    30    23    19    17    13    11
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forward.cpu_linear import FlippedLinear

FEW_ROWS = range(4, 33)
"""With how many rows the rearranged weights are faster."""
MOST_BYTES = 2 << 30
"""Of weights that are kept twice, at most."""
TYPICAL = 8
"""Rows for which they are arranged."""


class Packed:
    """Rearranged weights, which nobody can look into; copies of a model share them, as they share weights."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL)

    def __deepcopy__(self, memo: object) -> Packed:
        return self


class PackedLinear(nn.Linear):
    """`nn.Linear` with a second copy of its weights for few rows."""

    packed: Packed

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        if x.numel() // self.in_features not in FEW_ROWS:
            return super().forward(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed.tensor, self.bias, "none", [], "")
        return out


class PackedFlippedLinear(PackedLinear, FlippedLinear):
    """The same; but fewer rows than that are multiplied as phase 01 does it."""


PACKED: dict[type[nn.Module], type[PackedLinear]] = {
    nn.Linear: PackedLinear,
    FlippedLinear: PackedFlippedLinear,
}


def pack_linears(model: nn.Module) -> int:
    """Turn every linear layer of a float32 model on a CPU into a `PackedLinear`, in place; the weights stay.

    Returns how many; none where it does not pay or cannot be done.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) in PACKED]
    if not linears or not can_pack(linears) or sum(m.weight.nbytes for m in linears) > MOST_BYTES:
        return 0
    with torch.no_grad():
        for linear in linears:
            linear.__class__ = PACKED[type(linear)]
            assert isinstance(linear, PackedLinear)
            linear.packed = Packed(linear.weight)
    return len(linears)


def packed_bytes(model: nn.Module) -> int:
    """What the second copies take."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, PackedLinear))


def can_pack(linears: list[nn.Linear]) -> bool:
    """Whether these are float32 on a CPU, and this PyTorch has what it takes."""
    if not all(m.weight.device.type == "cpu" and m.weight.dtype == torch.float32 for m in linears):
        return False
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )

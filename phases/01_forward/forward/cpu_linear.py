"""A linear layer for a small batch on a CPU, computed as ``(W x^T)^T``.

PyTorch's float32 matrix product on x86 is Intel's MKL, and the order of the operands decides which of its
routines runs. Measured on two cores of an AMD EPYC (Zen 4), weights of 1536 x 576, GB/s of weights read:

    rows        1     2     4     8    16    32
    x @ W.T    10     7     9    10     8     6
    W @ x.T    32    35    28    15    10     7

The first is a matrix-vector routine on one thread, or a general one that packs the whole weight matrix to
use it for a handful of rows. The second runs at the speed of memory. One row is computed as two equal ones:
with a single column MKL falls back to the matrix-vector routine.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_FLIPPED_ROWS = 32
"""Tokens up to which the flipped product is the faster one."""


class FlippedLinear(nn.Linear):
    """`nn.Linear` that computes ``x W^T`` as ``(W x^T)^T`` for at most `MOST_FLIPPED_ROWS` (32) rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + bias``: ``[..., in]`` -> ``[..., out]``."""
        rows = x.numel() // self.in_features
        if not 0 < rows <= MOST_FLIPPED_ROWS:
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(rows, self.in_features).contiguous()
        if rows == 1:
            out = torch.mm(self.weight, flat.expand(2, -1).contiguous().t())[:, 0]  # [out]
        else:
            out = torch.mm(self.weight, flat.t()).t()  # [rows, out]
        out = out.reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


@cache
def flipping_is_faster() -> bool:
    """Return True where ``(W x^T)^T`` is faster than ``x W^T``: with MKL on an AMD processor under Linux."""
    info = Path("/proc/cpuinfo")
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return mkl and info.exists() and "AuthenticAMD" in info.read_text()


def flip_linears(model: nn.Module) -> None:
    """Turn every `nn.Linear` of ``model`` into a `FlippedLinear`, in place; the weights stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FlippedLinear

"""Sizes of a head, what tests of kernels over all of them have in common."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.paged_batches import CUDA, DEVICE
from triton_paged_attention.kernels.rope import HeadNorms

SIZES = (8, 16, 24, 40, 48, 64, 80, 96, 100, 112, 128, 160, 192, 256)
QUICK = {8, 80, 100}
"""Sizes that are tried every time: padding by half and more, and a size that 8 does not divide."""


def dtypes(d: int) -> tuple[torch.dtype, ...]:
    """In the interpreter float32. Natively each is compiled by itself, so few sizes have two."""
    if not CUDA:
        return (torch.float32,)
    return (torch.bfloat16, torch.float32) if d in QUICK else (torch.bfloat16,)


each_size = pytest.mark.parametrize(
    ("d", "dtype"),
    [
        pytest.param(
            d, dtype, marks=() if d in QUICK else pytest.mark.slow, id=f"{d}-{str(dtype)[6:]}"
        )
        for d in SIZES
        for dtype in dtypes(d)
    ],
)
HEADS, KV_HEADS = 6, 2  # a group of three, which is padded as well


def angles(tokens: int, d: int) -> tuple[Tensor, Tensor]:
    """`[T, D]` cosines and sines, the first half of the sines negated."""
    angle = torch.randn(tokens, d // 2, device=DEVICE)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)


def by_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, d: int, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `norm_rope` gives, rounded where a norm and a rotation apart round."""
    q, k, v = (
        part.unflatten(-1, (-1, d))
        for part in qkv.split([HEADS * d, KV_HEADS * d, KV_HEADS * d], -1)
    )

    def rotated(x: Tensor, weight: Tensor | None) -> Tensor:
        if norms and weight is not None:
            x = F.rms_norm(x.float(), (d,), weight.float(), norms.eps).to(x.dtype)
        x = x.float()
        return (x * cos[:, None] + x.roll(d // 2, -1) * sin[:, None]).to(qkv.dtype)

    return rotated(q, norms and norms.q_weight), rotated(k, norms and norms.k_weight), v

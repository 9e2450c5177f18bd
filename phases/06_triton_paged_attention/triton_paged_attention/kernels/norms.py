"""RMSNorm in one kernel, alone or fused with the residual addition before it.

A norm is bound by memory: 2 bytes read and 2 written per number and hardly any arithmetic. Torch's float32
norm of a bfloat16 tensor writes and reads intermediates; here a row stays in registers. The fused form also
saves one read of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from triton_paged_attention.hardware import dependent_launch


class NormWeights(NamedTuple):
    """The weights of an RMSNorm, and epsilon.

    weight: `[size]`, the factors by which the norm multiplies; for Gemma, 1 + the checkpoint's weights.
    """

    weight: Tensor
    eps: float


@triton.jit
def rms_norm_kernel(
    out, x, total, delta, weight, eps,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalize one row per program, to `out`; with ADD, add `delta` first and write the sum to `total`.

    out, x, total, delta: `[rows, SIZE]`, contiguous. weight: `[SIZE]`. eps: added to the mean of squares.
    SIZE_PAD: SIZE rounded up to a power of two.
    PDL: True if the launch is a programmatic dependent one; then the kernel waits for the one before it.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, SIZE_PAD)
    mask = i < SIZE
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + row + i, mask=mask, other=0.0)
    if ADD:
        value = (
            value.to(tl.float32)
            + tl.load(delta + row + i, mask=mask, other=0.0).to(tl.float32)
        ).to(value.dtype)
        tl.store(total + row + i, value, mask=mask)
    value = value.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps) * w
    tl.store(out + row + i, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, delta: Tensor | None, norm: NormWeights) -> tuple[Tensor, Tensor]:
    """Return `x + delta`, rounded to `x`'s dtype, and the RMSNorm of that sum.

    x: `[..., size]`. delta: of the same shape; None: nothing is added, and the first result is `x`.
    norm: the weights and epsilon.
    """
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](
        out, x, total, x if delta is None else delta.contiguous(), norm.weight, norm.eps,
        SIZE=size, SIZE_PAD=padded, ADD=delta is not None,
        num_warps=min(8, max(1, padded // 256)),
        **dependent_launch(x.device, x.numel() == size),  # one token: its neighbours start early, too
    )  # fmt: skip
    return total, out

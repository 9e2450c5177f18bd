"""Rounding of activations to eight bits, and scaling of products, in the kernels before and after.

A product of eight-bit numbers has to be multiplied by its token's scale and by its channel's. A kernel for
that alone would read and write everything once more. But the operator after a projection (a norm, an
activation, RoPE) reads its output anyway. So a product is passed on without its scales (`PendingScales`), and
the kernel that reads it multiplies. In the same way, the kernel that computes a projection's input also finds
each token's largest number and rounds (`Rounded`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.formats import DTYPES, Activations
from quant.products import (
    TYPES,
    Rounded,
    hardware_rounds,
    rounded,
    token_scale,
)
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.linear import KINDS, activate


class PendingScales(NamedTuple):
    """A product of eight-bit numbers that is still to be multiplied by its scales.

    values: `[T, N]`. rows: `[T]` float32, a scale for each token. columns: `[N]` float32, one for each
        channel.
    """

    values: Tensor
    rows: Tensor
    columns: Tensor


@triton.jit
def load_row(values, token_scales, channel_scales, token, at, i, mask):
    """Load numbers of one token from offsets `at` of `values`, as float32; 0 where `mask` is False.

    If there are scales (not None), the numbers are multiplied by `token_scales[token]` and
    `channel_scales[i]`.

    values: pointer to `[T, N]`. token_scales: `[T]`. channel_scales: `[N]`. i: columns of the numbers, in the
        shape of `at`.
    """
    x = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
    if token_scales is not None:
        x = (
            x
            * tl.load(token_scales + token)
            * tl.load(channel_scales + i, mask=mask, other=0.0)
        )
    return x


@triton.jit
def round_vector(vector, inside, WHOLE: tl.constexpr, HARDWARE: tl.constexpr):
    """Round attention's output `vector` to an eight-bit format; return it, as float32, and its scale.

    inside: True for numbers that are no padding; padding may hold any finite number.
    WHOLE: the format is integers, not e4m3. HARDWARE: the GPU has an instruction for e4m3.
    """
    scale, inverse = token_scale(tl.max(tl.where(inside, tl.abs(vector), 0.0), axis=0), WHOLE)
    return rounded(vector * inverse, WHOLE, HARDWARE), scale


@triton.jit
def norm_rows_kernel(
    out, out_scale, total, x, delta, delta_rows, delta_columns, weight, eps,
    SIZE: tl.constexpr, ROUND: tl.constexpr,
    WHOLE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Add `delta` to a token's numbers, normalize, and round to eight bits. One program per token.

    x, total, out: `[T, SIZE]`; `total` becomes `x + delta`, `out` its norm. weight: `[SIZE]`, eps: of the
        RMSNorm.
    delta: `[T, SIZE]`, multiplied by `delta_rows [T]` and `delta_columns [SIZE]` first if they are not None;
        None: nothing is added, and `total` is not written.
    ROUND: `out` is rounded, and `out_scale [T]` float32 is written; otherwise `out` has the model's dtype.
    WHOLE: the format is integers, not e4m3. HARDWARE: the GPU has an instruction for e4m3.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, triton.next_power_of_2(SIZE))
    mask = i < SIZE
    at = token * SIZE + i
    y = tl.load(x + at, mask=mask, other=0.0)
    kind = y.dtype
    if delta is not None:
        # Rounded like a projection's output, then like a sum.
        more = load_row(delta, delta_rows, delta_columns, token, at, i, mask).to(kind)
        y = (y.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(total + at, y, mask=mask)
    y = y.to(tl.float32)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)

    y = (y * tl.rsqrt(tl.sum(y * y, axis=0) / SIZE + eps) * w).to(kind).to(tl.float32)
    if ROUND:
        scale, inverse = token_scale(tl.max(tl.abs(y), axis=0), WHOLE)
        tl.store(out_scale + token, scale)
        y = rounded(y * inverse, WHOLE, HARDWARE)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_rows_kernel(
    out, out_scale, gate_up, token_scales, channel_scales,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
    HALF: tl.constexpr, WHOLE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Compute `act(gate) * up` of a token, and round it to eight bits. One program per token.

    gate_up: `[T, 2 SIZE]`, gates and then ups, multiplied by `token_scales [T]` and `channel_scales [2 SIZE]`
        first if they are not None. out: `[T, SIZE]`. out_scale: `[T]` float32.
    KIND: number of the activation (`linear.KINDS`). HALF: the model's dtype. BLOCK: numbers that are loaded
        at a time.
    WHOLE: the format is integers, not e4m3. HARDWARE: the GPU has an instruction for e4m3.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.float32)
    parts = ()  # in registers until the token's scale is known
    for start in tl.static_range(0, SIZE, BLOCK):
        here = start + i
        mask = here < SIZE
        at = token * 2 * SIZE + here
        gate = load_row(gate_up, token_scales, channel_scales, token, at, here, mask)
        up = load_row(
            gate_up, token_scales, channel_scales, token, at + SIZE, here + SIZE, mask
        )
        gate, up = gate.to(HALF).to(tl.float32), up.to(HALF).to(tl.float32)
        y = (activate(gate, KIND) * up).to(HALF)
        top = tl.maximum(top, tl.abs(y.to(tl.float32)))
        parts += (y,)  # type: ignore[assignment]
    scale, inverse = token_scale(tl.max(top, axis=0), WHOLE)
    tl.store(out_scale + token, scale)
    for part in tl.static_range((SIZE + BLOCK - 1) // BLOCK):
        here = part * BLOCK + i
        y = rounded(parts[part].to(tl.float32) * inverse, WHOLE, HARDWARE)
        tl.store(out + token * SIZE + here, y.to(out.dtype.element_ty), mask=here < SIZE)


def _warps(padded: int) -> int:
    return min(16, max(1, padded // 512))


def _room(x: Tensor, size: int, kind: Activations | None) -> tuple[Tensor, Tensor]:
    """Allocate and return an output with `size` numbers per token, and scales of tokens `[T]` float32.

    x: the input, of T tokens. kind: an eight-bit format, for an output of that format, `[T, size]`. None: the
        output has `x`'s dtype and is `[..., size]`.
    """
    tokens = x.numel() // x.shape[-1]
    dtype = x.dtype if kind is None else DTYPES[kind]
    shape = (*x.shape[:-1], size) if kind is None else (tokens, size)
    return (
        torch.empty(shape, dtype=dtype, device=x.device),
        torch.empty(tokens, dtype=torch.float32, device=x.device),
    )


def apart(
    product: Tensor | PendingScales | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (numbers, scales by row, scales by column) of a product; None for each that it does not have.

    product: a tensor, which has no scales, or one with pending scales; None: all three are None.
    """
    if isinstance(product, PendingScales):
        return product.values.contiguous(), product.rows, product.columns
    return None if product is None else product.contiguous(), None, None


def norm_rows(
    x: Tensor,  # [..., K]
    delta: Tensor | PendingScales | None,
    norm: NormWeights,
    kind: Activations | None,
) -> tuple[Tensor, Rounded | Tensor]:
    """Return `x + delta`, and its RMSNorm: a tensor, or `Rounded` to eight bits if `kind` is given.

    x: `[..., size]`. delta: of the same shape, perhaps with pending scales; None: nothing is added.
    norm: weight `[size]` and epsilon. kind: "fp8" or "int8", rounded to with a scale for each token; None: no
        rounding.
    """
    x = x.contiguous()
    size = x.shape[-1]
    out, scale = _room(x, size, kind)
    total = x if delta is None else torch.empty_like(x)
    values, rows, columns = apart(delta)

    padded = triton.next_power_of_2(size)
    if x.numel():
        norm_rows_kernel[(x.numel() // size,)](
            out, scale, total, x, values, rows, columns, *norm,

            SIZE=size, ROUND=kind is not None,
            WHOLE=kind == "int8",
            HARDWARE=hardware_rounds(x.device), num_warps=_warps(padded),
        )  # fmt: skip
    return total, out if kind is None else Rounded(out, scale)


def gated_rows(
    gate_up: PendingScales | Tensor, gate: str, kind: Activations, dtype: torch.dtype
) -> Rounded:
    """Return `act(gates) * ups`, `[T, I]`, rounded to eight bits with a scale for each token.

    gate_up: `[T, 2 I]`, gates and then ups, perhaps with pending scales.
    gate: the activation, a key of `linear.KINDS`.
    kind: the format to round to.
    dtype: the model's, to which every intermediate result is rounded.
    """
    values, rows, columns = apart(gate_up)
    assert values is not None
    size = values.shape[-1] // 2
    out, scale = _room(values, size, kind)
    block = min(4096, triton.next_power_of_2(size))
    if values.numel():
        gated_rows_kernel[(len(out),)](
            out, scale, values, rows, columns,
            SIZE=size, BLOCK=block, KIND=KINDS[gate], HALF=TYPES[dtype],
            WHOLE=kind == "int8",
            HARDWARE=hardware_rounds(values.device),
            num_warps=_warps(block),
        )  # fmt: skip
    return Rounded(out, scale)

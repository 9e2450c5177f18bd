"""Matrix times vector for a batch of one token, the matrix in four bits.

A quarter of the bytes leaves so little time that what unpacks a number must cost less than reading it. So the
nibbles lie where tensor registers want them: one word has four pairs of inputs, and a mask and an addition
turn a pair of nibbles into a pair of float16 numbers, because 0x6400 with `n` in its last bits is the number
1024 + n. Eight products are summed up in float16, then a group's scale is multiplied in float32. The input is
divided by its largest number first, or such a sum might not fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cuda_graphs.latency.tables import GemvConfig
from quant.kernels.gemv import input_scales
from quant.kernels.inputs import token_scale
from quant.weights import QuantizedWeight, unpack_nibbles
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.activation import KINDS, activate
from triton_paged_attention.kernels.norms import NormWeights

SPAN = 128
"""Inputs that 16 words hold: bits 4 i and 16 + 4 i of word j are inputs 32 i + 2 j and 32 i + 2 j + 1."""

# Eight products of nibbles minus 8 with float16 numbers, summed up. `lop3 0xea` is (a & b) | c. The high
# nibble of a byte comes as 1024 + 16 n: times 1/16, minus 72, it is n - 8 as well.
EIGHT_PRODUCTS = tl.constexpr("""{
.reg .b32 t, a, b, c, d, low, unit, high; .reg .b16 x, y; .reg .f32 f, g;
lop3.b32 a, $1, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $1, 0x00f000f0, 0x64006400, 0xea;
shr.u32 t, $1, 8;
lop3.b32 c, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, t, 0x00f000f0, 0x64006400, 0xea;
mov.b32 low, 0x64086408; mov.b32 unit, 0x2c002c00; mov.b32 high, 0xd480d480;
sub.f16x2 a, a, low; fma.rn.f16x2 b, b, unit, high;
sub.f16x2 c, c, low; fma.rn.f16x2 d, d, unit, high;
mul.f16x2 a, a, $2; fma.rn.f16x2 a, b, $3, a; fma.rn.f16x2 a, c, $4, a; fma.rn.f16x2 a, d, $5, a;
mov.b32 {x, y}, a; cvt.f32.f16 f, x; cvt.f32.f16 g, y; add.f32 $0, f, g;
}""")


@triton.jit
def pair(low, high):
    """Two numbers as float16 in one word."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def load_words(weight, row, start, q, N, K: tl.constexpr):
    """Words `[ROWS, Q, 4]` from input `start` on; a quarter of a span's words belongs to each `q`."""
    SPANS: tl.constexpr = (K + 127) // 128
    word = start // 8 + q[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = row.to(tl.int64)[:, None, None] * (SPANS * 16) + word[None, :, :]
    return tl.load(weight + at, mask=(row < N)[:, None, None] & (word < SPANS * 16)[None, :, :], other=0)


@triton.jit
def load_scales(
    scale, zero, row, start, q, part, N, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr
):
    """Scales `[ROWS, Q]`, and what 8 is too much or too little, for inputs 32 `part` to 32 `part` + 31."""
    first = start + q // 4 * 128 + part * 32
    at = row.to(tl.int64)[:, None] * (K // GROUP) + (first // GROUP)[None, :]
    inside = (row < N)[:, None] & (first < K)[None, :]
    s = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    off = s * 0.0
    if ZEROS:
        off = 8.0 - tl.load(zero + at, mask=inside, other=8).to(tl.float32)
    return s, off


@triton.jit
def sums(
    words, low, high, scale, zero, row, start, q, N,
    K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of `words [ROWS, Q, 4]` with the input, `[ROWS, Q]`: four `low` and four `high [Q, 4]`."""
    if ASM:
        total = tl.sum(
            tl.inline_asm_elementwise(
                EIGHT_PRODUCTS, "=r,r,r,r,r,r",
                [
                    words, pair(low[0], high[0])[None, :, :], pair(low[1], high[1])[None, :, :],
                    pair(low[2], high[2])[None, :, :], pair(low[3], high[3])[None, :, :],
                ],
                dtype=tl.float32, is_pure=True, pack=1,
            ),
            axis=2,
        )  # fmt: skip
        s, off = load_scales(scale, zero, row, start, q, 0, N, K, GROUP, ZEROS)
        if ZEROS:
            inputs = low[0] + high[0] + low[1] + high[1] + low[2] + high[2] + low[3] + high[3]
            total += off * tl.sum(inputs, axis=1)[None, :]
        total = total * s
    else:
        total = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
        for part in tl.static_range(4):
            first = ((words >> (4 * part)) & 15).to(tl.float32) - 8.0
            second = ((words >> (16 + 4 * part)) & 15).to(tl.float32) - 8.0
            product = tl.sum(first * low[part][None, :, :] + second * high[part][None, :, :], axis=2)
            s, off = load_scales(scale, zero, row, start, q, part, N, K, GROUP, ZEROS)
            if ZEROS:
                product += off * tl.sum(low[part] + high[part], axis=1)[None, :]
            total += product * s
    return total


@triton.jit
def gemv4_kernel(
    out, x, weight, scale, zero, norm_weight, bias, residual, eps, N,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, ZEROS: tl.constexpr,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs; see `gemv8_kernel`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    MATRICES: tl.constexpr = 2 if GATED else 1
    whole = N * MATRICES
    q = tl.arange(0, BLOCK_K // 32)
    words = load_words(weight, row, 0, q, N, K)
    up_words = load_words(weight, row + N, 0, q, whole, K) if GATED else words
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    if PDL:
        if TRIGGER == 0:
            gdc_launch_dependents()
        gdc_wait()
        if TRIGGER == 1:
            gdc_launch_dependents()
    if ADD:
        added += tl.load(residual + row, mask=row < N, other=0.0).to(tl.float32)
    first = (q // 4 * 128 + q % 4 * 8)[:, None] + 2 * tl.arange(0, 4)[None, :]
    # The whole input at once, in the order of the words: pairs of neighbours, four pairs a word.
    low, high = (), ()
    squares = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    top = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        for part in tl.static_range(8):
            at = start + first + part // 2 * 32 + part % 2
            value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                g = tl.load(norm_weight + at, mask=at < K, other=0.0).to(tl.float32)
                value = value * (g + 1.0 if ONE_PLUS else g)
            top = tl.maximum(top, tl.abs(value))
            if part % 2 == 0:
                low += (value,)  # type: ignore[assignment]
            else:
                high += (value,)  # type: ignore[assignment]
    norm, largest = input_scales(
        tl.reshape(squares, [BLOCK_K // 8]), tl.reshape(top, [BLOCK_K // 8]), eps, K, NORM, True
    )
    scale_x, inverse = token_scale(largest, 1.0)
    total = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
    total_up = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            words = load_words(weight, row, start, q, N, K)
            if GATED:
                up_words = load_words(weight, row + N, start, q, whole, K)
        even, odd = (), ()
        for part in tl.static_range(4):
            a = (low[start // BLOCK_K * 4 + part] * norm).to(x.dtype.element_ty).to(tl.float32)
            b = (high[start // BLOCK_K * 4 + part] * norm).to(x.dtype.element_ty).to(tl.float32)
            even += (a * inverse,)  # type: ignore[assignment]
            odd += (b * inverse,)  # type: ignore[assignment]
        total += sums(words, even, odd, scale, zero, row, start, q, N, K, GROUP, ZEROS, ASM)
        if GATED:
            total_up += sums(up_words, even, odd, scale, zero, row + N, start, q, whole, K, GROUP, ZEROS, ASM)
    if PDL and TRIGGER == 2:
        gdc_launch_dependents()
    result = tl.sum(total, axis=1) * scale_x
    if GATED:
        result = activate(result, KIND) * (tl.sum(total_up, axis=1) * scale_x)
    tl.store(out + row, (result + added).to(out.dtype.element_ty), mask=row < N)


def gemv4_default(rows: int, size: int, gated: bool) -> GemvConfig:
    """About 32 KiB a program, and at least 256 programs."""
    block_k = min(4096, max(SPAN, triton.next_power_of_2(size)))
    wanted = max(1, min(65_536 // (block_k * (2 if gated else 1)), rows // 256))
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, 8 if size > 2048 else 4, late=size > block_k)


def gemv4(
    x: Tensor,  # [..., K], one row
    weight: QuantizedWeight,  # [N, K], or [2 N, K] when gated; its `data` is that of `to_words`
    size: int,
    *,
    norm: NormWeights | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
    run_ahead: bool = True,
    config: GemvConfig | None = None,
) -> Tensor:
    """`cuda_graphs.latency.gemv` with a weight of four bits, of `size` inputs: `[..., N]`."""
    rows = len(weight.data) // (1 if gate is None else 2)
    shape = config or gemv4_default(rows, size, gate is not None)
    out = torch.empty(*x.shape[:-1], rows, dtype=out_dtype or x.dtype, device=x.device)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    early, group = dependent_launch(x.device), weight.scheme.group
    gemv4_kernel[(triton.cdiv(rows, shape.rows),)](
        out, x, weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero,
        norm_weight, x if bias is None else bias, x if residual is None else residual, eps, rows,
        K=size, GROUP=group, ROWS=shape.rows, BLOCK_K=shape.block_k, ZEROS=weight.zero is not None,
        NORM=norm is not None, ONE_PLUS=one_plus, BIAS=bias is not None, ADD=residual is not None,
        GATED=gate is not None, KIND=0 if gate is None else KINDS[gate],
        ASM=x.is_cuda and group % SPAN == 0, PDL=early,
        TRIGGER=2 if shape.late else (0 if run_ahead else 1),
        num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def words_fit(weight: QuantizedWeight) -> bool:
    """Whether a weight can lie in words: its groups are no smaller than a part of a span."""
    return weight.scheme.group % 32 == 0


def to_words(weight: QuantizedWeight) -> Tensor:
    """The nibbles of a weight `[N, K]` in the order of `SPAN`: `[N, 16 ceil(K / 128)]` int32."""
    numbers = unpack_nibbles(weight.data)  # [N, K]
    numbers = pad(numbers, (0, -numbers.shape[1] % SPAN), value=8)
    parts = numbers.view(len(numbers), -1, 4, 16, 2)  # spans, i, j, even and odd
    words = torch.zeros(parts.shape[0], parts.shape[1], 16, dtype=torch.int32, device=numbers.device)
    for i in range(4):
        for odd in range(2):
            words |= parts[:, :, i, :, odd].to(torch.int32) << (4 * i + 16 * odd)
    return words.flatten(1)


def from_words(words: Tensor, size: int) -> Tensor:
    """What `to_words` was given: `[N, K]` uint8 of 0 to 15, for `size` inputs."""
    shifts = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], dtype=torch.int32, device=words.device)
    parts = (words.view(len(words), -1, 1, 16, 1) >> shifts[:, None, :]) & 15  # [N, spans, 4, 16, 2]
    return parts.flatten(1).to(torch.uint8)[:, :size]

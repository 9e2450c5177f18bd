"""Matrix times vector for a batch of one token, the matrix in four bits.

A quarter of the bytes leaves so little time that what unpacks a number must cost less than reading it. So the
nibbles lie where tensor registers want them: one word has four pairs of inputs, and a mask and an addition
turn a pair of nibbles into a pair of float16 numbers, because 0x6400 with `n` in its last bits is the number
1024 + n. Sixteen products are summed up in float16, then a group's scale is multiplied in float32. The input
is divided by its largest number first, or such a sum might not fit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quant.kernels.configs import StepsConfig, steps_config
from quant.kernels.gemv import input_scales, load_addends, place_of
from quant.kernels.inputs import token_scale
from quant.weights import QuantizedWeight, unpack_nibbles
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.activation import KINDS, activate
from triton_paged_attention.kernels.norms import NormWeights

SPAN = 128
"""Inputs that 16 words hold: bits 4 i and 16 + 4 i of word j are inputs 32 i + 2 j and 32 i + 2 j + 1."""


def _products(word: int, total: str) -> str:
    """Instructions that add a word's eight products to `total`, a pair of float16.

    `lop3 0xea` is (a & b) | c. The high nibble of a byte comes as 1024 + 16 n: times 1/16, minus 72, it is
    n - 8 as well.
    """
    x = [f"${5 + 4 * word + part}" for part in range(4)]
    first = f"mul.f16x2 {total}, a, {x[0]}" if word % 2 == 0 else f"fma.rn.f16x2 {total}, a, {x[0]}, {total}"
    return f"""
lop3.b32 a, ${word + 1}, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, ${word + 1}, 0x00f000f0, 0x64006400, 0xea;
shr.u32 t, ${word + 1}, 8;
lop3.b32 c, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, t, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 a, a, low; fma.rn.f16x2 b, b, unit, high;
sub.f16x2 c, c, low; fma.rn.f16x2 d, d, unit, high;
{first}; fma.rn.f16x2 {total}, b, {x[1]}, {total};
fma.rn.f16x2 {total}, c, {x[2]}, {total}; fma.rn.f16x2 {total}, d, {x[3]}, {total};"""


FOUR_WORDS = tl.constexpr(
    "{.reg .b32 t, a, b, c, d, low, unit, high, p, q; .reg .b16 x, y; .reg .f32 f, g;"
    "mov.b32 low, 0x64086408; mov.b32 unit, 0x2c002c00; mov.b32 high, 0xd480d480;"
    + _products(0, "p") + _products(1, "p") + _products(2, "q") + _products(3, "q")
    + "add.f16x2 p, p, q; mov.b32 {x, y}, p; cvt.f32.f16 f, x; cvt.f32.f16 g, y; add.f32 $0, f, g; }"
)  # fmt: skip
"""Products of four words, nibbles minus 8, with sixteen pairs of float16 numbers, summed up."""
OPERANDS = tl.constexpr("=r" + ",r" * 20)


@triton.jit
def pair(low, high):
    """Two numbers as float16 in one word."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def four(x):
    """`x [A, B, 4]` as four tensors `[A, B]`."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_tile(
    weight, scale, zero, first_row, q, N, tile: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, MATRICES: tl.constexpr,
    ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A program's next words `[ROWS, Q, 4]`; their scales and zero points `[ROWS, Q]` if groups are spans.

    A quarter of a span's words belongs to each `q`.
    """
    SPANS: tl.constexpr = (K + 127) // 128
    row, start = place_of(first_row, N, tile, K, ROWS, BLOCK_K, MATRICES)
    real = row < N * MATRICES
    word = start // 8 + q[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = row.to(tl.int64)[:, None, None] * (SPANS * 16) + word[None, :, :]
    words = tl.load(weight + at, mask=real[:, None, None] & (word < SPANS * 16)[None, :, :], other=0)
    s = words
    z = words
    if ASM:
        s = load_group(scale, row, real, start + q * 32, 0.0, K, GROUP)
        z = load_group(zero, row, real, start + q * 32, 8, K, GROUP) if ZEROS else s
    return words, s, z


@triton.jit
def load_group(numbers, row, real, k, other, K: tl.constexpr, GROUP: tl.constexpr):
    """Scales or zero points of the groups of inputs `k [Q]`: `[ROWS, Q]`."""
    at = row.to(tl.int64)[:, None] * (K // GROUP) + (k // GROUP)[None, :]
    return tl.load(numbers + at, mask=real[:, None] & (k < K)[None, :], other=other)


@triton.jit
def load_inputs(x, start, q, part: tl.constexpr, K: tl.constexpr):
    """Inputs that part `part` of each word meets: four even and four odd ones a `q`, `[Q, 4]`, in float32."""
    at = (start + q // 4 * 128 + q % 4 * 8)[:, None] + part * 32 + tl.arange(0, 8)[None, :]
    eight = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)  # as they lie: one load
    return tl.split(tl.reshape(eight, [q.shape[0], 4, 2]))


@triton.jit
def sums(
    words, s, z, even, odd, pairs, inputs, scale, zero, first_row, q, N, tile: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, MATRICES: tl.constexpr,
    ZEROS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of a tile with the input, `[ROWS, Q]`, from the four parts of the input that it meets.

    even, odd: `[Q, 4]` each; pairs: the same as words of two; inputs `[Q]`: their sums.
    """
    FIRST: tl.constexpr = tile // MATRICES % ((K + BLOCK_K - 1) // BLOCK_K) * 4
    if ASM:
        w0, w1, w2, w3 = four(words)
        a0, a1, a2, a3 = four(pairs[FIRST][None, :, :])
        b0, b1, b2, b3 = four(pairs[FIRST + 1][None, :, :])
        c0, c1, c2, c3 = four(pairs[FIRST + 2][None, :, :])
        d0, d1, d2, d3 = four(pairs[FIRST + 3][None, :, :])
        total = tl.inline_asm_elementwise(
            FOUR_WORDS, OPERANDS,
            [w0, w1, w2, w3, a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if ZEROS:
            total += (8.0 - z.to(tl.float32)) * inputs[FIRST // 4][None, :]
        total = total * s.to(tl.float32)
    else:
        row, start = place_of(first_row, N, tile, K, ROWS, BLOCK_K, MATRICES)
        real = row < N * MATRICES
        total = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
        for part in tl.static_range(4):
            low, high = even[FIRST + part], odd[FIRST + part]
            first = ((words >> (4 * part)) & 15).to(tl.float32) - 8.0
            second = ((words >> (16 + 4 * part)) & 15).to(tl.float32) - 8.0
            product = tl.sum(first * low[None, :, :] + second * high[None, :, :], axis=2)
            k = start + q // 4 * 128 + part * 32
            if ZEROS:
                off = 8.0 - load_group(zero, row, real, k, 8, K, GROUP).to(tl.float32)
                product += off * tl.sum(low + high, axis=1)[None, :]
            total += product * load_group(scale, row, real, k, 0.0, K, GROUP).to(tl.float32)
    return total


@triton.jit
def gemv4_kernel(
    out, x, weight, scale, zero, norm_weight, bias, residual, eps, N,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_K: tl.constexpr, ZEROS: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """One program per `STEPS` times `ROWS` outputs, for which the input is prepared once.

    AHEAD: tiles that are loaded before the first is needed. TRIGGER: see `cuda_graphs.latency.gemv`.
    """
    MATRICES: tl.constexpr = 2 if GATED else 1
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = STEPS * PARTS * MATRICES
    first_row = tl.program_id(0) * (ROWS * STEPS)
    q = tl.arange(0, BLOCK_K // 32)
    words, scales, zeros = (), (), ()
    for tile in tl.static_range(AHEAD if AHEAD < TILES else TILES):
        w, s, z = load_tile(
            weight, scale, zero, first_row, q, N, tile, K, GROUP, ROWS, BLOCK_K, MATRICES, ZEROS, ASM
        )
        words += (w,)  # type: ignore[assignment]
        scales += (s,)  # type: ignore[assignment]
        zeros += (z,)  # type: ignore[assignment]
    if PDL:
        if TRIGGER == 0:
            gdc_launch_dependents()
        gdc_wait()
        if TRIGGER == 1:
            gdc_launch_dependents()
    added = load_addends(bias, residual, first_row, N, ROWS, STEPS, BIAS, ADD)
    # The whole input at once, in the order of the words: four parts of four pairs for each of their quarters.
    even, odd = (), ()
    squares = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    top = tl.zeros([BLOCK_K // 32, 4], tl.float32)
    for i in tl.static_range(4 * PARTS):
        low, high = load_inputs(x, i // 4 * BLOCK_K, q, i % 4, K)
        if NORM:
            squares += low * low + high * high
            g, h = load_inputs(norm_weight, i // 4 * BLOCK_K, q, i % 4, K)
            low, high = low * (g + 1.0 if ONE_PLUS else g), high * (h + 1.0 if ONE_PLUS else h)
        top = tl.maximum(top, tl.maximum(tl.abs(low), tl.abs(high)))
        even += (low,)  # type: ignore[assignment]
        odd += (high,)  # type: ignore[assignment]
    norm, largest = input_scales(
        tl.reshape(squares, [BLOCK_K // 8]), tl.reshape(top, [BLOCK_K // 8]), eps, K, NORM, True
    )
    scale_x, inverse = token_scale(largest, 1.0)
    lows, highs, pairs, inputs = (), (), (), ()
    for i in tl.static_range(4 * PARTS):
        low = (even[i] * norm).to(x.dtype.element_ty).to(tl.float32) * inverse  # rounded as a norm apart
        high = (odd[i] * norm).to(x.dtype.element_ty).to(tl.float32) * inverse
        lows += (low,)  # type: ignore[assignment]
        highs += (high,)  # type: ignore[assignment]
        pairs += (pair(low, high),)  # type: ignore[assignment]
    for i in tl.static_range(PARTS):
        every = lows[4 * i] + highs[4 * i]  # type: ignore[var-annotated]
        for part in tl.static_range(1, 4):
            every += lows[4 * i + part] + highs[4 * i + part]
        inputs += (tl.sum(every, axis=1),)  # type: ignore[assignment]
    gates = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
    ups = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
    for tile in tl.static_range(TILES):
        if tile + AHEAD < TILES:
            w, s, z = load_tile(
                weight, scale, zero, first_row, q, N, tile + AHEAD, K, GROUP, ROWS, BLOCK_K, MATRICES, ZEROS,
                ASM,
            )  # fmt: skip
            words += (w,)  # type: ignore[assignment]
            scales += (s,)  # type: ignore[assignment]
            zeros += (z,)  # type: ignore[assignment]
        product = sums(
            words[tile], scales[tile], zeros[tile], lows, highs, pairs, inputs, scale, zero, first_row, q, N,
            tile, K, GROUP, ROWS, BLOCK_K, MATRICES, ZEROS, ASM,
        )  # fmt: skip
        if tile % MATRICES == 0:
            gates += product
        else:
            ups += product
        if tile % (PARTS * MATRICES) == PARTS * MATRICES - 1:  # these rows are complete
            if PDL and TRIGGER == 2 and tile == TILES - 1:
                gdc_launch_dependents()
            row = first_row + tile // (PARTS * MATRICES) * ROWS + tl.arange(0, ROWS)
            result = tl.sum(gates, axis=1) * scale_x
            if GATED:
                result = activate(result, KIND) * (tl.sum(ups, axis=1) * scale_x)
            result += added[tile // (PARTS * MATRICES)]
            tl.store(out + row, result.to(out.dtype.element_ty), mask=row < N)
            gates = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)
            ups = tl.zeros([ROWS, BLOCK_K // 32], tl.float32)


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
    config: StepsConfig | None = None,
) -> Tensor:
    """`cuda_graphs.latency.gemv` with a weight of four bits, of `size` inputs: `[..., N]`."""
    rows = len(weight.data) // (1 if gate is None else 2)
    shape = config or steps_config(rows, size, len(weight.data) // rows, 4, x.device)
    out = torch.empty(*x.shape[:-1], rows, dtype=out_dtype or x.dtype, device=x.device)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    early, group = dependent_launch(x.device), weight.scheme.group
    gemv4_kernel[(triton.cdiv(rows, shape.rows * shape.steps),)](
        out, x, weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero,
        norm_weight, x if bias is None else bias, x if residual is None else residual, eps, rows,
        K=size, GROUP=group, ROWS=shape.rows, STEPS=shape.steps, AHEAD=shape.ahead, BLOCK_K=shape.block_k,
        ZEROS=weight.zero is not None, NORM=norm is not None, ONE_PLUS=one_plus, BIAS=bias is not None,
        ADD=residual is not None, GATED=gate is not None, KIND=0 if gate is None else KINDS[gate],
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

"""Triton products of many tokens with the experts that they chose.

A step sorts its choices (pairs of a token and an expert) by expert, and splits each expert's into tiles of
rows (`routing`); an expert's weights are read once for each tile. One kernel then computes gates, ups and the
activation, a tile of rows and of outputs per program; the same kernel computes `down` and multiplies by the
router's weight; a last one adds up each token's choices in the order of the router. No sum depends on what
else is in the batch: all tiles cut the K inputs in the same parts, and no output is added to by two programs.

Lower bounds of the time, for a layer of Qwen3-30B-A3B in bfloat16 (9.4 MB an expert) on an H200 (4.8 TB/s,
990 TFLOP/s dense):

    tokens   experts chosen   bytes     by bytes   by products
    1                     8       75 MB     16 us        0.1 us
    16                   82      770 MB    160 us        1.2 us
    256                 128     1.21 GB    252 us         20 us
    8192                128     1.21 GB    252 us        624 us
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from experts.grouped_experts import GroupedExperts
from experts.kernels.routing import sort_in_tiles
from experts.weights import ExpertWeights, Swiglu
from quant.formats import BLOCK
from quant.products import round_rows
from triton_paged_attention.hardware import HOPPER, at_least, shared_memory
from triton_paged_attention.linear import KINDS, activate


class Tile(NamedTuple):
    """Block sizes of a program of `grouped_kernel`, and its Triton launch options.

    rows: tokens of one expert. block_n: outputs; in the first product half of them are gates, half ups.
    block_k: inputs that are read at a time.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


TABLE = (
    (16, Tile(16, 128, 64, 4, 4)),
    (48, Tile(32, 128, 64, 4, 4)),
    (96, Tile(64, 128, 64, 4, 4)),
)
"""Up to so many rows an expert, on average, the tile. `block_k` is one number, see the module."""
LARGE = Tile(128, 256, 64, 8, 3)
OLDER = Tile(128, 128, 64, 8, 4)
"""In its place before Hopper, whose products take both sides from shared memory: registers have no room."""


def tile_for(rows: float, x: Tensor) -> Tile:
    """Return the block sizes for `rows` tokens per expert on average.

    There are as many pipeline stages as shared memory holds. x: the product's input, for its device and
    dtype.
    """
    largest = LARGE if at_least(x.device, HOPPER) else OLDER
    tile = next((tile for most, tile in TABLE if rows <= most), largest)
    stages = shared_memory(x.device) // (
        (tile.rows + tile.block_n) * tile.block_k * x.itemsize
    )
    return tile._replace(num_stages=min(tile.num_stages, stages + 1))  # one is in registers


@triton.jit
def gated_unit(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """Return `activation(gate) * up` in float32, or with LIMIT > 0 gpt-oss's clamped form.

    KIND: 0 SiLU, 1 GELU (tanh form), 2 GELU (erf). Clamped: gates to at most LIMIT, ups to -LIMIT .. LIMIT,
        and then `gate * sigmoid(1.702 gate) * (up + 1)`.
    """
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        result = activate(gate, KIND) * up
    return result


@triton.jit
def tile_product(a, w, acc, scale, row, k0, columns, SIDE: tl.constexpr):
    """Return `acc + a @ w`, float32 `[M, N]`, for `BLOCK_K` inputs from input `k0` on.

    a: `[M, BLOCK_K]`. w: `[BLOCK_K, N]`, of the weight's rows `row [N]`. All of these rows must exist, since
        scales are read without a mask: give row 0 for an output that does not exist.
    scale: pointer to one scale for each block of SIDE x SIDE weights, `[rows / SIDE, columns]`; SIDE 0: none.
    """
    if a.dtype != w.dtype:
        w = w.to(a.dtype)  # eight bits are exact in sixteen
    if SIDE == 0:
        acc = tl.dot(a, w, acc, input_precision="ieee")
    else:
        each = tl.load(scale + row // SIDE * columns + k0 // SIDE)
        acc += tl.dot(a, w, input_precision="ieee") * each[None, :]
    return acc


@triton.jit
def finish_sums(
    acc, unit, scale, bias, row, inside, CHANNEL: tl.constexpr

):  # fmt: skip
    """Return the sums `acc`, `[N]` or `[M, N]` float32, times their scales, plus biases.

    unit: scale of an input that was rounded to eight bits, or None. scale: of each weight row, used if
        CHANNEL. bias: of each weight row, or None. row: `[N]`, the weight rows of the outputs.
    inside: `[N]`, which of these rows exist.
    """
    if unit is not None:
        acc *= unit
    if CHANNEL:
        acc *= tl.load(scale + row, mask=inside, other=0.0)
    if bias is not None:
        acc += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def grouped_kernel(
    out, x, x_scale, data, scale, bias, weights, order, table, most, scale_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, UP: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr, CHANNEL: tl.constexpr, SIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of one expert's tokens with `BLOCK_N` of its `N` outputs. One program for each pair.

    A choice is a pair of a token and one of its experts; a tile is up to ROWS choices of one expert.
    The grid has one dimension: the `ceil(N / BLOCK_N)` programs of tile 0, then those of tile 1, and so on up
        to `most` tiles. A tile of 0 rows writes nothing.
    UP, the first product: `x [T, K]` -> `out [T k, N]`, gated, sorted by expert. Otherwise the second one:
        `x [T k, K]`, sorted by expert -> `out [T k, N]` in the order of choices, times `weights [T, k]`.
    data: `[E, N, K]`, with UP `[E, 2 N, K]`: gates, then ups. bias: `[E, N]`, `[E, 2 N]` or None.
    scale: of each weight row (CHANNEL) or of SIDE x SIDE blocks; `scale_stride` numbers per expert.
    x_scale: `[rows of x]`, if the input was rounded, or None. TOP_K: k, choices per token.
    order: `[T k]`, choices by expert. table: `[3, most]`: expert, first entry in `order`, rows of each tile.
    KIND, LIMIT: activation and clamp of `gated_unit`.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    rows = tl.load(table + 2 * most + tile)
    if rows == 0:
        return
    expert, begin = tl.load(table + tile).to(tl.int64), tl.load(table + most + tile)
    i, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = i < rows, n < N
    choice = tl.load(order + begin + i, mask=there, other=0)
    if UP:
        source, target = choice // TOP_K, begin + i
    else:
        source, target = begin + i, choice
    matrices: tl.constexpr = 2 if UP else 1
    data += expert * matrices * N * K
    if bias is not None:
        bias += expert * matrices * N
    scale += expert * scale_stride
    columns: tl.constexpr = (K + SIDE - 1) // SIDE if SIDE > 0 else 0
    up_row = n + N  # of the ups that belong to gates `n`
    row_in, up_in = (
        tl.where(inside, n, 0),
        tl.where(inside, up_row, 0),
    )  # what is read without a mask
    from_x = x + source.to(tl.int64)[:, None] * K + k[None, :]
    from_w, from_up = (
        data + n[None, :] * K + k[:, None],
        data + up_row[None, :] * K + k[:, None],
    )
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc_up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        left = k < K - k0
        a = tl.load(from_x + k0, mask=there[:, None] & left[None, :], other=0.0)
        w = tl.load(from_w + k0, mask=inside[None, :] & left[:, None], other=0.0)
        acc = tile_product(a, w, acc, scale, row_in, k0, columns, SIDE)
        if UP:
            w = tl.load(from_up + k0, mask=inside[None, :] & left[:, None], other=0.0)
            acc_up = tile_product(a, w, acc_up, scale, up_in, k0, columns, SIDE)
    unit = None
    if x_scale is not None:
        unit = tl.load(x_scale + source, mask=there, other=0.0)[:, None]
    acc = finish_sums(acc, unit, scale, bias, n, inside, CHANNEL)
    if UP:
        acc_up = finish_sums(acc_up, unit, scale, bias, up_row, inside, CHANNEL)
        acc = gated_unit(acc, acc_up, KIND, LIMIT)
    else:
        acc *= tl.load(weights + choice, mask=there, other=0.0)[:, None]
    at = out + target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def add_choices_kernel(
    out, parts, chosen, E, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sum the outputs of a token's experts, as far as they are on this rank.

    One program per token and `BLOCK_N` of its numbers.
    out: `[T, SIZE]`. parts: `[T TOP_K, SIZE]`, one row per choice (token and expert). chosen: `[T, TOP_K]`,
        numbers of experts; those that are not below `E` are skipped.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(chosen + token * TOP_K + place)
        inside = tl.where((expert >= 0) & (expert < E), n < SIZE, False)
        found = tl.load(parts + (token * TOP_K + place) * SIZE + n, mask=inside, other=0.0)
        total += found.to(tl.float32)
    tl.store(out + token * SIZE + n, total.to(out.dtype.element_ty), mask=n < SIZE)


def product_arguments(
    x: Tensor, experts: ExpertWeights, act: Swiglu | None, top_k: int
) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Return the arguments that a kernel needs for one of the two products of all experts.

    Args:
        x: the product's input, `[T, K]`.
        experts: the product's weights.
        act: the activation after the first product, on gates and ups; None for the second product.
        top_k: number of experts of a token.

    Returns:
        The tensors `x, x_scale, data, scale, bias`: a `scale` that does not exist is `x`, never read, and an
        `x_scale` or `bias` that does not exist is None. Then the kernel's constants, by name.
    """
    values, units = round_rows(x, "fp8") if experts.rounds_input else (x, None)
    scale = x if experts.scale is None else experts.scale

    kind, limit = act or Swiglu()
    return [values, units, experts.data, scale, experts.bias], {
        "scale_stride": 0 if experts.scale is None else scale[0].numel(),
        "N": experts.data.shape[1] // (1 if act is None else 2), "K": experts.data.shape[2], "TOP_K": top_k,
        "UP": act is not None, "KIND": KINDS[kind], "LIMIT": limit,
        "CHANNEL": experts.scale is not None and not experts.block_scales,
        "SIDE": BLOCK * experts.block_scales,
    }  # fmt: skip


def scratch_bytes(down: ExpertWeights, top_k: int, itemsize: int, tokens: int) -> int:
    """Return the bytes that `grouped` allocates between its kernels, for a step of `tokens` tokens.

    down: weights of the second product. top_k: number of experts of a token. itemsize: bytes of a number of
        the model's dtype.
    """
    _, hidden, inside = down.data.shape
    rounded = inside if down.rounds_input else 0
    return tokens * top_k * ((hidden + inside) * itemsize + rounded + 4)


def grouped(
    layer: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor, tile: Tile | None = None
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, `[T, hidden]`, by Triton kernels.

    x: `[T, hidden]`, any number of tokens. weights, chosen: `[T, k]`, the router's weights and numbers of
        experts.
    tile: block sizes, for measurements; None takes them from `TABLE`.
    """
    (count, hidden, _), (tokens, top_k) = layer.down.data.shape, chosen.shape
    chosen, weights = chosen.contiguous(), weights.contiguous()
    tile = tile or tile_for(chosen.numel() / count, x)
    order, table = sort_in_tiles(chosen, count, tile.rows)
    most = table.shape[1]
    for experts, act in ((layer.gate_up, layer.act), (layer.down, None)):
        tensors, constants = product_arguments(x.contiguous(), experts, act, top_k)
        n, block_n = constants["N"], tile.block_n // (1 if act is None else 2)
        x = torch.empty(chosen.numel(), n, dtype=x.dtype, device=x.device)
        grouped_kernel[(most * triton.cdiv(n, block_n),)](
            x, *tensors, weights, order, table, most, **constants,
            ROWS=tile.rows, BLOCK_N=block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
    out, block = x.new_empty(tokens, hidden), min(1024, triton.next_power_of_2(hidden))
    add_choices_kernel[(tokens, triton.cdiv(hidden, block))](
        out, x, chosen, count,
        SIZE=hidden, TOP_K=top_k, BLOCK_N=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out

"""Routing on the device: the router's choice in one kernel, and choices sorted by expert, in tiles.

In plain torch the choice is ten small kernels a layer, as long as reading the experts of one token takes.

A choice is a pair of a token and one of its k experts, with the number `token * k + place`. Sorted, the
choices of expert 0 come first, in the order of tokens. A tile is some choices of one expert, rows of a matrix
product. How many tiles there are depends on the routing, and nothing waits to learn it: the table has room
for the largest possible number, and tiles that are not needed have no rows. So a CUDA graph is recorded once
for a number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_paged_attention.hardware import dependent_launch


@triton.jit
def route_kernel(
    weights, chosen, logits,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Choose a token's TOP_K most probable experts; of equal ones the lowest number. One program per token.

    logits: `[T, E]`. weights: output `[T, TOP_K]` float32, probabilities; with NORMALIZE they sum to 1.
    chosen: output `[T, TOP_K]` int64, numbers of experts. E_PAD: E rounded up to a power of two.
    PDL: programmatic dependent launch: the kernel before may still run, so it is waited for.

    Experts are sorted by 64-bit keys. The upper half is the probability's bits, which order floats that are
    not negative; the lower half is the expert's number, counted down, so of equal ones the lowest comes
    first.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, axis=0))
    x = tl.where(e < E, x / tl.sum(x, axis=0), -1.0)
    keys = tl.sort(
        (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (E_PAD - 1 - e), descending=True
    )
    found = (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if NORMALIZE:
        found = found / tl.sum(tl.where(e < TOP_K, found, 0.0), axis=0)
    tl.store(weights + token * TOP_K + e, found, mask=e < TOP_K)
    tl.store(chosen + token * TOP_K + e, E_PAD - 1 - (keys & 0xFFFFFFFF), mask=e < TOP_K)


def route_at_once(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's `top_k` experts and their weights, chosen in one kernel.

    logits: `[T, E]` of the router. normalize: let a token's weights sum to 1.

    Returns:
        weights: `[T, top_k]` float32, the probabilities of the chosen experts.
        chosen: `[T, top_k]` int64, their numbers; of equal probabilities the lowest number first.
    """
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    route_kernel[(tokens,)](
        weights, chosen, logits.contiguous(), E=count, E_PAD=triton.next_power_of_2(count),
        TOP_K=top_k, NORMALIZE=normalize, num_warps=1, **dependent_launch(logits.device),
    )  # fmt: skip
    return weights, chosen


@triton.jit
def count_kernel(counts, chosen, choices, BLOCK: tl.constexpr):
    """Count how often each expert was chosen. One program per expert.

    counts: output `[E]` int32. chosen: `[choices]`, numbers of experts. BLOCK: choices that are read at a
        time.
    """
    i = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, choices, BLOCK):
        expert = tl.load(chosen + start + i, mask=start + i < choices, other=-1)
        found += (expert == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(found, axis=0))


@triton.jit
def place_kernel(
    order, tiles, counts, chosen, choices, most,
    E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Write one expert's choices to `order`, and its tiles to the table `tiles`.

    A choice is a pair of a token and an expert; a tile is up to ROWS choices of one expert. One program per
    expert, and one more, which writes empty tiles to the rest of the table.

    order: output `[choices]` int32, numbers of choices sorted by expert. tiles: output `[3, most]` int32: of
        each tile its expert, its first entry in `order`, and its number of rows, 0 for an empty one.
    counts: `[E]` int32, choices per expert. chosen: `[choices]`, numbers of experts.
    most: tiles that the table has room for. BLOCK, TILES: choices and tiles that are processed at a time.
    """
    own = tl.program_id(0)
    e = tl.arange(0, triton.next_power_of_2(E))
    count = tl.load(counts + e, mask=e < E, other=0)
    here = tl.sum(tl.where(e == own, count, 0), axis=0)
    begin = tl.sum(tl.where(e < own, count, 0), axis=0)
    tile_0 = tl.sum(tl.where(e < own, (count + ROWS - 1) // ROWS, 0), axis=0)
    tile_end = tl.where(own == E, most, tile_0 + (here + ROWS - 1) // ROWS)
    t = tl.arange(0, TILES)
    for tile in range(tile_0, tile_end, TILES):
        row = (tile - tile_0 + t) * ROWS
        inside = tile + t < tile_end
        tl.store(tiles + tile + t, own, mask=inside)
        tl.store(tiles + most + tile + t, begin + row, mask=inside)
        tl.store(
            tiles + 2 * most + tile + t,
            tl.maximum(tl.minimum(here - row, ROWS), 0),
            mask=inside,
        )
    if own < E:
        i = tl.arange(0, BLOCK)
        for start in range(0, choices, BLOCK):
            expert = tl.load(chosen + start + i, mask=start + i < choices, other=-1)
            hit = (expert == own).to(tl.int32)
            tl.store(order + begin + tl.cumsum(hit, axis=0) - 1, start + i, mask=hit > 0)
            begin += tl.sum(hit, axis=0)


def most_tiles(choices: int, experts: int, rows: int) -> int:
    """Return the largest number of tiles that may be needed for `choices` choices of `experts` experts.

    A tile is up to `rows` choices of one expert, so every chosen expert may have one that is not full.
    """
    return (choices - min(choices, experts)) // rows + min(choices, experts)


def sort_in_tiles(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Sort a step's choices by expert, and split each expert's choices into tiles of up to `rows`.

    chosen: `[T, k]`, numbers of experts; those not below `experts` belong to other ranks and are left out.
        Entry `j` of token `t` is the choice `t * k + j`.

    Returns:
        order: `[T k]` int32, numbers of choices by expert; entries after those of this rank are undefined.
        table: `[3, most]` int32: of each tile the expert, its first entry in `order`, and its number of rows.
        `most` is `most_tiles(T k, experts, rows)`; tiles that are not needed are last and have 0 rows.
    """
    choices, device = chosen.numel(), chosen.device
    most = most_tiles(choices, experts, rows)
    order = torch.empty(choices, dtype=torch.int32, device=device)
    table = torch.empty(3, most, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    block = min(2048, max(16, triton.next_power_of_2(choices)))
    warps = max(1, block // 256)
    count_kernel[(experts,)](counts, chosen, choices, BLOCK=block, num_warps=warps)
    place_kernel[(experts + 1,)](
        order, table, counts, chosen, choices, most,
        E=experts, ROWS=rows, BLOCK=block, TILES=64,
        num_warps=warps,
    )  # fmt: skip
    return order, table

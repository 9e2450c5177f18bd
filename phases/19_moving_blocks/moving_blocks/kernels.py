"""A Triton kernel that copies blocks of all layers between the GPU's pool and page-locked host memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 8
"""Thread blocks of a launch. They fill the bus, and leave most of the GPU to the step beside them."""
WORDS = 4096
"""Words of eight bytes that a program copies at a time."""


@triton.jit
def nanoseconds():
    """Return the GPU's global timer in nanoseconds, a 64-bit integer."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["count", "pause"])
def move_kernel(
    pool,  # [parts, N, width]
    host,  # [slots, parts, width], pinned
    index,  # [2, count]: blocks, then slots
    count,
    pool_blocks,
    parts,
    width,
    pause,
    TO_HOST: tl.constexpr,
    GENTLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy `count` blocks, each in `parts` pieces of `width` words that lie apart in the pool.

    pool: `[parts, pool_blocks, width]`. host: `[slots, parts, width]`. index: `[2, count]`, the blocks, then
        their slots. TO_HOST: from pool to host; else from host to pool. BLOCK: words that are copied at a
        time.
    GENTLY: let `pause` ns pass from one `BLOCK` of a program to the next.
    """
    due = tl.full((), 0, tl.int64)
    chunks = tl.cdiv(width, BLOCK)
    total = count * parts * chunks
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        if GENTLY:
            now = nanoseconds()
            while now < due:
                now = nanoseconds()
            due = now + pause
        offsets = (item % chunks) * BLOCK + tl.arange(0, BLOCK)
        part = ((item // chunks) % parts).to(tl.int64)
        at = item // (chunks * parts)
        block = tl.load(index + at)
        slot = tl.load(index + count + at)
        in_pool = pool + (part * pool_blocks + block) * width + offsets
        in_host = host + (slot * parts + part) * width + offsets
        inside = offsets < width
        if TO_HOST:
            tl.store(in_host, tl.load(in_pool, mask=inside), mask=inside)
        else:
            tl.store(in_pool, tl.load(in_host, mask=inside), mask=inside)


def move(
    pool: Tensor, host: Tensor, index: Tensor, *, to_host: bool, rate: float = math.inf
) -> None:
    """Copy blocks between a pool and host memory on the current stream, without waiting.

    Args:
        pool: `[parts, N, width]` of any dtype, contiguous: `N` blocks, each in `parts` pieces that lie apart.
        host: `[slots, parts, width]` of the same dtype, page-locked and contiguous.
        index: `[2, count]` int64 on the pool's device: the blocks, then their slots.
        to_host: True: from the pool to host memory. False: from host memory to the pool.
        rate: bytes a second at most. On a GPU only.
    """
    word = torch.uint8 if pool.shape[2] * pool.element_size() % 8 else torch.int64
    source, target = pool.view(word), host.view(word)
    parts, blocks, width = source.shape
    block = min(WORDS, triton.next_power_of_2(width))
    pause = int(1e9 * PROGRAMS * block * word.itemsize / rate)
    move_kernel[(PROGRAMS,)](
        source,
        target,
        index,
        index.shape[1],
        blocks,
        parts,
        width,
        pause,
        TO_HOST=to_host,
        GENTLY=pause > 0,
        BLOCK=block,
        num_warps=8,
    )

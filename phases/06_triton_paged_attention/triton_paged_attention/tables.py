"""Block sizes of the attention kernels, chosen by the shape of their work.

The numbers come from `benchmarks/kernels/` on an H200 (compute capability 9.0; `docs/log/kernels.md` has
the sweeps). On other GPUs the same choices are made to fit: tiles and stages shrink until they fit the
shared memory. A configuration says how large tiles are and how many programs share the work, never what is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from triton_paged_attention.hardware import HOPPER, at_least, multiprocessors, shared_memory


@dataclass(frozen=True)
class DecodeConfig:
    """Block sizes of the decode kernel.

    block_n: tokens per tile.
    num_warps, num_stages: of a program: its warps, and the stages of its pipeline of loads.
    splits: programs that share the keys of one request and key/value head.
    min_tiles: fewest tiles of a split.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    min_tiles: int = 1


@cache  # kernels ask at every launch
def decode_default(
    pairs: int, d_pad: int, itemsize: int, device: torch.device
) -> DecodeConfig:
    """Return block sizes that give about 2 programs per multiprocessor, which keeps the memory busy.

    pairs: (request, key/value head) pairs of a launch. d_pad: a head's size, rounded up to a power of two.
    itemsize: bytes of a key's number.

    Each pair gets an equal number of those programs, the splits of its keys: at least 1 and at most 32. With
    several splits, tiles have 32 tokens and 2 warps, since two programs a multiprocessor hide latency best
    with many short loads. With one split, tiles have 64 tokens and 4 warps, which is better for the more
    programs there are then. Both have 3 stages.

    The tiles in flight, one of keys and one of values for each stage, may fill half of the shared memory,
    so that two programs fit. If they need more, stages are dropped first, down to 1; then tiles are halved,
    down to 16 tokens.
    """
    splits = max(1, min(32, round(2 * multiprocessors(device) / pairs)))
    config = DecodeConfig(64, 4, 3) if splits == 1 else DecodeConfig(32, 2, 3, splits)
    row = 2 * d_pad * itemsize  # of keys and values
    budget = shared_memory(device) // 2
    while config.num_stages > 1 and row * config.block_n * config.num_stages > budget:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.block_n > 16 and row * config.block_n * config.num_stages > budget:
        config = replace(config, block_n=config.block_n // 2)
    return config


@dataclass(frozen=True)
class PrefillConfig:
    """Block sizes of the prefill kernel.

    block_m: rows of a query tile: query tokens times the query heads that share a key/value head.
    block_n: keys that one iteration computes.
    num_warps, num_stages: of a program: its warps, and the stages of its pipeline of loads.
    maxnreg: most registers per thread; 128 lets two programs of 8 warps share a multiprocessor. None: any.
    tma: True to copy tiles by the tensor memory accelerator, if the blocks and heads of the cache allow it.
    """

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    maxnreg: int | None = None
    tma: bool = False


@cache
def prefill_default(d_pad: int, itemsize: int, device: torch.device) -> PrefillConfig:
    """Return the prefill kernel's block sizes for heads of `d_pad` numbers on a device.

    Heads of up to 256 bytes get two programs of 8 warps per multiprocessor, which fill each other's pauses
    between matrix products and softmax. Larger heads get smaller tiles.

    d_pad: a head's size, rounded up to a power of two. itemsize: bytes of a number.
    """
    row = d_pad * itemsize
    config = (
        PrefillConfig(128, 64, 8, 2, maxnreg=128)
        if row <= 256
        else PrefillConfig(64, 32, 4, 2)
    )
    if itemsize == 2 and d_pad in (64, 128) and at_least(device, HOPPER):
        config = replace(config, tma=True)
    while config.block_n > 16 and row * (
        config.block_m + 2 * config.block_n * 2
    ) > shared_memory(device):
        config = replace(
            config, block_n=config.block_n // 2, block_m=max(16, config.block_m // 2)
        )
    return config


SMALL = 64
"""Rows of a tile where a step has a small batch of query tokens."""
LONG = 8192
"""Keys from which a prefill program runs alone on its multiprocessor."""


def for_step(
    config: PrefillConfig, small_batch: bool, keys: int, block_size: int
) -> PrefillConfig:
    """Return the prefill block sizes of a step, which depend on its tokens and on its longest context.

    config: the default sizes. small_batch: True if the step's query tokens are not enough for default tiles
        on all multiprocessors; then smaller tiles go to more of them, with more stages.
    keys: longest context of the step's prompts; from 8,192 keys on (`LONG`), with tiles by TMA, one program
        runs per multiprocessor, with more stages.
    block_size: tokens of a KV cache block.

    So 64 tokens of 32 heads of 128 over 32,768 keys take 356 us instead of 545, of 9 heads of 64 310
    instead of 442.
    """
    if small_batch:
        return replace(config, block_m=SMALL, num_warps=4, num_stages=3, maxnreg=None)
    alone = config.tma and block_size % config.block_n == 0 and keys >= LONG
    return replace(config, num_stages=3, maxnreg=None) if alone else config

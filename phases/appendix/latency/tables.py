"""Block sizes of the latency kernels, for one token and for two to eight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from triton_paged_attention.decode import MOST_SPLITS
from triton_paged_attention.hardware import multiprocessors


@dataclass(frozen=True)
class GemvConfig:
    """Block sizes of a matrix-vector kernel.

    rows: outputs of a program.
    block_k: inputs that are read at a time.
    num_warps: of a program.
    trigger_after_read: True: the next kernel may start when this one has read its matrix; False: when it
        begins.
    """

    rows: int
    block_k: int
    num_warps: int = 4
    trigger_after_read: bool = False


@cache  # kernels ask at every launch
def gemv_config(rows: int, size: int, gated: bool, device: torch.device) -> GemvConfig:
    """Return the block sizes for a matrix `[rows, size]`, or two of them if `gated`.

    A program gets about 16,384 weights, 32 KiB in half precision, and there are at least 256 programs. As
    long as a row is read in one sweep, the next kernel may start at once and wait with its own weights in
    registers; otherwise it would only take this one's room on the multiprocessor.

    On a CPU kernels are interpreted, a millisecond a program, so there the tiles are large.
    """
    if device.type == "cpu":
        return GemvConfig(32, min(512, 1 << (size - 1).bit_length()))
    block_k = min(4096, 1 << (size - 1).bit_length())
    wanted = max(1, min(16_384 // (size * (2 if gated else 1)), rows // 256))
    num_warps = 4 if gated and size <= 2048 else 8
    return GemvConfig(
        1 << (wanted.bit_length() - 1), block_k, num_warps, trigger_after_read=size > block_k
    )


@dataclass(frozen=True)
class SingleRequestConfig:
    """Block sizes of attention of a single request.

    block_n: keys of a tile.
    num_warps, num_stages: of a program.
    splits: most programs for a key/value head, a power of two.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 32


def tile_keys(d_pad: int, itemsize: int) -> int:
    """Return how many keys a tile may have to fit a program's registers: 16 to 64.

    d_pad: a head's padded size. itemsize: bytes of a number.
    """
    return max(16, min(64, 16_384 // (d_pad * itemsize)))


@cache
def single_request_default(
    kv_heads: int, d_pad: int, itemsize: int, device: torch.device
) -> SingleRequestConfig:
    """Return block sizes for one token: two programs per multiprocessor, and tiles that fit the registers.

    One stage takes little shared memory, so that programs of neighbouring kernels fit beside it.
    """
    splits = max(1, min(32, 2 * multiprocessors(device) // kv_heads))
    return SingleRequestConfig(
        tile_keys(d_pad, itemsize), splits=1 << (splits.bit_length() - 1)
    )


def small_batch_config(d_pad: int, itemsize: int) -> SingleRequestConfig:
    """Return block sizes for two to eight tokens, with as many splits as the decode kernel has.

    Heads of more than 64 numbers take twice the warps, whose registers hold the first tile, the new keys
    and all queries at once.
    """
    num_warps = 4 if d_pad <= 64 else 8
    return SingleRequestConfig(
        tile_keys(d_pad, itemsize), num_warps, num_stages=2, splits=MOST_SPLITS
    )


def fused_heads_are_faster(rows: int, size: int) -> bool:
    """Return True if an output projection `[rows, size]` should combine the splits of attention itself.

    Every program of the projection reads all splits, so there may be neither many programs nor large splits.
    """
    return size <= 2048 and rows <= 2048

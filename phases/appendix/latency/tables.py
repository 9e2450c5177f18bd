"""Block sizes of the latency kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from triton_paged_attention.hardware import multiprocessors


@dataclass(frozen=True)
class GemvConfig:
    """Block sizes of a matrix-vector kernel.

    rows: outputs of a program.
    block_k: inputs that are read at a time.
    num_warps: warps of a program.
    """

    rows: int
    block_k: int
    num_warps: int = 4


@cache  # kernels ask at every launch
def gemv_config(rows: int, size: int, gated: bool, device: torch.device) -> GemvConfig:
    """Return block sizes for a matrix `[rows, size]` times a vector, or for two such matrices if `gated`.

    A program gets about 16,384 weights, 32 KiB in half precision, and there are at least 256 programs. As
    long as a row is read in one sweep, the next kernel may start at once and wait with its own weights in
    registers; otherwise it would only take this one's room on the multiprocessor.

    On a CPU kernels are interpreted, a millisecond a program, so the tiles are large on a CPU.
    """
    if device.type == "cpu":
        return GemvConfig(32, min(512, 1 << (size - 1).bit_length()))
    block_k = min(4096, 1 << (size - 1).bit_length())
    wanted = max(1, min(16_384 // (size * (2 if gated else 1)), rows // 256))
    num_warps = 4 if gated and size <= 2048 else 8
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, num_warps)


@dataclass(frozen=True)
class SingleRequestConfig:
    """Block sizes of attention of a single request.

    block_n: keys of a tile.
    splits: most programs for a key/value head, a power of two up to 32.
    """

    block_n: int = 64
    splits: int = 32


@cache
def single_request_default(
    kv_heads: int, d_pad: int, itemsize: int, device: torch.device
) -> SingleRequestConfig:
    """Return block sizes of attention for one token: two programs per multiprocessor, tiles in registers.

    Args:
        kv_heads: key/value heads.
        d_pad: a head's padded size.
        itemsize: bytes of a number in the cache.
        device: a GPU, or the CPU for Triton's interpreter.
    """
    splits = max(1, min(SingleRequestConfig.splits, 2 * multiprocessors(device) // kv_heads))
    keys = max(16, min(64, 16_384 // (d_pad * itemsize)))
    return SingleRequestConfig(keys, splits=1 << (splits.bit_length() - 1))


def fused_heads_are_faster(rows: int, size: int) -> bool:
    """Return True if an output projection `[rows, size]` should combine attention's splits in its kernel.

    Every program of the projection reads the splits (attention over some keys each) of all heads, so that is
    faster only if neither `rows` nor `size` is above 2,048. False: attention combines the splits.
    """
    return size <= 2048 and rows <= 2048

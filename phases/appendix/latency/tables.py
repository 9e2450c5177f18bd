"""Configurations of the kernels for one token and for a few: see `triton_paged_attention.tables`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from triton_paged_attention.decode import MOST_SPLITS
from triton_paged_attention.hardware import multiprocessors


@dataclass(frozen=True)
class GemvConfig:
    """Block sizes of a matrix-vector kernel: output rows per program, inputs per sweep, warps.

    late: let the next kernel start only when this one has read its matrix, not when it begins to.
    """

    rows: int
    block_k: int
    num_warps: int = 4
    late: bool = False


@cache  # kernels ask at every launch
def gemv_config(rows: int, size: int, gated: bool, device: torch.device) -> GemvConfig:
    """Defaults for a matrix `[rows, size]`, if gated of two: about 16,384 weights a program, 32 KiB in half
    precision, and at least 256 programs.

    As long as a row is read in one sweep, the next kernel may start at once and wait with its own weights in
    registers; otherwise it would only take this one's place.

    On a CPU kernels are interpreted, a millisecond a program: few of them, whatever they do.
    """
    if device.type == "cpu":
        return GemvConfig(32, min(512, 1 << (size - 1).bit_length()))
    block_k = min(4096, 1 << (size - 1).bit_length())
    wanted = max(1, min(16_384 // (size * (2 if gated else 1)), rows // 256))
    num_warps = 4 if gated and size <= 2048 else 8
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, num_warps, late=size > block_k)


@dataclass(frozen=True)
class SingleRequestConfig:
    """Block sizes of attention of a lone request: keys per tile, and programs (a power of two) per key/value
    head, at most.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 32


def tile_keys(d_pad: int, itemsize: int) -> int:
    """Keys of a tile that fits a program's registers: of a head's padded size, and the bytes of a number."""
    return max(16, min(64, 16_384 // (d_pad * itemsize)))


@cache
def single_request_default(
    kv_heads: int, d_pad: int, itemsize: int, device: torch.device
) -> SingleRequestConfig:
    """Two programs per multiprocessor, and tiles that fit a program's registers.

    One stage, so that little shared memory is taken and the programs of neighbouring kernels fit beside it.
    """
    splits = max(1, min(32, 2 * multiprocessors(device) // kv_heads))
    return SingleRequestConfig(
        tile_keys(d_pad, itemsize), splits=1 << (splits.bit_length() - 1)
    )


def small_batch_config(d_pad: int, itemsize: int) -> SingleRequestConfig:
    """Defaults: tiles like a lone token's, one or more a split, and as many splits as the decode kernel has.

    Wide heads take twice the warps, whose registers hold the first tile, the new keys and all queries at
    once.
    """
    num_warps = 4 if d_pad <= 64 else 8
    return SingleRequestConfig(
        tile_keys(d_pad, itemsize), num_warps, num_stages=2, splits=MOST_SPLITS
    )


def fused_heads_are_faster(rows: int, size: int) -> bool:
    """Return True if an output projection `[rows, size]` had better combine the splits of attention itself.

    Every program reads all parts, so there may not be many programs nor large parts.
    """
    return size <= 2048 and rows <= 2048

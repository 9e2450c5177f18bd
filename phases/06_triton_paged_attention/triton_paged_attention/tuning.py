"""Tuned defaults by shape: a table that can be read, not a search that happens to the user.

The numbers come from `benchmarks/kernels/` on an H200 (compute capability 9.0; `docs/kernels.md` has the
sweeps). On other GPUs the same choices are made to fit: tiles and stages shrink until they fit the shared
memory. What `--autotune` found on the present machine comes before the table (`winners.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from .winners import winners_first


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel runs.

    block_n: tokens per tile. splits: programs that share one request and key/value head. min_share: fewest
    tiles that a split gets. tma: copy tiles by the tensor memory accelerator (Hopper on; the block size
    must be a multiple of `block_n` and the head size a power of two).
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    min_share: int = 1
    tma: bool = False


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel runs.

    block_m: rows (query tokens times the heads of a group) per tile. block_n: keys per step.
    maxnreg: registers per thread at most; 128 lets two programs of 8 warps share a multiprocessor.
    """

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    maxnreg: int | None = None
    tma: bool = False


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; for the CPU, where the interpreter runs programs one by one, 4."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; for the interpreter, Hopper's."""
    if device.type != "cuda":
        return 232_448
    # Torch's own stubs lack this property.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin"))  # noqa: B009


@winners_first("decode", DecodeConfig)
def decode_config(pairs: int, d_pad: int, itemsize: int, device: torch.device) -> DecodeConfig:
    """Defaults for `pairs` (request, key/value head) pairs; `d_pad` and `itemsize` say how large a row is.

    With about 2 programs per multiprocessor the memory is busy; fewer pairs than that are split. Few programs
    hide latency best with many short loads, many programs carry larger tiles.
    """
    wanted = 2 * multiprocessors(device)
    splits = 1 if 4 * pairs > 3 * wanted else min(32, -(-wanted // pairs))
    config = DecodeConfig(64, 4, 3) if splits == 1 else DecodeConfig(32, 2, 4, splits)
    row = 2 * d_pad * itemsize  # of keys and values
    budget = shared_memory(device) // 2
    while config.num_stages > 1 and row * config.block_n * config.num_stages > budget:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.block_n > 16 and row * config.block_n * config.num_stages > budget:
        config = replace(config, block_n=config.block_n // 2)
    return config


@winners_first("prefill", PrefillConfig)
def prefill_config(d_pad: int, itemsize: int, device: torch.device) -> PrefillConfig:
    """Defaults for a head of `d_pad` numbers of `itemsize` bytes.

    Up to 256 bytes a row: two programs of 8 warps per multiprocessor, which fill each other's pauses between
    matrix products and softmax. Larger heads take smaller tiles.
    """
    row = d_pad * itemsize
    config = PrefillConfig(128, 64, 8, 2, maxnreg=128) if row <= 256 else PrefillConfig(64, 32, 4, 2)
    while config.block_n > 16 and row * (config.block_m + 2 * config.block_n * 2) > shared_memory(device):
        config = replace(config, block_n=config.block_n // 2, block_m=max(16, config.block_m // 2))
    return config


@dataclass(frozen=True)
class GemvConfig:
    """How a matrix-vector kernel runs: output rows per program, inputs per sweep, warps.

    late: let the next kernel start only when this one has read its matrix, not when it begins to.
    """

    rows: int
    block_k: int
    num_warps: int = 4
    late: bool = False


@winners_first("gemv", GemvConfig)
def gemv_config(rows: int, size: int, gated: bool) -> GemvConfig:
    """Defaults for `[rows, size]` (gated: two such matrices).

    Small matrices: 16 KiB a program and some 500 programs, and the next kernel loads its weights meanwhile.
    Large ones fill the memory by themselves, and an early successor only takes their place.
    """
    chunk = size & -size  # the largest power of two that divides it
    block_k = min(4096, chunk if chunk >= 512 else 1 << (size - 1).bit_length())
    large = size >= 4096
    row = size * (2 if gated else 1)
    wanted = max(1, min((16_384 if large else 8_192) // row, rows // (256 if large else 512)))
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, 8 if large else 4, large)

"""Tuned defaults, per architecture and shape: a table that can be read, not a search that happens to the user.

The numbers for compute capability 9.0 come from `benchmarks/kernels/` on an H200. On other GPUs the same choices
are made to fit: tiles and stages shrink until they fit the multiprocessor's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel runs: tokens per tile, warps, pipeline stages, splits, fewest tiles per split."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    min_share: int = 1
    tma: bool = False


@dataclass(frozen=True)
class PrefillConfig:
    """How the prefill kernel runs: query rows and keys per tile, warps, stages, register cap (None: no cap)."""

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
    """Bytes of shared memory one program may use."""
    if device.type != "cuda":
        return 232448
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 49152))


@cache
def decode_config(
    pairs: int, block_size: int, d_pad: int, itemsize: int, device: torch.device, max_context: int | None = None
) -> DecodeConfig:
    """Defaults for `pairs` (request, key/value head) pairs; `d_pad` and `itemsize` say how large a row is.

    Two programs fit on a multiprocessor. From 3 programs each up, one split per pair is best; below that the
    splits are what brings their number there.
    """
    config = DecodeConfig()
    row = d_pad * itemsize
    while config.block_n > 16 and 2 * config.block_n * row * 2 > shared_memory(device) // 2:
        config = replace(config, block_n=config.block_n // 2)
    while config.num_stages > 1 and 2 * config.block_n * row * config.num_stages > shared_memory(device) * 0.45:
        config = replace(config, num_stages=config.num_stages - 1)
    wanted = 2 * multiprocessors(device)
    splits = 1 if pairs * 4 > wanted * 3 else min(32, -(-wanted // pairs))
    return replace(config, splits=splits)


@cache
def prefill_config(
    block_size: int, d_pad: int, itemsize: int, device: torch.device, mean_context: int | None = None
) -> PrefillConfig:
    """Defaults for prefill tiles."""
    config = PrefillConfig()
    row = d_pad * itemsize
    if d_pad * itemsize > 256:
        config = PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
    while config.num_stages > 1 and row * (config.block_m + 2 * config.block_n * config.num_stages) > shared_memory(
        device
    ):
        config = replace(config, num_stages=config.num_stages - 1)
    return config

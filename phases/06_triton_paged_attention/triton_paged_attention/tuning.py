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

    block_n: tokens per tile.
    splits: programs that share one request and key/value head.
    min_share: fewest tiles that a split gets.
    tma: copy tiles by the tensor memory accelerator (Hopper on; the block size must be a multiple of
        `block_n` and the head size a power of two).
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

    block_m: rows (query tokens times the heads of a group) per tile.
    block_n: keys per step.
    maxnreg: registers per thread at most; 128 lets two programs of 8 warps share a multiprocessor.
    tma: copy tiles by the tensor memory accelerator, if the blocks and heads of the cache allow it.
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


AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities."""


@cache
def at_least(device: torch.device, capability: tuple[int, int]) -> bool:
    """Whether this is a GPU of a compute capability or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability


@winners_first("decode", DecodeConfig)
def decode_config(pairs: int, d_pad: int, itemsize: int, device: torch.device) -> DecodeConfig:
    """Defaults for `pairs` (request, key/value head) pairs; `d_pad` and `itemsize` say how large a row is.

    With about 2 programs per multiprocessor the memory is busy; fewer pairs than that are split. Few programs
    hide latency best with many short loads, many programs carry larger tiles.
    """
    wanted = 2 * multiprocessors(device)
    splits = max(1, min(32, round(wanted / pairs)))
    config = DecodeConfig(64, 4, 3) if splits == 1 else DecodeConfig(32, 2, 3, splits)
    row = 2 * d_pad * itemsize  # of keys and values
    budget = shared_memory(device) // 2
    while config.num_stages > 1 and row * config.block_n * config.num_stages > budget:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.block_n > 16 and row * config.block_n * config.num_stages > budget:
        config = replace(config, block_n=config.block_n // 2)
    return config


LONG = 8192
"""Keys from which on a prefill program is long enough to be alone on its multiprocessor."""


def for_keys(config: PrefillConfig, keys: int, block_size: int) -> PrefillConfig:
    """`config` for prompts up to `keys` long: one program with all registers, or two that take turns."""
    alone = config.tma and block_size % config.block_n == 0 and keys >= LONG
    return replace(config, num_stages=3, maxnreg=None) if alone else config


@winners_first("prefill", PrefillConfig)
def prefill_config(d_pad: int, itemsize: int, device: torch.device) -> PrefillConfig:
    """Defaults for a head of `d_pad` numbers of `itemsize` bytes.

    Up to 256 bytes a row: two programs of 8 warps per multiprocessor, which fill each other's pauses between
    matrix products and softmax. Larger heads take smaller tiles.
    """
    row = d_pad * itemsize
    config = PrefillConfig(128, 64, 8, 2, maxnreg=128) if row <= 256 else PrefillConfig(64, 32, 4, 2)
    if itemsize == 2 and d_pad in (64, 128) and at_least(device, HOPPER):
        config = replace(config, tma=True)
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

    About 16,384 weights a program, 32 KiB in half precision, and at least 256 programs. As long as a row is
    read in one sweep, the next kernel may start at once and wait with its own weights in registers; otherwise
    it would only take this one's place.
    """
    block_k = min(4096, 1 << (size - 1).bit_length())
    wanted = max(1, min(16_384 // (size * (2 if gated else 1)), rows // 256))
    num_warps = 4 if gated and size <= 2048 else 8
    return GemvConfig(1 << (wanted.bit_length() - 1), block_k, num_warps, late=size > block_k)


def few_pays(hidden: int, itemsize: int, device: torch.device) -> bool:
    """Whether a model of this hidden size has kernels for a few tokens.

    Every program repeats the norm before the product, so there may not be many programs nor long rows. And
    for float32, and before Ampere, the compiler has no tensor cores for their products.
    """
    return hidden <= 2048 and itemsize == 2 and (device.type != "cuda" or at_least(device, AMPERE))


def few_config(size: int) -> GemvConfig:
    """Defaults for matrices of `size` inputs times a few tokens: 256 inputs a warp and sweep."""
    block_k = min(2048, 1 << (size - 1).bit_length())
    return GemvConfig(16, block_k, num_warps=max(1, block_k // 256))


@dataclass(frozen=True)
class SingleConfig:
    """How attention of a lone token runs: keys per tile, and programs (a power of two) per key/value head."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 32


@winners_first("single", SingleConfig)
def single_config(kv_heads: int, d_pad: int, itemsize: int, device: torch.device) -> SingleConfig:
    """Defaults: two programs per multiprocessor, and tiles that fit a program's registers.

    One stage, so that little shared memory is taken and the programs of neighbouring kernels fit beside it.
    """
    splits = max(1, min(32, 2 * multiprocessors(device) // kv_heads))
    block_n = max(16, min(64, 16_384 // (d_pad * itemsize)))
    return SingleConfig(block_n, splits=1 << (splits.bit_length() - 1))


@dataclass(frozen=True)
class HeadsConfig:
    """How the output projection of a lone token runs: rows per program, splits that are loaded at once."""

    rows: int = 8
    num_warps: int = 8
    chunk: int = 10


@cache
def heads_config(rows: int, size: int) -> HeadsConfig | None:
    """Defaults for `[rows, size]`; None: the splits of attention had better be combined before.

    Every program reads all parts, so there may not be many programs nor large parts.
    """
    return HeadsConfig() if size <= 2048 and rows <= 2048 else None

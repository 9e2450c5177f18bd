"""How many blocks fit: the memory ledger, made once at the start."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from common.device import memory_allocated
from common.errors import UserError, integer
from forward.model import Model
from paged_cache.pool import KVFormat

CPU_CACHE_BYTES = 1 << 30
"""The cache's size on a CPU, unless the caller says otherwise or a quarter of the free memory is less."""


@dataclass(frozen=True)
class Ledger:
    """Where the memory goes, in bytes, and how many blocks and tokens the cache's part makes."""

    weights: int
    activations: int
    cache: int
    blocks: int
    block_size: int
    reserved: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        lines = [
            ("weights", _mib(self.weights)),
            ("activations", _mib(self.activations)),
            *([("reserved", _mib(self.reserved))] if self.reserved else []),
            ("cache", _mib(self.cache)),
            ("blocks", f"{self.blocks:,} of {self.block_size} tokens"),
            ("tokens", f"{self.tokens:,}"),
        ]
        return "\n".join(f"{name:<12}{value:>24}" for name, value in lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def activation_bytes(model: Model, step_tokens: int, rows: int) -> int:
    """An estimate of the most that one step needs beside weights and cache, from above.

    The widest moment of a layer holds the residual stream and its normalized float32 copy, the gate and up
    projections and their product, and queries, keys and values; the logits are float32 for every row, with
    two more copies while sampling.
    """
    config, size = model.config, model.dtype.itemsize
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = config.hidden_size * (2 * size + 4) + 3 * config.intermediate_size * size + 2 * heads * size
    return step_tokens * token + 3 * rows * config.vocab_size * 4


def plan_cache(
    model: Model,
    *,
    block_size: int,
    step_tokens: int,
    rows: int,
    max_len: int,
    kv: KVFormat | None = None,
    cache_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    reserved: int = 0,
) -> Ledger:
    """Decide the number of blocks.

    Args:
        model: loaded, so that what its weights leave free is known.
        block_size: tokens in a block.
        step_tokens: most tokens that a step computes.
        rows: requests that run at most; the cache is never larger than they can fill.
        max_len: most tokens of a request.
        kv: how keys and values are stored.
        cache_bytes: what the caller grants the cache; everything else is ignored then.
        gpu_memory_utilization: share of the device's memory that weights, activations and cache may fill.
        reserved: bytes that somebody else will need (graphs).

    Raises:
        UserError: not even one block fits.
    """
    block_size = integer("block_size", block_size, low=1)
    if not 0 < gpu_memory_utilization <= 1:
        raise UserError(f"gpu_memory_utilization is {gpu_memory_utilization}, but must be in (0, 1]")
    activations = activation_bytes(model, step_tokens, rows)
    per_block = (kv or KVFormat()).bytes_per_block(model.config, block_size, model.dtype)
    if cache_bytes is not None:
        room = integer("cache_bytes", cache_bytes, low=0)
    elif model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        cached = torch.cuda.memory_reserved(model.device) - (memory_allocated(model.device) or 0)
        room = int(free + cached - (1 - gpu_memory_utilization) * total) - activations - reserved
    else:
        room = min(CPU_CACHE_BYTES, _free_memory() // 4)
    blocks = room // per_block
    if cache_bytes is None:
        blocks = min(blocks, rows * -(-max_len // block_size))  # more than this can never be in use
    if blocks < 1:
        found = f"the cache has {max(room, 0)} bytes" if cache_bytes is None else f"cache_bytes is {room}"
        raise UserError(f"{found}, but one block of {block_size} tokens takes {per_block}")
    return Ledger(model.weight_bytes, activations, blocks * per_block, blocks, block_size, reserved)


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system: take the default
        return 4 * CPU_CACHE_BYTES

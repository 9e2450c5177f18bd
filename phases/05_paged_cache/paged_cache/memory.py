"""The division of the device's memory, made once at the start: how many KV cache blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from common.device import free_memory
from common.errors import UserError, shown
from common.sampling.memory import persistent_bytes, scratch_bytes
from forward.model import Model
from paged_cache.pool import KVFormat

CPU_CACHE_BYTES = 1 << 28
"""The cache's size on a CPU, unless the caller says otherwise, one request of the longest context needs more
(up to `MOST_CPU_CACHE_BYTES`), or a quarter of the free memory is less. Only what is written is in use."""
MOST_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """The division of an engine's memory, in bytes, and the number of KV cache blocks that fit.

    weights: parameters and buffers of the model.
    rows: what every running request needs: its tokens, block table, and the sampler's settings and counts.
    activations: most temporary memory of a step.
    cache: the KV cache: `blocks` blocks of `block_size` tokens.
    reserved: what features have asked for, such as CUDA graphs.
    """

    weights: int
    rows: int
    activations: int
    cache: int
    blocks: int
    block_size: int
    reserved: int = 0

    @property
    def tokens(self) -> int:
        """Return how many tokens the cache has room for."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        sizes = [
            (name, vars(self)[name])
            for name in ("weights", "rows", "activations", "reserved", "cache")
        ]
        lines = [
            (name, f"{size / 2**20:,.1f} MiB")
            for name, size in sizes
            if size or name != "reserved"
        ]
        lines += [
            ("blocks", f"{self.blocks:,} of {self.block_size} tokens"),
            ("tokens", f"{self.tokens:,}"),
        ]
        return "\n".join(f"{name:<12}{value:>24}" for name, value in lines)


def weight_bytes(model: Model) -> int:
    """Return the bytes of a model's parameters and buffers; memory that several of them share counts once."""
    storages = {
        tensor.untyped_storage() for tensor in chain(model.parameters(), model.buffers())
    }
    return sum(storage.nbytes() for storage in storages)


def activation_bytes(model: Model, step_tokens: int, rows: int) -> int:
    """Return an upper estimate of the bytes that one step needs beside weights and KV cache.

    step_tokens: most tokens of a step. rows: most running requests, each with logits.
    The estimate adds up, for every token, what a layer holds at its peak: the residual stream and its
    normalized float32 copy, the gate and up projections and their product, and queries, keys and values;
    for every row, its logits in the model's dtype and in float32; and what sampling needs.
    """
    config, size = model.config, model.dtype.itemsize
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    token = (
        config.hidden_size * (2 * size + 4)
        + 3 * config.intermediate_size * size
        + 2 * heads * size
    )
    logits = rows * config.vocab_size * (size + 4)
    return step_tokens * token + logits + scratch_bytes(rows, config.vocab_size, model.device)


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
) -> MemoryPlan:
    """Return how an engine's memory is divided (a `MemoryPlan`), with the number of KV cache blocks.

    model: the loaded model, whose weights have left less memory free. block_size: tokens in a block.
    step_tokens: most tokens that a step computes. max_len: most tokens of a request.
    rows: most requests that run at a time; they bound the cache without `cache_bytes`.
    kv: how keys and values are stored; None: in the model's dtype.
    cache_bytes: bytes of the cache, if as many are free; None: as large as there is room for.
    gpu_memory_utilization: share of a GPU's memory that weights, cache and all else may fill, from 0 to 1.
    reserved: bytes to leave free, as for CUDA graphs.

    Raises:
        UserError: not even one block fits, or more is asked for than is free.
    """
    per_block = (kv or KVFormat()).bytes_per_block(model.config, block_size, model.dtype)
    tables = 4 * -(-max_len // block_size)
    for_rows = rows * (8 * max_len + tables)
    for_rows += persistent_bytes(rows, model.config.vocab_size)  # unused penalties included
    activations = activation_bytes(model, step_tokens, rows)
    free, total = free_memory(model.device)
    if for_rows > free:
        raise UserError(
            f"max_rows is {rows}, which takes {for_rows} bytes for requests of {max_len} tokens, but only "
            f"{free} bytes are free: lower max_rows or max_len"
        )
    if cache_bytes is not None:
        if cache_bytes > free:
            raise UserError(
                f"cache_bytes is {shown(cache_bytes)}, but only {free} bytes are free"
            )
        blocks = cache_bytes // per_block
    else:
        if model.device.type == "cuda":
            room = (
                int(free - (1 - gpu_memory_utilization) * total)
                - for_rows
                - activations
                - reserved
            )
        else:
            longest = -(-max_len // block_size) * per_block
            room = min(max(CPU_CACHE_BYTES, min(longest, MOST_CPU_CACHE_BYTES)), free // 4)
        # More can never be in use; one block more, since phase 17's pool has one that is never used.
        blocks = min(room // per_block, rows * -(-max_len // block_size) + 1)
    if blocks < 1:
        found = (
            f"the cache has {max(room, 0)} bytes"
            if cache_bytes is None
            else f"cache_bytes is {cache_bytes}"
        )
        raise UserError(f"{found}, but one block of {block_size} tokens takes {per_block}")
    return MemoryPlan(
        weight_bytes(model),
        for_rows,
        activations,
        blocks * per_block,
        blocks,
        block_size,
        reserved,
    )

"""Shapes that `--autotune` can tune for a model: kernels on random data of the model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from common.models.config import ModelConfig
from paged_cache.pool import LayerCache
from phases.appendix.tuning.winners import DECODING, PREFILLING, TunedWinners
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import DECODE, PREFILL, DecodeKey, PrefillKey

CACHE_BYTES = 120e6
"""Data is repeated in memory until it is this large: more than twice the L2 cache of an H200."""
BLOCK_SIZE = 64
"""That of the cache, as `load` chooses it on a GPU. The kernels' tiles need not divide it."""


@dataclass(frozen=True)
class Shape:
    """One thing to tune.

    winners, key: whose entry is looked for. title: for people. call: run the kernel once over each copy of
    its data; its result is compared between configurations. copies: how many those are. most_splits: what the
    engine's workspace has room for.
    """

    winners: TunedWinners[Any, Any]
    key: Any
    device: torch.device
    title: str
    call: Callable[[], Tensor]
    copies: int
    most_splits: int = 1

    @property
    def default(self) -> Any:
        """The table's configuration, whatever was found before."""
        return self.winners.table.default(self.key, self.device)


def shapes(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batches: Sequence[int], context: int
) -> Iterator[Shape]:
    """Yield the shapes of a model of this configuration, with random data; memory is freed in between."""
    for batch in batches:
        yield decode_shape(model, device, dtype, batch, context)
    yield prefill_shape(model, device, dtype, context)


def _cache(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int, context: int
) -> tuple[LayerCache, list[Tensor]]:
    """A layer's cache, and block tables of as many disjoint batches as it takes to exceed the L2 cache."""
    per_request = -(-context // BLOCK_SIZE)
    one = 2 * batch * per_request * BLOCK_SIZE * model.num_kv_heads * model.head_dim * dtype.itemsize
    copies = copies_of(one, device)
    blocks = batch * per_request
    size = (copies * blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    order = torch.randperm(copies * blocks, device=device).int()
    return LayerCache(k, v), list(order.view(copies, batch, per_request))


def copies_of(size: int, device: torch.device) -> int:
    """Return how often data of `size` bytes is repeated; the interpreter has no cache to outgrow."""
    return min(24, int(CACHE_BYTES // size) + 1) if device.type == "cuda" else 1


def decode_shape(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int, context: int
) -> Shape:
    """Decode attention of `batch` requests with `context` keys each."""
    cache, tables = _cache(model, device, dtype, batch, context)
    q = torch.randn(batch, model.num_heads, model.head_dim, device=device, dtype=dtype)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    d_pad = max(16, triton.next_power_of_2(model.head_dim))
    key = DecodeKey(batch * model.num_kv_heads, d_pad, dtype.itemsize)
    most = max(DECODE.default(key, device).splits, 4 * multiprocessors(device) // key.pairs)
    workspace = Workspace(most * batch * model.num_heads, d_pad, device)

    def call() -> Tensor:
        out = torch.empty_like(q)
        for table in tables:
            paged_decode(q, cache, table, lens, scale=model.attention_scale, out=out, workspace=workspace)
        return out

    title = f"decode attention, {batch} x {context:,}"
    return Shape(DECODING, key, device, title, call, len(tables), most)


def prefill_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int) -> Shape:
    """Prefill attention of two prompts of `context` tokens and eight of an eighth of it."""
    lens = [context] * 2 + [max(1, context // 8)] * 8
    cache, tables = _cache(model, device, dtype, len(lens), context)
    q = torch.randn(sum(lens), model.num_heads, model.head_dim, device=device, dtype=dtype)
    key = PrefillKey(max(16, triton.next_power_of_2(model.head_dim)), dtype.itemsize)
    group = model.num_heads // model.num_kv_heads
    cut: dict[int, Tensor] = {}

    def call() -> Tensor:
        config = PREFILL.lookup(key, device)
        tokens = config.block_m // group
        if tokens not in cut:
            cut[tokens] = torch.from_numpy(query_tiles(lens, lens, tokens)).to(device)
        return paged_prefill(
            q, cache, tables[0], cut[tokens], scale=model.attention_scale, out=torch.empty_like(q),
            config=config,
        )  # fmt: skip

    title = f"prefill attention, 2 x {lens[0]:,} and 8 x {lens[-1]:,}"
    return Shape(PREFILLING, key, device, title, call, 1)

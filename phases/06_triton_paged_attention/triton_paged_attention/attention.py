"""The seam's object over the paged pool whose kernels read the blocks where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from continuous.batch import HostBatch, upload
from forward.attention import LayerSpec
from paged_cache import BlockPool, LayerBlocks, PagedAttention, PagedBatch, TorchPagedAttention
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import for_keys, prefill_default

if TYPE_CHECKING:
    from triton_paged_attention.feature import Backend

TILE_ROWS = 16
"""Rows of the decode kernel's tile. A request with at most `16 / GROUP` new tokens goes through it, rounded
up to a power of two, for which the kernel is compiled in any case."""


class TritonPagedAttention(PagedAttention):
    """Requests with a few new tokens go through the decode kernel, the others through the prefill kernel.

    Args:
        pool: the cache.
        num_heads: query heads of the model, `H`.
        prefill, decode: which backend computes each kind. With one of each, a step that has both kinds
            computes all of it in torch first; such mixtures are for comparisons, not for speed.

    A step of decodes alone allocates nothing and uploads nothing in `begin`, so that it can be captured.
    Graphs of other steps begin by `begin_sorted`.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_heads: int,
        *,
        prefill: Backend = "triton",
        decode: Backend = "triton",
    ) -> None:
        super().__init__(pool)
        self.prefill, self.decode = prefill, decode
        self._torch = TorchPagedAttention(pool)
        device, (kv_heads, d) = pool.data.device, pool.data.shape[-2:]
        self._group = num_heads // kv_heads
        self.most_queries = triton.next_power_of_2(max(1, TILE_ROWS // self._group))
        d_pad = max(16, triton.next_power_of_2(d))
        self._prefill_config = prefill_default(d_pad, pool.data.element_size(), device)
        # Only launches of few pairs split, so this bounds pairs * splits * rows: see `decode_default`.
        pairs = 4 * multiprocessors(device) + kv_heads
        rows = self.most_queries * self._group
        self._workspace = Workspace(pairs * rows, d_pad, device)

    @property
    def stores_early(self) -> bool:
        """True if keys and values may be in the pool before the call, stored by the kernel that makes them.

        Torch's prefill wants them in hand.
        """
        return self.prefill == self.decode == "triton"

    def plan(self) -> None:
        """Sort the requests into the two kinds, and cut the longer ones into query tiles."""
        host = self.batch.host
        short = host.query_lens <= self.most_queries
        decodes, longer = (
            short & (self.decode == "triton"),
            ~short & (self.prefill == "triton"),
        )
        self._needs_torch = not (decodes | longer).all()
        if self._needs_torch:
            self._torch.begin(self.batch)
        # One or the most: a kernel in between would be compiled for each number, and gain nothing.
        most = int(host.query_lens[decodes].max(initial=0))
        self._max_queries = most if most < 2 else self.most_queries
        self._only: Tensor | None = None  # the requests that are decodes; None: all
        self._prefill_keys = int(host.context_lens[longer].max(initial=0))
        self._tiles: Tensor | None = None
        if not decodes.all():
            members, tiles = np.flatnonzero(decodes).astype(np.int32), self._cut(host, longer)
            moved = upload(self.batch.positions.device, {"members": members, "tiles": tiles})
            self._only, self._tiles = moved["members"], moved["tiles"]

    def sort(self, host: HostBatch) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The requests for the decode kernel, and the query tiles `[n, 4]` of the others."""
        short = host.query_lens <= self.most_queries
        return np.flatnonzero(short), self._cut(host, ~short)

    def _cut(self, host: HostBatch, longer: NDArray[np.bool_]) -> NDArray[np.int32]:
        return query_tiles(host.query_lens, host.context_lens, self.tile_tokens, longer)

    @property
    def tile_tokens(self) -> int:
        """Query tokens in a tile, at most."""
        return self._prefill_config.block_m // self._group

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step whose requests the caller has sorted, in the place of `begin`.

        This is a seam: graphs refill both before each replay.

        members: int32, padded with requests that have no tokens and no context; None: all are cut into tiles.
        tiles: `[n, 4]` int32, padded with tiles of no tokens.
        """
        self.batch = batch
        self._needs_torch = False
        self._prefill_keys = 0
        self._max_queries = 0 if members is None else self.most_queries
        self._only, self._tiles = members, tiles

    def store(self, cache: LayerBlocks, k: Tensor, v: Tensor) -> None:
        """See `PagedAttention.store`."""
        kv_store(k, v, cache, self.batch.slots)

    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """See `PagedAttention.attend`. Unless a backend is torch, `k` and `v` are not read."""
        batch, q = self.batch, q.contiguous()
        out = (
            self._torch.attend(layer, q, k, v, cache)
            if self._needs_torch
            else torch.empty_like(q)
        )
        if self._max_queries:
            one_each = self._only is None and self._max_queries == 1
            paged_decode(
                q,
                cache,
                batch.block_tables,
                batch.context_lens,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
                sinks=layer.sinks,
                query_starts=None if one_each else batch.query_starts,
                max_queries=self._max_queries,
                requests=self._only,
                out=out,
                workspace=self._workspace,
            )
        if self._tiles is not None:
            paged_prefill(
                q,
                cache,
                batch.block_tables,
                self._tiles,
                scale=layer.scale,
                sliding_window=layer.sliding_window,
                soft_cap=layer.soft_cap,
                sinks=layer.sinks,
                out=out,
                config=for_keys(self._prefill_config, self._prefill_keys, cache.k.shape[1]),
            )
        return out

"""Attention over the paged KV cache by kernels that read its blocks in place, through the block tables."""

from __future__ import annotations

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from continuous.batch import HostBatch, upload
from forward.attention import LayerSpec
from paged_cache import BlockPool, LayerBlocks, PagedAttention, PagedBatch
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import SMALL, for_step, prefill_default
from triton_paged_attention.tiles import padded

TILE_ROWS = 16
"""Rows of the decode kernel's tile. A request with at most `16 / GROUP` new tokens goes through that kernel;
the number is rounded up to a power of two, for which the kernel is compiled in any case.
"""


class TritonPagedAttention(PagedAttention):
    """Attention over the paged KV cache by two Triton kernels, one for decode steps and one for prefill.

    Requests with at most `most_queries` new tokens (16 over the query heads of a key/value head, rounded
    up to a power of two) are computed by the decode kernel, all others by the prefill kernel. For a step of
    decodes alone, `begin` allocates and uploads nothing, so that a CUDA graph can capture the step. CUDA
    graphs of other steps call `begin_sorted` instead.

    Args:
        pool: the paged KV cache.
        num_heads: query heads of the model, `H`.
    """

    def __init__(self, pool: BlockPool, num_heads: int) -> None:
        super().__init__(pool)
        device, (kv_heads, d) = pool.data.device, pool.data.shape[-2:]
        self._group = num_heads // kv_heads
        self.most_queries = triton.next_power_of_2(max(1, TILE_ROWS // self._group))
        d_pad = padded(d)
        self._prefill_config = prefill_default(d_pad, pool.data.element_size(), device)
        # So many query tokens make a small tile for each multiprocessor.
        supported = self._prefill_config.tma and self._group <= SMALL
        self._small_batch = supported * SMALL * multiprocessors(device) // num_heads
        # Only launches with little work split, so this bounds pairs * splits * rows: see `decode_default`.
        pairs = 4 * multiprocessors(device) + kv_heads
        self._workspace = Workspace(pairs * self.most_queries * self._group, d_pad, device)

    def plan(self) -> None:
        """Prepare the step `self.batch`: choose each request's kernel, decode or prefill.

        The requests for the prefill kernel are split into query tiles: pieces of their new tokens, of which
        each is computed by one program.
        """
        host = self.batch.host
        decodes = host.query_lens <= self.most_queries
        # One or the most: a kernel in between would be compiled for each number, and gain nothing.
        most = int(host.query_lens[decodes].max(initial=0))
        self._max_queries = most if most < 2 else self.most_queries
        self._only: Tensor | None = None  # the requests that are decodes; None: all
        self._prefill_keys = int(host.context_lens[~decodes].max(initial=0))
        self._tiles: Tensor | None = None
        if not decodes.all():
            members, tiles = self.sort(host, len(self.batch.positions))
            sorted_ = {"members": members.astype(np.int32), "tiles": tiles}
            device = self.batch.positions.device
            self._only, self._tiles = upload(device, sorted_).values()

    def sort(
        self, host: HostBatch, tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the requests for the decode kernel, and the query tiles for the prefill kernel.

        host: the step's lengths, as numpy arrays. tokens: number of tokens in the step; for a CUDA graph,
            the most that it computes.

        Returns:
            requests: int64, indices in the batch.
            tiles: `[n, 4]` int32, pieces of the other requests' new tokens: request, row of the first query
            token in the batch, number of query tokens, position of the first.
        """
        short = host.query_lens <= self.most_queries
        tiles = query_tiles(
            host.query_lens, host.context_lens, self.tile_tokens(tokens), ~short
        )
        return np.flatnonzero(short), tiles

    def tile_tokens(self, tokens: int) -> int:
        """Return the most query tokens of a tile (a piece of a prompt) in a step of `tokens` tokens.

        Where `tokens` fill at most one tile of 64 rows (`SMALL`; a row: a token and query head of one
        key/value head) for each multiprocessor, tiles are that small, on a GPU with TMA.
        """
        default = self._prefill_config.block_m
        return (SMALL if tokens <= self._small_batch else default) // self._group

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step whose requests are sorted by kernel; CUDA graphs call this instead of `begin`.

        members: int32, indices of the requests for the decode kernel, padded with requests without tokens
            and context; None: no request is for that kernel.
        tiles: `[n, 4]` int32, query tiles of the other requests, as `sort` returns them, padded with tiles
            of no tokens. Before a graph is replayed, both tensors are refilled.
        """
        self.batch = batch
        self._prefill_keys = 0
        self._max_queries = 0 if members is None else self.most_queries
        self._only, self._tiles = members, tiles

    def store(self, cache: LayerBlocks, k: Tensor, v: Tensor) -> None:
        """Write the new tokens' keys and values `[T, KH, D]` to their slots in a layer's blocks, `cache`."""
        kv_store(k, v, cache, self.batch.slots)

    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """Return the attention `[T, H, D]` of the queries `q [T, H, D]` over a layer's blocks.

        k, v: not read, since their numbers are in the blocks already. cache: the layer's blocks.
        """
        batch, q = self.batch, q.contiguous()
        out = torch.empty_like(q)
        if self._max_queries:
            one_each = self._only is None and self._max_queries == 1
            paged_decode(
                layer,
                q,
                cache,
                batch.block_tables,
                batch.context_lens,
                query_starts=None if one_each else batch.query_starts,
                max_queries=self._max_queries,
                requests=self._only,
                out=out,
                workspace=self._workspace,
            )
        if self._tiles is not None:
            paged_prefill(
                layer,
                q,
                cache,
                batch.block_tables,
                self._tiles,
                for_step(
                    self._prefill_config,
                    len(q) <= self._small_batch,
                    self._prefill_keys,
                    cache.k.shape[1],
                ),
                out,
            )
        return out

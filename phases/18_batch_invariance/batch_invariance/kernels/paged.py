"""The Triton kernel `chunked_attention` as the attention object of an engine."""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from batch_invariance.attention import CHUNK, GroupedAttention
from batch_invariance.kernels.attention import Launch, Scratch, chunked_attention
from forward.attention import LayerSpec
from paged_cache import BlockPool, LayerBlocks, PagedBatch
from triton_paged_attention.attention import TILE_ROWS, TritonPagedAttention
from triton_paged_attention.hardware import multiprocessors

SCRATCH_ROWS = 1 << 16
"""Rows of scratch memory: 32 MiB with heads of 128. A step that would need more is not split."""

PROMPT_LAUNCH = {64: (2, 128), 128: (3, None)}
"""Padded size of a head -> stages and most registers of a thread, for tiles of prompts."""


class ChunkedTriton(GroupedAttention, TritonPagedAttention):
    """Paged attention by one Triton kernel for decodes and prompts; no batch changes a request's bits.

    pool: blocks of keys and values. num_heads: number of query heads. block_n: keys of a tile.
    """

    def __init__(self, pool: BlockPool, num_heads: int) -> None:
        super().__init__(pool, num_heads)
        d_pad = max(16, triton.next_power_of_2(pool.data.shape[-1]))
        self.block_n = self._prefill_config.block_n
        self._scratch = Scratch(SCRATCH_ROWS, d_pad, pool.data.device)

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step whose requests the caller has sorted into decodes and prefills.

        members: indices of the requests with at most `most_queries` tokens, each of which is one tile; None:
            none. tiles: `[n, 4]` int32, query tiles of the others, see `query_tiles`.
        """
        super().begin_sorted(batch, members, tiles)
        self.look_up()

    def decode_launch(self, items: int) -> Launch:
        """Return launch settings for `items` requests of at most `most_queries` tokens.

        Each is split so that all of the GPU's multiprocessors have work.
        """
        data = self.pool.data
        splits = max(1, 2 * multiprocessors(data.device) // (items * data.shape[-2]))
        rows = triton.next_power_of_2(self._max_queries) * self._group
        return Launch(max(TILE_ROWS, triton.next_power_of_2(rows)), 4, 3, splits)

    def prompt_launch(self) -> Launch:
        """Return launch settings for prompts' query tiles: one program for a tile and key/value head."""
        stages, registers = PROMPT_LAUNCH.get(self._scratch.d_pad, (2, None))
        return Launch(self._prefill_config.block_m, 8, stages, maxnreg=registers)

    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """Return the attention `[T, H, D]` of the step's tokens over the paged cache, chunk by chunk of keys.

        q: `[T, H, D]`. k, v: not used; `cache`, the layer's blocks, has them already.
        """
        batch, q = self.batch, q.contiguous()
        out = torch.empty_like(q)
        compute = partial(
            chunked_attention,
            q,
            cache,
            batch.block_tables,
            layer,
            chunk=CHUNK,
            block_n=self.block_n,
            out=out,
        )
        if self._max_queries:
            one_each = self._only is None and self._max_queries == 1
            listed = batch.context_lens if self._only is None else self._only
            compute(
                launch=self.decode_launch(len(listed)),
                context_lens=batch.context_lens,
                query_starts=None if one_each else batch.query_starts,
                requests=self._only,
                max_queries=self._max_queries,
                scratch=self._scratch,
            )
        if self._tiles is not None:
            compute(launch=self.prompt_launch(), tiles=self._tiles)
        return out

"""Attention with kernels of its own for the only request of a step, with one token or a few."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forward.attention import LayerSpec
from paged_cache import BlockPool, PagedBatch
from phases.appendix.latency.lone import LoneParts, attend_lone
from phases.appendix.latency.lone_few import MOST_ROWS, FewParts, attend_few, fits
from phases.appendix.latency.tables import LONE, LoneKey, lone_few_config
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.rope import HeadNorms


class LatencyAttention(TritonPagedAttention):
    """`TritonPagedAttention`, and what `LatencyBlock` calls in its place for a lone request."""

    def __init__(self, pool: BlockPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        d_pad = self._workspace.d_pad
        self._lone_key = LoneKey(pool.data.shape[-2], d_pad, pool.data.element_size())
        self._few_config = lone_few_config(self._lone_key)
        rows = self._lone_key.kv_heads * self._few_config.splits * MOST_ROWS
        self._few_workspace = Workspace(rows, d_pad, pool.data.device)
        self._requests = 0

    @property
    def alone(self) -> bool:
        """True if the step is one request's, whose tokens then come first, and the cache has no scales."""
        return self.stores_early and not self.pool.layers[0].scaled and self._requests == 1

    def takes_few(self, layer: LayerSpec, tokens: int) -> bool:
        """Return True if `attend_few` may be called for this step of so many tokens."""
        return self.alone and fits(tokens, layer)

    def plan(self) -> None:
        """Also: look up, once a step and not in every layer, how a lone token's attention runs."""
        super().plan()
        self._requests = len(self.batch.context_lens)
        self._lone_config = LONE.lookup(self._lone_key, self.pool.data.device)

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """See `TritonPagedAttention.begin_sorted`; the last of the requests that are listed is padding."""
        super().begin_sorted(batch, members, tiles)
        self._requests = len(batch.context_lens) - (members is not None)

    def attend_fused(
        self,
        layer: LayerSpec,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        *,
        few: bool,
        meet: bool,
    ) -> LoneParts | FewParts:
        """From the projection's output to attention's, head norms, RoPE and KV store included.

        few: whether the request has more than one token. meet: see `attend_lone`.
        """
        batch, cache = self.batch, self.pool.layers[layer.index]
        given = qkv, cos_sin, norms, layer, cache, batch.block_tables, batch.context_lens
        if few:
            room, config = self._few_workspace, self._few_config
            where = batch.query_starts, batch.slots
            return attend_few(*given, *where, workspace=room, config=config, meet=meet)
        return attend_lone(
            *given, batch.slots, workspace=self._workspace, config=self._lone_config, meet=meet
        )

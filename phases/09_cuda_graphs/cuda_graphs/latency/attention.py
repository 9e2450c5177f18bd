"""Attention with a kernel of its own for the only token of the only request."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cuda_graphs.latency.lone import Parts, attend_lone
from cuda_graphs.latency.tables import LONE, LoneKey
from forward.attention import LayerSpec
from paged_cache import BlockPool
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.kernels.rope import HeadNorms


class LatencyAttention(TritonPagedAttention):
    """`TritonPagedAttention`, and what `LatencyBlock` calls in its place for a lone token."""

    def __init__(self, pool: BlockPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        d_pad = self._workspace.d_pad
        self._lone_key = LoneKey(pool.data.shape[-2], d_pad, pool.data.element_size())

    @property
    def alone(self) -> bool:
        """Whether the step is one request's: with one token, `attend_lone` then knows whose it is.

        It knows no scales.
        """
        return self.stores_early and not self.pool.layers[0].scaled and len(self.batch.context_lens) == 1

    def plan(self) -> None:
        """Also: look up, once a step and not in every layer, how a lone token's attention runs."""
        super().plan()
        self._lone_config = LONE.lookup(self._lone_key, self.pool.data.device)

    def attend_lone(
        self,
        layer: LayerSpec,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        *,
        meet: bool,
    ) -> Parts:
        """From the projection's output to attention's, head norms, RoPE and KV store included."""
        batch = self.batch
        return attend_lone(
            qkv,
            cos_sin,
            norms,
            layer,
            self.pool.layers[layer.index],
            batch.block_tables,
            batch.context_lens,
            batch.slots,
            workspace=self._workspace,
            config=self._lone_config,
            meet=meet,
        )

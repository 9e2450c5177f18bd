"""Phase 06's kernels for groups of layers, inside graphs and outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from continuous.batch import Batch
from forward.attention import LayerSpec
from hybrid_cache.attention import GroupedTorch
from hybrid_cache.delta_kernels import DeltaWeights, Scan, mix, scan
from hybrid_cache.mixer import DeltaInputs, Mixer
from hybrid_cache.pool import HybridPool
from hybrid_cache.qwen3_5 import GatedDeltaNet
from paged_cache.attention import PagedBatch
from paged_cache.pool import LayerBlocks
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.linear import join


class GroupedTriton(TritonPagedAttention, Mixer):
    """`TritonPagedAttention` for groups: planned once a step; each group has its tables and slots.

    Its kernels begin at the first block in a layer's window, so they never read what was given back.

    start: starts a step, as `HybridPool.begin` does.
    decodes: True if every request of the step computes one token.
    """

    pool: HybridPool

    def __init__(self, pool: HybridPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        self._torch = GroupedTorch(pool)
        self.start: Callable[[PagedBatch], list[PagedBatch]] = pool.begin

    def begin(self, batch: Batch) -> None:
        """See `PagedAttention.begin`."""
        super().begin(batch)
        self.batches = self.start(self.batch)
        self.decodes = bool((self.batch.host.query_lens == 1).all())

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """See `TritonPagedAttention.begin_sorted`."""
        super().begin_sorted(batch, members, tiles)
        self.batches = self.start(batch)
        self.decodes = False

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """See `PagedAttention.place`; from here on the step is that of the layer's group."""
        self.batch = self.batches[self.pool.group_of[layer.index]]
        if self._needs_torch:
            self._torch.place(layer)
        return self.pool.layers[layer.index], self.batch.slots

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """See `Mixer.mix`; layers over kernels do not call it."""
        assert self.pool.states is not None
        return self.pool.states.mix(inputs)


class FusedDelta(nn.Module):
    """`GatedDeltaNet` with one projection of its input, and kernels between that and the last one.

    scan: computes prompts.
    """

    def __init__(self, old: GatedDeltaNet) -> None:
        super().__init__()
        conv, norm = old.conv1d.weight.squeeze(1), NormWeights(old.norm.weight, old.norm.eps)
        self.weights = DeltaWeights(old.layer, old.delta, conv, old.A_log, old.dt_bias, norm)
        self.in_proj = join(old.in_proj_qkv, old.in_proj_z, old.in_proj_b, old.in_proj_a)
        self.out_proj = join(old.out_proj)
        self.scan: Scan = scan

    def forward(
        self,
        x: Tensor,
        mixer: Mixer,
        *,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `GatedDeltaNet.forward`, and `FusedLinear.forward` for a norm before and a sum behind it."""
        assert isinstance(mixer, GroupedTriton) and mixer.pool.states is not None
        longer = None if mixer.decodes else self.scan
        mixed = mix(mixer.pool.states, self.weights, self.in_proj(x, norm=norm), longer)
        return self.out_proj(mixed, residual=residual)

"""The way of a linear layer for one token, and of the projection behind attention."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forward.attention import LayerSpec
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.heads import project_heads
from phases.appendix.latency.lone import LoneParts
from phases.appendix.latency.lone_few import FewParts
from phases.appendix.latency.tables import heads_config
from triton_paged_attention.linear import FusedLinear


class LatencyWay:
    """One token in one kernel, norm, gate and residual included.

    run_ahead: see `gemv`.
    out_dtype: of the result; by default that of the input.
    """

    def __init__(
        self, linear: nn.Linear, *, run_ahead: bool = True, out_dtype: torch.dtype | None = None
    ) -> None:
        self.linear, self.run_ahead, self.out_dtype = linear, run_ahead, out_dtype

    def takes(self, tokens: int, gate: str | None) -> bool:
        """See `Way.takes`; the kernel has no gate for biased outputs."""
        return tokens == 1 and (gate is None or self.linear.bias is None)

    def __call__(self, x: Tensor, **around: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        how = {**around, "bias": self.linear.bias, "run_ahead": self.run_ahead, "out_dtype": self.out_dtype}
        return gemv(x, self.linear.weight, **how)


def add_way(fused: FusedLinear, **options: Any) -> LatencyWay | None:
    """Give a layer of plain weights its way; one of another format has none here."""
    if not isinstance(fused.linear, nn.Linear):
        return None
    way = LatencyWay(fused.linear, **options)
    fused.ways.insert(0, way)
    return way


class CombinesHeads(Protocol):
    """A projection behind attention that combines a lone token's splits on its way."""

    def takes(self) -> bool:
        """Return whether it does; if not, attention has to."""
        ...

    def combine(self, parts: LoneParts, residual: Tensor) -> Tensor:
        """Return `residual` plus the product with attention's output, which is in `parts`: `[1, hidden]`."""
        ...


class CombinesFewHeads(Protocol):
    """`CombinesHeads` for two to eight tokens; no kernel of this entry is one."""

    def takes(self, layer: LayerSpec) -> bool:
        """See `CombinesHeads.takes`."""
        ...

    def combine(self, parts: FewParts, residual: Tensor) -> Tensor:
        """See `CombinesHeads.combine`: `[T, hidden]`."""
        ...


class Heads:
    """`CombinesHeads` with plain weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def takes(self) -> bool:
        """See `CombinesHeads.takes`."""
        return heads_config(*self.linear.weight.shape) is not None

    def combine(self, parts: LoneParts, residual: Tensor) -> Tensor:
        """See `CombinesHeads.combine`."""
        weight = self.linear.weight
        config = heads_config(*weight.shape)
        assert config is not None
        return project_heads(residual, weight, self.linear.bias, parts, shape=config)

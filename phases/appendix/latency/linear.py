"""The way of a linear layer for one token, and of the projection behind attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.heads import project_heads
from phases.appendix.latency.lone import LoneParts
from phases.appendix.latency.tables import HeadsConfig, heads_config
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


CombinesHeads = Callable[[Any, Tensor], Tensor]
"""From the splits of a request's tokens, `LoneParts` or `FewParts`, and a residual `[T, hidden]` to its sum
with the projection behind attention."""


def heads_of(linear: nn.Module) -> CombinesHeads | None:
    """Return what combines splits in a projection of plain weights; None: attention had better do it."""
    if not isinstance(linear, nn.Linear):
        return None
    config = heads_config(*linear.weight.shape)
    return None if config is None else partial(_combine, linear, config)


def _combine(linear: nn.Linear, config: HeadsConfig, parts: LoneParts, residual: Tensor) -> Tensor:
    return project_heads(residual, linear.weight, linear.bias, parts, shape=config)

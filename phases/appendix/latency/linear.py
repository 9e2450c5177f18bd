"""Ways of a linear layer for one token, and for a few, and of the projection behind attention."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forward.attention import LayerSpec
from phases.appendix.latency.few import FEW_TOKENS, few
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.heads import project_few_heads, project_heads
from phases.appendix.latency.lone import LoneParts
from phases.appendix.latency.lone_few import FewParts
from phases.appendix.latency.tables import few_heads_config, heads_config
from triton_paged_attention.linear import FusedLinear


class LatencyWay:
    """One token or a few in one kernel, norm, gate and residual included.

    few: whether two to eight tokens have such a kernel.
    run_ahead: see `gemv`.
    out_dtype: of the result for one token; by default that of the input.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        few: bool = False,
        run_ahead: bool = True,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.linear, self.few, self.run_ahead, self.out_dtype = linear, few, run_ahead, out_dtype

    def takes(self, tokens: int, gate: str | None) -> bool:
        """See `Way.takes`; the kernels have no gate for biased outputs."""
        return (tokens == 1 or (self.few and tokens <= FEW_TOKENS)) and (
            gate is None or self.linear.bias is None
        )

    def __call__(self, x: Tensor, **around: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        linear = self.linear
        if x.numel() == linear.weight.shape[1]:
            around["out_dtype"] = self.out_dtype
            return gemv(x, linear.weight, bias=linear.bias, run_ahead=self.run_ahead, **around)
        return few(x, linear.weight, bias=linear.bias, run_ahead=self.run_ahead, **around)


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
    """`CombinesHeads` for a few tokens."""

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


class FewHeads:
    """`CombinesFewHeads` with plain weights."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def takes(self, layer: LayerSpec) -> bool:
        """See `CombinesFewHeads.takes`."""
        return few_heads_config(*self.linear.weight.shape) is not None and layer.head_dim % 8 == 0

    def combine(self, parts: FewParts, residual: Tensor) -> Tensor:
        """See `CombinesFewHeads.combine`."""
        weight = self.linear.weight
        config = few_heads_config(*weight.shape)
        assert config is not None
        return project_few_heads(residual, weight, self.linear.bias, parts, shape=config)

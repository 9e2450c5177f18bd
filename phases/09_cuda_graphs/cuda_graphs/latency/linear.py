"""Linear layers that take another way for one token, and for a few, than for many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from cuda_graphs.latency.few import FEW_TOKENS, few
from cuda_graphs.latency.gemv import gemv
from cuda_graphs.latency.heads import project_few_heads, project_heads
from cuda_graphs.latency.lone import Parts
from cuda_graphs.latency.lone_few import FewParts
from cuda_graphs.latency.tables import HeadsConfig, few_heads_config, heads_config
from forward.attention import LayerSpec
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.linear import FusedLinear


class LatencyLinear(FusedLinear):
    """A `FusedLinear` that is one kernel, norm, gate and residual included, where it has one token or a few.

    few: whether two to eight tokens have such a kernel.
    run_ahead: see `gemv`.
    out_dtype: of the result for one token; by default that of the input.
    """

    few = False
    run_ahead = True
    out_dtype: torch.dtype | None = None

    @classmethod
    def like(cls, linear: FusedLinear) -> FusedLinear:
        """The same layer, its weights shared. One of another format stays as it is: it knows its own ways."""
        return cls(linear.weight, linear.bias) if type(linear) is FusedLinear else linear

    def forward(
        self,
        x: Tensor,
        *,
        norm: NormWeights | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `FusedLinear.forward`."""
        tokens = x.numel() // self.weight.shape[1]
        if self.bias is None or gate is None:  # the kernels have no gate for biased outputs
            around: dict[str, Any] = {"norm": norm, "bias": self.bias, "residual": residual, "gate": gate}
            around["run_ahead"] = self.run_ahead
            if tokens == 1:
                return self.project_one(x, **around)
            if self.few and tokens <= FEW_TOKENS:
                return self.project_few(x, **around)
        return super().forward(x, norm=norm, gate=gate, residual=residual)

    def project_one(self, x: Tensor, **around: Any) -> Tensor:
        """One token; see `gemv`."""
        return gemv(x, self.weight, out_dtype=self.out_dtype, **around)

    def project_few(self, x: Tensor, **around: Any) -> Tensor:
        """Two to eight tokens; see `few`."""
        return few(x, self.weight, **around)

    def write(self, x: Tensor, out: Tensor) -> None:
        """See `FusedLinear.write`."""
        if len(x) <= FEW_TOKENS:
            out.copy_(self(x))
        else:
            super().write(x, out)


class CombinesHeads(ABC):
    """A projection behind attention that can combine a lone token's splits on its way."""

    @property
    @abstractmethod
    def heads_config(self) -> HeadsConfig | None:
        """How it does; None: it does not, and attention has to."""

    @abstractmethod
    def combine(self, parts: Parts, residual: Tensor) -> Tensor:
        """`residual` plus the product with attention's output, which is in `parts`: `[1, hidden]`."""


class OutputLinear(LatencyLinear, CombinesHeads):
    """The projection behind attention."""

    @property
    def heads_config(self) -> HeadsConfig | None:
        """See `CombinesHeads.heads_config`."""
        return heads_config(*self.weight.shape)

    def combine(self, parts: Parts, residual: Tensor) -> Tensor:
        """See `CombinesHeads.combine`."""
        config = self.heads_config
        assert config is not None
        return project_heads(residual, self.weight, self.bias, parts, shape=config)

    def takes_few(self, layer: LayerSpec) -> bool:
        """Whether it combines the splits of a few tokens as well."""
        return self.few and few_heads_config(*self.weight.shape) is not None and layer.head_dim % 8 == 0

    def combine_few(self, parts: FewParts, residual: Tensor) -> Tensor:
        """`combine` for a few tokens: `[T, hidden]`."""
        config = few_heads_config(*self.weight.shape)
        assert config is not None
        return project_few_heads(residual, self.weight, self.bias, parts, shape=config)

"""Phase 06's layers over ranks: a sum goes along with the residual addition and the norm behind it."""

from __future__ import annotations

from torch import Tensor, nn

from cuda_graphs.latency.block import LatencyBlock
from cuda_graphs.latency.linear import LatencyLinear
from forward.model import Model
from parallel.layers import RowLinear
from parallel.ranks import Ranks
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm
from triton_paged_attention.linear import FusedLinear, join


class RowFused(FusedLinear):
    """A `RowLinear` of phase 06's kind.

    deferred: the norm behind it adds up what it returns. With a residual it always adds up by itself.
    """

    deferred = False

    def __init__(self, inner: FusedLinear, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.inner, self.ranks = inner, ranks

    @classmethod
    def around(cls, row: RowLinear) -> RowFused:
        """The same layer."""
        return cls(join(row.linear), row.ranks)

    def product(self, x: Tensor) -> Tensor:
        """See `FusedLinear.product`."""
        return self.ranks.all_reduce(self.inner.product(x))

    def forward(
        self,
        x: Tensor,
        *,
        norm: NormWeights | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `FusedLinear.forward`; a residual is added once, to the sum."""
        part = self.inner(x, norm=norm, gate=gate)
        if residual is not None:
            return self.ranks.reduce_add(part, residual)
        return part if self.deferred else self.ranks.all_reduce(part)


class ReducingNorm(FusedRMSNorm):
    """A `FusedRMSNorm` behind a layer that leaves its sum over ranks to it."""

    def __init__(self, norm: FusedRMSNorm, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.one_plus = norm.weight, norm.eps, norm.one_plus
        self.ranks = ranks

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """See `FusedRMSNorm.add`; `delta` is this rank's part of a sum."""
        return self.ranks.reduce_add_norm(delta, x, self.weights)


def install(model: Model, ranks: Ranks) -> Model:
    """The last surgery, after those of phases 06, 09 and 10; returns the model, which is the same object."""
    for block in model.modules():
        if isinstance(block, LatencyBlock):
            _latency(block)
    blocks = list(getattr(model, "layers", ()))
    norm = getattr(model, "norm", None)
    if not (blocks and isinstance(norm, FusedRMSNorm) and all(map(defers, blocks))):
        return model
    for block, owner, name in zip(blocks, [*blocks[1:], model], behind(len(blocks)), strict=True):
        block.self_attn.o_proj.deferred = True
        block.post_attention_layernorm = ReducingNorm(block.post_attention_layernorm, ranks)
        if not block._forward_hooks:  # or somebody wants to see what it puts out, which is then no part
            block.mlp.down_proj.deferred = True
            setattr(owner, name, ReducingNorm(getattr(owner, name), ranks))
    return model


def behind(layers: int) -> list[str]:
    """The norm behind each layer: the next one's first, and behind the last the model's."""
    return ["input_layernorm"] * (layers - 1) + ["norm"]


def _latency(block: LatencyBlock) -> None:
    """Phase 09 does not look into layers that it does not know."""
    for row in (block.self_attn.o_proj, block.mlp.down_proj):
        if isinstance(row, RowFused):
            row.inner = LatencyLinear.like(row.inner)
            if isinstance(row.inner, LatencyLinear):
                row.inner.few = block.few


def defers(block: nn.Module) -> bool:
    """Whether both sums of a block are followed by a norm that can do them."""
    return (
        isinstance(block, FusedBlock)
        and isinstance(block.self_attn, FusedAttention)
        and isinstance(block.mlp, FusedMLP)
        and isinstance(block.self_attn.o_proj, RowFused)
        and isinstance(block.mlp.down_proj, RowFused)
        and isinstance(block.input_layernorm, FusedRMSNorm)
        and isinstance(block.post_attention_layernorm, FusedRMSNorm)
    )

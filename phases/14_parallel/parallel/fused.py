"""Phase 06's layers over ranks: a sum goes along with the residual addition and the norm behind it."""

from __future__ import annotations

from torch import Tensor, nn

from forward.model import Model
from parallel.layers import RankSum
from parallel.ranks import Ranks
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm


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
    """Leave sums to the norms behind them, and return the model, which is the same object."""
    blocks = list(getattr(model, "layers", ()))
    norm = getattr(model, "norm", None)
    if not (blocks and isinstance(norm, FusedRMSNorm) and all(map(defers, blocks))):
        return model
    for block, owner, name in zip(blocks, [*blocks[1:], model], behind(len(blocks)), strict=True):
        block.self_attn.o_proj.total.deferred = True
        block.post_attention_layernorm = ReducingNorm(block.post_attention_layernorm, ranks)
        if not block._forward_hooks:  # or somebody wants to see what it puts out, which is then no part
            block.mlp.down_proj.total.deferred = True
            setattr(owner, name, ReducingNorm(getattr(owner, name), ranks))
    return model


def behind(layers: int) -> list[str]:
    """The norm behind each layer: the next one's first, and behind the last the model's."""
    return ["input_layernorm"] * (layers - 1) + ["norm"]


def defers(block: nn.Module) -> bool:
    """Return True if both sums of a block are followed by a norm that can do them."""
    return (
        isinstance(block, FusedBlock)
        and isinstance(block.self_attn, FusedAttention)
        and isinstance(block.mlp, FusedMLP)
        and isinstance(block.self_attn.o_proj.total, RankSum)
        and isinstance(block.mlp.down_proj.total, RankSum)
        and isinstance(block.input_layernorm, FusedRMSNorm)
        and isinstance(block.post_attention_layernorm, FusedRMSNorm)
    )

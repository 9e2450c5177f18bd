"""A block's way for one token, and for a few: fewer kernels, each of which begins before the last ends."""

from __future__ import annotations

from torch import Tensor

from forward.attention import Attention
from phases.appendix.latency.attention import LatencyAttention
from phases.appendix.latency.linear import CombinesHeads
from phases.appendix.latency.lone_few import FEW_TOKENS
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, Stream


class LatencyBlock:
    """A direct way: norms and residual additions go along with the projections.

    heads, few_heads: combine attention's splits in the output projection; None: attention does it.
    few: whether it takes two to eight tokens, too. It pays where the layers have ways for these.
    """

    few = False
    few_heads: CombinesHeads | None = None

    def __init__(self, heads: CombinesHeads | None = None) -> None:
        self.heads = heads

    def takes(self, x: Tensor | Stream, attention: Attention) -> bool:
        """See `BlockWay.takes`."""
        if not (isinstance(x, Tensor) and isinstance(attention, LatencyAttention)):
            return False
        if len(x) == 1 and attention.alone:
            return True
        return self.few and len(x) <= FEW_TOKENS and attention.stores_early

    def __call__(
        self, block: FusedBlock, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """See `LlamaBlock.forward`."""
        attend, mlp, norm = block.self_attn, block.mlp, block.post_attention_layernorm
        assert isinstance(x, Tensor) and isinstance(attention, LatencyAttention)
        assert isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP)
        lone = len(x) == 1 and attention.alone
        heads = self.heads if lone else self.few_heads
        qkv = attend.qkv_proj(x, norm=block.input_layernorm.weights)
        if not lone and not attention.takes_few(attend.spec, len(x)):  # of several requests
            x = attend.o_proj(attend.attend(qkv, cos_sin, attention), residual=x)
        else:
            meet = heads is None
            parts = attention.attend_fused(attend.spec, qkv, cos_sin, attend.norms, few=not lone, meet=meet)
            x = attend.o_proj(parts.out, residual=x) if heads is None else heads(parts, x)
        # Two kernels that read a matrix each, and nothing in between.
        return mlp.down_proj(mlp.gate_up_proj(x, norm=norm.weights, gate=mlp.kind), residual=x)

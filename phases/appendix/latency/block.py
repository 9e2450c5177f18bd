"""A block's way for one token, and for a few: fewer kernels, each of which begins before the last ends."""

from __future__ import annotations

from torch import Tensor

from forward.attention import Attention
from phases.appendix.latency.attention import LatencyAttention
from phases.appendix.latency.linear import CombinesFewHeads, CombinesHeads
from phases.appendix.latency.lone_few import FEW_TOKENS
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm, Stream


class LatencyBlock:
    """A direct way: norms and residual additions go along with the projections.

    heads, few_heads: combine attention's splits in the output projection; None: attention does it.
    few: whether it takes two to eight tokens, too. It pays where the layers have ways for these.
    """

    few = False
    few_heads: CombinesFewHeads | None = None

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
        way = self._attend_lone if len(x) == 1 and attention.alone else self._attend_few
        x = way(attend, block.input_layernorm, x, cos_sin, attention)
        # Two kernels that read a matrix each, and nothing in between.
        return mlp.down_proj(mlp.gate_up_proj(x, norm=norm.weights, gate=mlp.kind), residual=x)

    def _attend_lone(
        self,
        attend: FusedAttention,
        norm: FusedRMSNorm,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: LatencyAttention,
    ) -> Tensor:
        """One token, `[1, hidden]` -> `[1, hidden]`: three kernels, two of which read a matrix each."""
        qkv = attend.qkv_proj(x, norm=norm.weights)
        if self.heads is not None:
            parts = attention.attend_lone(attend.spec, qkv, cos_sin, attend.norms, meet=False)
            return self.heads(parts, x)
        parts = attention.attend_lone(attend.spec, qkv, cos_sin, attend.norms, meet=True)
        return attend.o_proj(parts.out, residual=x)

    def _attend_few(
        self,
        attend: FusedAttention,
        norm: FusedRMSNorm,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: LatencyAttention,
    ) -> Tensor:
        """Two to eight tokens: the same, with attention in two kernels where they are of several requests."""
        qkv = attend.qkv_proj(x, norm=norm.weights)
        if not attention.takes_few(attend.spec, len(x)):
            return attend.o_proj(attend.attend(qkv, cos_sin, attention), residual=x)
        if self.few_heads is not None:
            few = attention.attend_few(attend.spec, qkv, cos_sin, attend.norms, meet=False)
            return self.few_heads(few, x)
        few = attention.attend_few(attend.spec, qkv, cos_sin, attend.norms, meet=True)
        return attend.o_proj(few.out, residual=x)

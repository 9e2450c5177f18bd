"""A layer for steps of one token, and of a few: fewer kernels, each of which begins before the last ends."""

from __future__ import annotations

from torch import Tensor

from cuda_graphs.latency.attention import LatencyAttention
from cuda_graphs.latency.few import FEW_TOKENS
from cuda_graphs.latency.linear import CombinesHeads, LatencyLinear, OutputLinear
from cuda_graphs.latency.lone import starts_early
from forward.attention import Attention
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, Stream


class LatencyBlock(FusedBlock):
    """A `FusedBlock` with a direct way: norms and residual additions go along with the projections.

    Args:
        block: the one it replaces, made of phase 06's layers.
        few: whether the direct way is worth it for two to eight tokens, too; one token always takes it.
    """

    self_attn: FusedAttention
    mlp: FusedMLP

    def __init__(self, block: FusedBlock, *, few: bool) -> None:
        super().__init__(block)
        self.few = few
        attend, mlp = self.self_attn, self.mlp
        attend.qkv_proj = LatencyLinear.like(attend.qkv_proj)
        attend.o_proj = OutputLinear.like(attend.o_proj)
        mlp.gate_up_proj, mlp.down_proj = map(LatencyLinear.like, (mlp.gate_up_proj, mlp.down_proj))
        for linear in (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj):
            if isinstance(linear, LatencyLinear):
                linear.few = few
                linear.run_ahead = linear is not attend.qkv_proj or starts_early(attend.spec)

    def forward(
        self, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor | Stream:
        """See `LlamaBlock.forward`."""
        if isinstance(x, Tensor) and isinstance(attention, LatencyAttention):
            if len(x) == 1 and attention.alone:
                return self._mlp(self._attend_lone(x, cos_sin, attention))
            if self.few and len(x) <= FEW_TOKENS and attention.stores_early:
                return self._mlp(self._attend_few(x, cos_sin, attention))
        return super().forward(x, cos_sin, attention)

    def _attend_lone(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: LatencyAttention) -> Tensor:
        """One token, `[1, hidden]` -> `[1, hidden]`: three kernels, two of which read a matrix each."""
        attend, norm = self.self_attn, self.input_layernorm.weights
        out = attend.o_proj
        qkv = attend.qkv_proj(x, norm=norm)
        if isinstance(out, CombinesHeads) and out.heads_config is not None:
            return out.combine(attention.attend_lone(attend.spec, qkv, cos_sin, attend.norms, meet=False), x)
        return out(attention.attend_lone(attend.spec, qkv, cos_sin, attend.norms, meet=True).out, residual=x)

    def _attend_few(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: LatencyAttention) -> Tensor:
        """Two to eight tokens: the same, with attention in two kernels where they are of several requests."""
        attend = self.self_attn
        qkv = attend.qkv_proj(x, norm=self.input_layernorm.weights)
        if not attention.takes_few(attend.spec, len(x)):
            return attend.o_proj(attend.attend(qkv, cos_sin, attention), residual=x)
        out = attend.o_proj
        if isinstance(out, OutputLinear) and out.takes_few(attend.spec):
            parts = attention.attend_few(attend.spec, qkv, cos_sin, attend.norms, meet=False)
            return out.combine_few(parts, x)
        parts = attention.attend_few(attend.spec, qkv, cos_sin, attend.norms, meet=True)
        return attend.o_proj(parts.out, residual=x)

    def _mlp(self, x: Tensor) -> Tensor:
        """Two kernels that read a matrix each, and nothing in between."""
        both = self.mlp.gate_up_proj(x, norm=self.post_attention_layernorm.weights, gate=self.mlp.kind)
        return self.mlp.down_proj(both, residual=x)

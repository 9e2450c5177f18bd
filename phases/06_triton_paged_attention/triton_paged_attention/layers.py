"""Phase 01's layers, fused: built from the ones they replace, with whose weights they work."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP, RMSNorm
from forward.models.gemma3 import Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from forward.rope import apply_rope
from triton_paged_attention.activation import gated
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.backends import Backends
from triton_paged_attention.few import MOST_TOKENS, few
from triton_paged_attention.gemv import gemv
from triton_paged_attention.norms import add_rms_norm, rms_norm
from triton_paged_attention.rope import norm_rope
from triton_paged_attention.single import HeadNorms
from triton_paged_attention.tuning import few_pays


class Stream(NamedTuple):
    """The residual stream between two blocks, its last addition still to be done by whoever normalizes it."""

    total: Tensor
    delta: Tensor


class FusedRMSNorm(nn.Module):
    """`RMSNorm` or `Gemma3RMSNorm` in one kernel, with the pending addition of a `Stream` if there is one."""

    def __init__(self, norm: RMSNorm | Gemma3RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.one_plus = isinstance(norm, Gemma3RMSNorm)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """`[..., size]` -> `[..., size]`."""
        if isinstance(x, Stream):
            return self.add(x.total, x.delta)[1]
        return rms_norm(x, self.weight, self.eps, one_plus=self.one_plus)

    @property
    def parts(self) -> tuple[Tensor, float, bool]:
        """Weight, epsilon, and whether the weight is the distance from 1."""
        return self.weight, self.eps, self.one_plus

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, and the sum normalized."""
        return add_rms_norm(x, delta, self.weight, self.eps, one_plus=self.one_plus)


class FusedBlock(nn.Module):
    """A `LlamaBlock` that leaves its last addition to the next norm."""

    input_layernorm: FusedRMSNorm
    self_attn: FusedAttention
    post_attention_layernorm: FusedRMSNorm
    mlp: FusedMLP

    def __init__(self, block: LlamaBlock) -> None:
        super().__init__()
        for name, part in block.named_children():
            setattr(self, name, part)
        fused = isinstance(self.self_attn, FusedAttention) and isinstance(self.mlp, FusedMLP)
        self.single = fused and self.self_attn.single and self.mlp.single
        weight = self.input_layernorm.weight
        self.few = self.single and few_pays(len(weight), weight.itemsize, weight.device)

    def forward(
        self, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor | Stream:
        """See `LlamaBlock.forward`."""
        if self.single and isinstance(x, Tensor) and isinstance(attention, TritonPagedAttention):
            if len(x) == 1 and attention.alone:
                return self._single(x, cos_sin, attention)
            if self.few and len(x) <= MOST_TOKENS and attention.stores_early:
                return self._few(x, cos_sin, attention)
        if isinstance(x, Stream):
            total, normed = self.input_layernorm.add(x.total, x.delta)
        else:
            total, normed = x, self.input_layernorm(x)
        total, normed = self.post_attention_layernorm.add(total, self.self_attn(normed, cos_sin, attention))
        return Stream(total, self.mlp(normed))

    def _single(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: TritonPagedAttention) -> Tensor:
        """One token: five kernels, four of which read a matrix each, and nothing in between."""
        attend, mlp = self.self_attn, self.mlp
        x = attend.single_token(x, self.input_layernorm.parts, cos_sin, attention)
        both = gemv(x, mlp.gate_up_proj.weight, norm=self.post_attention_layernorm.parts, gate=mlp.kind)
        return gemv(both, mlp.down_proj.weight, bias=mlp.down_proj.bias, residual=x)

    def _few(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: TritonPagedAttention) -> Tensor:
        """Two to eight tokens: the same with attention in two kernels, which may be of several requests."""
        attend, mlp = self.self_attn, self.mlp
        x = attend.few_tokens(x, self.input_layernorm.parts, cos_sin, attention)
        both = few(x, mlp.gate_up_proj.weight, norm=self.post_attention_layernorm.parts, gate=mlp.kind)
        return few(both, mlp.down_proj.weight, bias=mlp.down_proj.bias, residual=x)


class FusedLinear(nn.Module):
    """Several linear layers of one input as one matrix product, their outputs end to end."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(tuple(part.weight for part in parts)), requires_grad=False)
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(tuple(biases)), requires_grad=False) if biases else None
        assert len(biases) in (0, len(parts))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., sum of outs]`."""
        return nn.functional.linear(x, self.weight, self.bias)


class HeadForOne(nn.Linear):
    """The output head, which is a matrix-vector product whenever one row is sampled."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old.in_features, old.out_features, bias=False, device="meta")
        self.weight = old.weight

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., V]`; one row in float32, which no one has to convert afterwards."""
        if x.numel() == self.in_features:
            return gemv(x, self.weight, out_dtype=torch.float32)
        return super().forward(x)


class SideBySide(nn.Module):
    """The same function with the layers apart, for comparison."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., sum of outs]`."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


class FusedAttention(nn.Module):
    """`LlamaAttention` and its descendants with one projection, and one kernel from it to the seam."""

    def __init__(self, old: LlamaAttention, backends: Backends) -> None:
        super().__init__()
        self.spec, self.o_proj = old.spec, old.o_proj
        join: Any = FusedLinear if backends.projections == "triton" else SideBySide
        self.qkv_proj: Any = join(old.q_proj, old.k_proj, old.v_proj)
        self.fused = backends.rope == "triton"
        self.single = self.fused and backends.projections == "triton"
        self.q_norm, self.k_norm = (getattr(old, name, None) for name in ("q_norm", "k_norm"))
        self.one_plus = isinstance(self.q_norm, Gemma3RMSNorm)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """See `LlamaAttention.forward`."""
        qkv = self.qkv_proj(x)
        out = (self._fused if self.fused else self._apart)(qkv, cos_sin, attention)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))

    def _fused(self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """With this phase's attention, keys and values go straight to the pool."""
        if isinstance(attention, TritonPagedAttention) and attention.stores_early:
            q, k_cache, v_cache = self._rotate(qkv, cos_sin, attention)
            return attention.attend(self.spec, q, q, q, k_cache, v_cache)
        rotated = self._rotate(qkv, cos_sin, None)
        return attention(self.spec, *(part.unflatten(0, qkv.shape[:-1]) for part in rotated))

    def single_token(
        self,
        x: Tensor,
        norm: tuple[Tensor, float, bool],
        cos_sin: tuple[Tensor, Tensor],
        attention: TritonPagedAttention,
    ) -> Tensor:
        """One token, `[1, hidden]` -> `[1, hidden]`, with the norm before and the addition after."""
        # What attention reads before its wait must be complete when it starts: no running ahead.
        qkv = gemv(x, self.qkv_proj.weight, norm=norm, bias=self.qkv_proj.bias, run_ahead=False)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.one_plus)
        return attention.single(self.spec, qkv, cos_sin, norms, x, self.o_proj.weight, self.o_proj.bias)

    def few_tokens(
        self,
        x: Tensor,
        norm: tuple[Tensor, float, bool],
        cos_sin: tuple[Tensor, Tensor],
        attention: TritonPagedAttention,
    ) -> Tensor:
        """A few tokens, `[T, hidden]` -> `[T, hidden]`, with the norm before and the addition after."""
        qkv = few(x, self.qkv_proj.weight, norm=norm, bias=self.qkv_proj.bias)
        out = self._fused(qkv, cos_sin, attention)
        return few(out.flatten(1), self.o_proj.weight, bias=self.o_proj.bias, residual=x)

    def _rotate(
        self,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: TritonPagedAttention | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, norm = self.spec, None
        if self.q_norm is not None and self.k_norm is not None:
            norm = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        cache = None
        if attention is not None:
            cache = (*attention.pool.layers[spec.index], attention.batch.slots)
        return norm_rope(
            qkv.flatten(0, -2),
            *(part.reshape(-1, spec.head_dim) for part in cos_sin),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            norm=norm,
            one_plus=self.one_plus,
            cache=cache,
        )

    def _apart(self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """Phase 01's norms and RoPE."""
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = qkv.split([n * spec.head_dim for n in heads], dim=-1)
        q, k, v = (part.unflatten(-1, (n, spec.head_dim)) for part, n in zip(parts, heads, strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return attention(spec, apply_rope(q, cos_sin), apply_rope(k, cos_sin), v)


class FusedMLP(nn.Module):
    """`GatedMLP` with gate and up in one matrix product, and the activation in one kernel."""

    def __init__(self, old: GatedMLP, kind: str, backends: Backends) -> None:
        super().__init__()
        join: Any = FusedLinear if backends.projections == "triton" else SideBySide
        self.gate_up_proj: Any = join(old.gate_proj, old.up_proj)
        self.down_proj = old.down_proj
        self.act, self.kind = old.act, kind
        self.fused = backends.activation == "triton"
        self.single = self.fused and backends.projections == "triton" and old.gate_proj.bias is None

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        both = self.gate_up_proj(x)
        if self.fused:
            return self.down_proj(gated(both, self.kind))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)

"""Fewer and larger products on a CPU: phase 06's joined projections, without its kernels.

A product with few tokens and few bytes is over before its call has paid for itself, so one product for
queries, keys and values, and one for gate and up, are as good as fewer bits.
"""

from __future__ import annotations

from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP
from forward.model import Model
from forward.models.llama import LlamaAttention
from forward.rope import apply_rope
from quant.linear import QuantLinear, end_to_end, joinable


class JoinedAttention(nn.Module):
    """`LlamaAttention` and its descendants with one product for queries, keys and values."""

    def __init__(self, old: LlamaAttention) -> None:
        super().__init__()
        self.spec = old.spec
        self.qkv_proj, self.o_proj = end_to_end([old.q_proj, old.k_proj, old.v_proj]), old.o_proj
        self.q_norm, self.k_norm = (getattr(old, name, None) for name in ("q_norm", "k_norm"))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """See `LlamaAttention.forward`."""
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = self.qkv_proj(x).split([n * spec.head_dim for n in heads], dim=-1)
        q, k, v = (part.unflatten(-1, (n, spec.head_dim)) for part, n in zip(parts, heads, strict=True))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attention(spec, apply_rope(q, cos_sin), apply_rope(k, cos_sin), v)
        return self.o_proj(out.flatten(-2))


class JoinedMLP(nn.Module):
    """`GatedMLP` with one product for gate and up."""

    def __init__(self, old: GatedMLP) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = end_to_end([old.gate_proj, old.up_proj]), old.down_proj
        self.act = old.act

    def forward(self, x: Tensor) -> Tensor:
        """See `GatedMLP.forward`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


def settle(model: Model) -> None:
    """Join what can be joined, layer by layer, and bring every quantized layer into its fastest form."""
    parts = (LlamaAttention, GatedMLP)
    for name in [name for name, part in model.named_modules() if isinstance(part, parts)]:
        owner, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        if isinstance(old, LlamaAttention) and joinable([old.q_proj, old.k_proj, old.v_proj]):
            setattr(model.get_submodule(owner), last, JoinedAttention(old))
        elif type(old) is GatedMLP and joinable([old.gate_proj, old.up_proj]):
            setattr(model.get_submodule(owner), last, JoinedMLP(old))
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.settle()

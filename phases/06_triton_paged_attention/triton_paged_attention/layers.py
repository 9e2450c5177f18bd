"""Phase 01's layers, fused: built from the ones they replace, with whose weights they work.

`optimize` puts them into a loaded model. The model's own code stays as phase 01 wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from forward.rope import Rope, apply_rope
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.kernels.norms import NormWeights, add_rms_norm, rms_norm
from triton_paged_attention.kernels.rope import FusedRope, HeadNorms, ProductScales, norm_rope
from triton_paged_attention.linear import (
    KINDS,
    Concatenable,
    FusedLinear,
    FusedProjection,
    join,
)


class Stream(NamedTuple):
    """The residual stream between two blocks, its last addition still to be done by the norm behind it."""

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
        return self.both(x)[1]

    @property
    def weights(self) -> NormWeights:
        """The norm's weights, for a kernel that normalizes on its way."""
        return NormWeights(self.weight, self.eps, self.one_plus)

    def both(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """Return the stream, with what is still to be added, and the stream normalized."""
        if isinstance(x, Stream):
            return add_rms_norm(x.total, x.delta, *self.weights)
        return x, rms_norm(x, *self.weights)


def _projections(
    parts: tuple[nn.Module, ...], out: nn.Module, by_torch: Collection[str]
) -> tuple[FusedLinear, FusedLinear]:
    """The projections into a layer, of one input, as one; and the projection out of it."""
    if "projections" in by_torch:
        return FusedLinear(FusedProjection(*parts)), FusedLinear(FusedProjection(out))
    return join(*parts), join(out)


class FusedAttention(nn.Module):
    """`LlamaAttention` and its descendants with one projection, and one kernel from it to the seam."""

    def __init__(self, old: LlamaAttention, by_torch: Collection[str]) -> None:
        super().__init__()
        self.spec = old.spec
        self.qkv_proj, self.o_proj = _projections(
            (old.q_proj, old.k_proj, old.v_proj), old.o_proj, by_torch
        )
        self.fused = "rope" not in by_torch
        self.q_norm, self.k_norm = (getattr(old, name, None) for name in ("q_norm", "k_norm"))

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """See `LlamaAttention.forward`."""
        attend = self.attend if self.fused else self._apart
        return self.o_proj(attend(self.qkv_proj(x), cos_sin, attention))

    @property
    def norms(self) -> HeadNorms | None:
        """The query and key norms, if the family has them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        one_plus = isinstance(self.q_norm, Gemma3RMSNorm)
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, one_plus)

    def attend(
        self,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        pending: ProductScales | None = None,
    ) -> Tensor:
        """All between the projections: `[..., (H + 2 KH) D]` -> `[..., H D]`.

        With this phase's attention, keys and values go straight to the pool. `pending`: see `norm_rope`.
        """
        spec = self.spec
        cos, sin = (angles.reshape(-1, spec.head_dim) for angles in cos_sin)
        rotate = partial(
            norm_rope, qkv.flatten(0, -2), cos, sin, spec, norms=self.norms, pending=pending
        )
        if isinstance(attention, TritonPagedAttention) and attention.stores_early:
            cache, slots = attention.place(spec)
            q, _, _ = rotate(cache=cache, slots=slots)
            out = attention.attend(spec, q, q, q, cache)
        else:
            out = attention(spec, *(part.unflatten(0, qkv.shape[:-1]) for part in rotate()))
        return out.reshape(*qkv.shape[:-1], -1)

    def _apart(
        self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """`attend` by phase 01's norms and RoPE."""
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = qkv.split([n * spec.head_dim for n in heads], dim=-1)
        q, k, v = (
            part.unflatten(-1, (n, spec.head_dim))
            for part, n in zip(parts, heads, strict=True)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return attention(spec, apply_rope(q, cos_sin), apply_rope(k, cos_sin), v).flatten(-2)


class FusedMLP(nn.Module):
    """`GatedMLP` with gate and up in one matrix product, and the activation in one kernel."""

    def __init__(self, old: GatedMLP, kind: str, by_torch: Collection[str]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = _projections(
            (old.gate_proj, old.up_proj), old.down_proj, by_torch
        )
        self.act, self.kind = old.act, kind
        self.fused = "activation" not in by_torch

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., hidden]`."""
        if self.fused:
            return self.down_proj(self.gate_up_proj(x, gate=self.kind))
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)


class BlockKernel(Protocol):
    """A faster way through a block for some steps."""

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return whether it computes this step."""

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor | Stream:
        """See `LlamaBlock.forward`."""


class FusedBlock(nn.Module):
    """A `LlamaBlock` that leaves its last addition to the next norm.

    ways: asked in this order before the block computes the step itself; none in this phase.
    """

    input_layernorm: FusedRMSNorm
    self_attn: FusedAttention | LlamaAttention
    post_attention_layernorm: FusedRMSNorm
    mlp: FusedMLP | GatedMLP

    def __init__(self, block: LlamaBlock) -> None:
        super().__init__()
        self.kernels: list[BlockKernel] = []
        for name, part in block.named_children():
            setattr(self, name, part)

    def forward(
        self, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor | Stream:
        """See `LlamaBlock.forward`."""
        for kernel in self.kernels:
            if kernel.supports(x, attention):
                return kernel(self, x, cos_sin, attention)
        total, normed = self.input_layernorm.both(x)
        x = Stream(total, self.self_attn(normed, cos_sin, attention))
        total, normed = self.post_attention_layernorm.both(x)
        return Stream(total, self.mlp(normed))


def optimize(model: Model, by_torch: Collection[str] = ()) -> Model:
    """Put this phase's layers in the places of phase 01's, and return the model, which is the same object.

    Projections are joined layer by layer, and the old ones of a layer are let go of before the next is
    joined. A caller that still needs the model as it was gives a `clone`, and so keeps both.

    GPT-2 has LayerNorm, no RoPE and no gate: it keeps its layers, and gains by attention alone.

    by_torch: those of `LAYERS` that stay as in phase 01.
    """
    kind = model.config.activation
    if "rope" not in by_torch or "projections" not in by_torch:
        replace(model, LlamaAttention, lambda old: FusedAttention(old, by_torch))
    if "rope" not in by_torch:
        replace(model, Rope, FusedRope)
    if kind in KINDS and ("activation" not in by_torch or "projections" not in by_torch):
        replace(model, GatedMLP, lambda old: FusedMLP(old, kind, by_torch))
    if "norms" not in by_torch:
        # The kernel of "rope" takes care of the heads' norms.
        skip = None if "rope" in by_torch else FusedAttention
        replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm, skip=skip)
        replace(model, LlamaBlock, FusedBlock)
    if "projections" not in by_torch and isinstance(model.lm_head, (nn.Linear, Concatenable)):
        model.lm_head = join(model.lm_head)
    return model


def replace(
    model: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[Any], nn.Module],
    skip: type[nn.Module] | None = None,
) -> None:
    """Put `make(module)` in the place of every module of a kind, except those whose owner is a `skip`."""
    # Names, not modules: a list of these would keep all the old weights alive until the last is replaced.
    found = [name for name, module in model.named_modules() if isinstance(module, kind)]
    for name in found:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        if skip is None or not isinstance(holder, skip):
            setattr(holder, last, make(getattr(holder, last)))

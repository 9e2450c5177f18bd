"""Phase 01's layers, fused; each is built from the layers that it replaces, and shares their weights.

`optimize` puts them into a loaded model. The model's own code stays as phase 01 wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from forward.rope import Rope
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.kernels.norms import NormWeights, add_rms_norm, rms_norm
from triton_paged_attention.kernels.rope import FusedRope, HeadNorms, ProductScales, norm_rope
from triton_paged_attention.linear import (
    KINDS,
    Concatenable,
    join,
)


class Stream(NamedTuple):
    """The residual stream between two blocks, as a sum that the next norm still has to compute.

    total, delta: `[..., hidden]`; the stream is `total + delta`.
    """

    total: Tensor
    delta: Tensor


class FusedRMSNorm(nn.Module):
    """`RMSNorm` or `Gemma3RMSNorm` in one kernel, which also adds the two parts of a `Stream`."""

    def __init__(self, norm: RMSNorm | Gemma3RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.one_plus = isinstance(norm, Gemma3RMSNorm)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Return `x [..., size]` normalized, in the same shape; of a `Stream`, its sum is normalized."""
        return self.add_and_normalize(x)[1]

    @property
    def weights(self) -> NormWeights:
        """The norm's weights, for a kernel that normalizes its own input."""
        return NormWeights(self.weight, self.eps, self.one_plus)

    def add_and_normalize(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its pending addition done, and the same normalized: `[...,
        size]` each.
        """
        if isinstance(x, Stream):
            return add_rms_norm(x.total, x.delta, *self.weights)
        return x, rms_norm(x, *self.weights)


class FusedAttention(nn.Module):
    """An attention layer (`LlamaAttention`) with one QKV projection, and one kernel from there to
    attention.
    """

    def __init__(self, old: LlamaAttention) -> None:
        super().__init__()
        self.spec = old.spec
        self.qkv_proj = join(old.q_proj, old.k_proj, old.v_proj)
        self.o_proj = join(old.o_proj)
        self.q_norm, self.k_norm = (getattr(old, name, None) for name in ("q_norm", "k_norm"))

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Map `x [..., hidden]` to the attention layer's output `[..., hidden]`; see
        `LlamaAttention.forward`.
        """
        return self.o_proj(self.attend(self.qkv_proj(x), cos_sin, attention))

    @property
    def norms(self) -> HeadNorms | None:
        """Return the norms of query and key heads; None: the model has none."""
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
        """Compute everything between the QKV and the output projection: `qkv [..., (H + 2 KH) D]` ->
        `[..., H D]`.

        cos_sin: RoPE's cosines and sines. attention: the engine's attention; if it is this phase's, keys
            and values go straight to the KV cache. pending: scales by which `qkv` is to be multiplied
            first.
        """
        spec = self.spec
        cos, sin = (angles.reshape(-1, spec.head_dim) for angles in cos_sin)
        rotate = partial(
            norm_rope, qkv.flatten(0, -2), cos, sin, spec, norms=self.norms, pending=pending
        )
        if isinstance(attention, TritonPagedAttention):
            cache, slots = attention.place(spec)
            q, _, _ = rotate(cache=cache, slots=slots)
            out = attention.attend(spec, q, q, q, cache)
        else:
            out = attention(spec, *(part.unflatten(0, qkv.shape[:-1]) for part in rotate()))
        return out.reshape(*qkv.shape[:-1], -1)


class FusedMLP(nn.Module):
    """A `GatedMLP` whose gate and up projections are one matrix product, and whose activation is one
    kernel.
    """

    def __init__(self, old: GatedMLP, kind: str) -> None:
        super().__init__()
        self.gate_up_proj = join(old.gate_proj, old.up_proj)
        self.down_proj = join(old.down_proj)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return `down(act(gate(x)) * up(x))`: `[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(self.gate_up_proj(x, gate=self.kind))


class BlockKernel(Protocol):
    """Interface of a function that computes a whole transformer block faster, for the steps that it
    supports.
    """

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return True if this kernel computes a step with this input `x [T, hidden]` and this attention."""

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor | Stream:
        """Return the block's output for `x [T, hidden]`; arguments as in `LlamaBlock.forward`, after
        the block.
        """


class FusedBlock(nn.Module):
    """A transformer block (`LlamaBlock`) that leaves its last residual addition to the next norm.

    kernels: each step takes the first `BlockKernel` that supports it, the block's own layers if none does;
        empty in this phase.
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
        """Map the hidden states `x` to the block's output, as a `Stream` whose sum the next norm computes.

        Arguments as in `LlamaBlock.forward`: RoPE's cosines and sines, and the engine's attention.
        """
        for kernel in self.kernels:
            if kernel.supports(x, attention):
                return kernel(self, x, cos_sin, attention)
        total, normed = self.input_layernorm.add_and_normalize(x)
        x = Stream(total, self.self_attn(normed, cos_sin, attention))
        total, normed = self.post_attention_layernorm.add_and_normalize(x)
        return Stream(total, self.mlp(normed))


def optimize(model: Model) -> Model:
    """Replace the plain layers of a model by the fused layers of this phase, and return the same model.

    Projections are concatenated layer by layer; the old ones of a layer are released before the next is
    made. A caller that still needs the plain model passes a `clone`. GPT-2 has LayerNorm, no RoPE and no
    gate: it keeps its layers, and only its attention becomes faster.
    """
    kind = model.config.activation
    replace(model, LlamaAttention, FusedAttention)
    replace(model, Rope, FusedRope)
    if kind in KINDS:
        replace(model, GatedMLP, lambda old: FusedMLP(old, kind))
    # The kernel between the projections normalizes the heads.
    replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm, skip=FusedAttention)
    replace(model, LlamaBlock, FusedBlock)
    if isinstance(model.lm_head, (nn.Linear, Concatenable)):
        model.lm_head = join(model.lm_head)
    return model


def replace(
    model: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[Any], nn.Module],
    skip: type[nn.Module] | None = None,
) -> None:
    """Replace every module of type `kind` by `make(module)`, except children of modules of type `skip`."""
    # Names, not modules: a list of these would keep all the old weights alive until the last is replaced.
    found = [name for name, module in model.named_modules() if isinstance(module, kind)]
    for name in found:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        if skip is None or not isinstance(holder, skip):
            setattr(holder, last, make(getattr(holder, last)))

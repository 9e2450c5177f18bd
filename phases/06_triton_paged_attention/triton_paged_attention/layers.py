"""Fused layers of a transformer, built from phase 01's plain layers, whose weights they share.

`optimize` puts them into a loaded model. The model's own code stays as phase 01 wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from forward.models.qwen3 import Qwen3Attention
from forward.rope import Rope
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.kernels.norms import NormWeights, add_rms_norm
from triton_paged_attention.kernels.rope import FusedRope, HeadNorms, ProductScales, norm_rope
from triton_paged_attention.linear import KINDS, Concatenable, join


class Stream(NamedTuple):
    """The residual stream between two transformer blocks, as a sum that the next norm still has to compute.

    total, delta: `[..., hidden]`; the stream is `total + delta`.
    """

    total: Tensor
    delta: Tensor


def factors(norm: RMSNorm | Gemma3RMSNorm) -> Tensor:
    """Return the factors of an RMSNorm, `[size]`: its weight, or Gemma's `1 + weight` in float32."""
    return norm.weight.float() + 1 if isinstance(norm, Gemma3RMSNorm) else norm.weight


class FusedRMSNorm(nn.Module):
    """`RMSNorm` or `Gemma3RMSNorm` in one kernel, which adds a `Stream`'s two summands first.

    weights: the norm's factors and epsilon, for another kernel that normalizes its own input.
    """

    def __init__(self, norm: RMSNorm | Gemma3RMSNorm) -> None:
        super().__init__()
        self.weight = norm.weight
        self.weights = NormWeights(factors(norm), norm.eps)

    def forward(self, x: Tensor | Stream) -> Tensor:
        """Return `x [..., size]`, or the sum of the `Stream` `x`, normalized: `[..., size]`."""
        return self.add_and_normalize(x)[1]

    def add_and_normalize(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its pending addition computed, and the normalized stream.

        x: a `Stream` (two summands), or a tensor, to which nothing is added. Both results are `[..., size]`.
        """
        total, delta = x if isinstance(x, Stream) else (x, None)
        return add_rms_norm(total, delta, self.weights)


class FusedAttention(nn.Module):
    """`LlamaAttention` or a subclass, with one QKV projection, and one kernel from its output to attention.

    norms: RMSNorms of query and key heads; None: the model has none.
    """

    def __init__(self, old: LlamaAttention) -> None:
        super().__init__()
        self.spec = old.spec
        self.qkv_proj = join(old.q_proj, old.k_proj, old.v_proj)
        self.o_proj = join(old.o_proj)
        self.norms: HeadNorms | None = None
        if isinstance(old, Qwen3Attention):
            self.q_weight, self.k_weight = old.q_norm.weight, old.k_norm.weight
            self.norms = HeadNorms(factors(old.q_norm), factors(old.k_norm), old.q_norm.eps)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Map `x [..., hidden]` to the attention layer's output `[..., hidden]`.

        cos_sin: RoPE's cosines and sines, `T D` numbers each. attention: a `TritonPagedAttention`.
        """
        return self.o_proj(self.attend(self.qkv_proj(x), cos_sin, attention))

    def attend(
        self,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        pending: ProductScales | None = None,
    ) -> Tensor:
        """Return attention's output `[T, H D]` for the projection's output `qkv [T, (H + 2 KH) D]`.

        Head norms, RoPE and the storing of keys and values are included. cos_sin: RoPE's cosines and sines,
        `T D` numbers each. attention: the engine's `TritonPagedAttention`. pending: scales by which `qkv`
        is to be multiplied first; None: it is scaled already.
        """
        assert isinstance(attention, TritonPagedAttention)
        spec = self.spec
        cache, slots = attention.place(spec)
        q = norm_rope(spec, qkv, cos_sin, cache, slots, self.norms, pending)
        return attention.attend(spec, q, q, q, cache).flatten(1)


class FusedMLP(nn.Module):
    """A `GatedMLP` whose gate and up projections are one matrix product, and its activation one kernel."""

    def __init__(self, old: GatedMLP, kind: str) -> None:
        super().__init__()
        self.gate_up_proj = join(old.gate_proj, old.up_proj)
        self.down_proj = join(old.down_proj)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Return `down(act(gate(x)) * up(x))`: `[..., hidden]` -> `[..., hidden]`."""
        return self.down_proj(self.gate_up_proj(x, gate=self.kind))


class BlockKernel(Protocol):
    """Interface of a function that computes a whole transformer block faster, for steps that it supports."""

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return True if this kernel can compute a step with the input `x [T, hidden]` and this attention."""

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor | Stream:
        """Return a transformer block's output `[T, hidden]`, or a `Stream` whose sum it is.

        x: the input, `[T, hidden]` or a `Stream`.
        block: the layers with the weights. cos_sin: RoPE's cosines and sines, `T D` numbers each.
        attention: the engine's, with the KV cache.
        """


class FusedBlock(nn.Module):
    """A transformer block (`LlamaBlock`) that leaves its last residual addition to the next norm.

    kernels: functions that compute the whole block; each step uses the first `BlockKernel` that supports
        it, or the block's own layers if none does. Empty in this phase.
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

        x: `[..., hidden]`, or a `Stream` of it. cos_sin: RoPE's cosines and sines, `T D` numbers each.
        attention: the engine's, with the KV cache.
        """
        for kernel in self.kernels:
            if kernel.supports(x, attention):
                return kernel(self, x, cos_sin, attention)
        total, normed = self.input_layernorm.add_and_normalize(x)
        x = Stream(total, self.self_attn(normed, cos_sin, attention))
        total, normed = self.post_attention_layernorm.add_and_normalize(x)
        return Stream(total, self.mlp(normed))


def optimize(model: Model) -> Model:
    """Replace the plain layers of a model by the fused layers of this phase, in place; return the same model.

    Projections are concatenated layer by layer; a layer's old ones are released before the next layer's are
    made. A caller that still needs the plain model passes a `clone`. GPT-2 has LayerNorm, no RoPE and no
    gate: it keeps all but its head, and its attention becomes faster.
    """
    kind = model.config.activation
    replace(model, LlamaAttention, FusedAttention)
    replace(model, Rope, FusedRope)
    if kind in KINDS:
        replace(model, GatedMLP, lambda old: FusedMLP(old, kind))
    replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm)
    replace(model, LlamaBlock, FusedBlock)
    if isinstance(model.lm_head, (nn.Linear, Concatenable)):
        model.lm_head = join(model.lm_head)
    return model


def replace(
    model: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[Any], nn.Module],
) -> None:
    """Replace every module of type `kind` in `model` by `make(module)`, in place."""
    # Names, not modules: a list of these would keep all the old weights alive until the last is replaced.
    found = [name for name, module in model.named_modules() if isinstance(module, kind)]
    for name in found:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        setattr(holder, last, make(getattr(holder, last)))

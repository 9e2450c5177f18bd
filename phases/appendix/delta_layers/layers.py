"""Qwen3.5's layers by fused kernels, built from the original layers with their weights.

`fuse` puts them into a model that has just been loaded; then phase 06 fuses the other layers. Their
projections are phase 06's `FusedLinear`, so features that add kernels to a `FusedLinear` add them here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forward.attention import Attention
from hybrid_cache.kernels import GroupedTriton
from hybrid_cache.states.mixer import Mixer
from hybrid_cache.states.qwen3_5 import GatedAttention, GatedDeltaNet, Qwen35, Qwen35Block
from phases.appendix.delta_layers.kernels import apply_gate, mix
from phases.appendix.delta_layers.step import DeltaWeights
from phases.appendix.latency.single_request import attend_step, single_request_workspace
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms
from triton_paged_attention.layers import (
    FusedAttention,
    FusedMLP,
    FusedRMSNorm,
    Stream,
    replace,
)
from triton_paged_attention.linear import join, linear_of


class FusedGatedAttention(FusedAttention):
    """Qwen3.5's `GatedAttention` by phase 06's kernels; the QKV projection also computes the gate.

    old: the layer that it replaces. turned: how many numbers of a head RoPE rotates.
    attention_scaling: factor of the numbers that rotate, multiplied into the weights of the head norms.

    Phase 06 rotates pairs of numbers that are half a head apart. The numbers of a head may have any order, if
    it is the same for queries and keys. So the pairs that rotate are moved half a head apart here, and pairs
    that do not rotate have an angle of 0.
    """

    def __init__(self, old: GatedAttention, turned: int, attention_scaling: float) -> None:
        nn.Module.__init__(self)
        spec = self.spec = old.spec
        heads = spec.num_heads
        keys = spec.num_kv_heads
        size = spec.head_dim
        device = old.q_proj.weight.device
        order = torch.arange(size, device=device)
        turning, still = order[:turned].chunk(2), order[turned:].chunk(2)
        order = torch.cat((turning[0], still[0], turning[1], still[1]))
        q, k = (torch.arange(n, device=device)[:, None] * size for n in (2 * heads, keys))
        parts = picked(old.q_proj, q[::2] + order), picked(old.k_proj, k + order)
        gate = picked(old.q_proj, q[1::2] + torch.arange(size, device=device))
        self.qkv_proj, self.o_proj = join(*parts, old.v_proj, gate), join(old.o_proj)
        factor = torch.where(order < turned, attention_scaling, 1.0)
        q_weight, k_weight = (
            factor * (1.0 + part.weight[order].float()) for part in (old.q_norm, old.k_norm)
        )
        self.norms = HeadNorms(q_weight, k_weight, old.q_norm.eps)
        self.workspace = single_request_workspace(spec, device)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        *,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the attention layer's output for `x [T, hidden]`, in its shape, plus `residual` if given.

        cos_sin: RoPE's cosines and sines. attention: the engine's attention over the KV cache.
        norm: RMSNorm to apply to `x` first; None: `x` is normalized already.
        """
        made = self.qkv_proj(x, norm=norm)
        out = self.spec.num_heads * self.spec.head_dim
        qkv, gate = made[..., :-out].contiguous(), made[..., -out:]
        if (
            isinstance(attention, GroupedTriton)
            and len(x) == 1
            and attention.decodes
            and not attention.pool.layers[self.spec.index].scaled
        ):
            mixed = attend_step(
                attention,
                self.spec,
                qkv,
                cos_sin,
                self.norms,
                workspace=self.workspace,
                wait_for_all_splits=True,
            ).out
        else:
            mixed = self.attend(qkv, cos_sin, attention)
        return self.o_proj(apply_gate(mixed, gate), residual=residual)


class FusedDelta(nn.Module):
    """A Gated DeltaNet layer as one input projection, fused kernels, and the output projection.

    old: the layer that it replaces.
    """

    def __init__(self, old: GatedDeltaNet) -> None:
        super().__init__()
        conv, norm = old.conv1d.weight.squeeze(1), NormWeights(old.norm.weight, old.norm.eps)
        self.weights = DeltaWeights(old.layer, old.delta, conv, old.A_log, old.dt_bias, norm)
        self.in_proj = join(old.in_proj_qkv, old.in_proj_z, old.in_proj_b, old.in_proj_a)
        self.out_proj = join(old.out_proj)

    def forward(
        self,
        x: Tensor,
        mixer: Mixer,
        *,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output for `x [T, hidden]`, in its shape, plus `residual` if given.

        mixer: has the engine's recurrent states and the step's slots in them. norm: RMSNorm to apply to `x`
            first; None: `x` is normalized already.
        """
        assert isinstance(mixer, GroupedTriton) and mixer.pool.states is not None
        x = self.in_proj(x, norm=norm)
        mixed = mix(mixer.pool.states, self.weights, x, mixer.decodes)
        return self.out_proj(mixed, residual=residual)


class FusedHybridBlock(nn.Module):
    """A transformer block of Qwen3.5 by fused kernels.

    The next block's norm does this block's last residual addition; for one token, the down projection's
    kernel does it.

    block: the block that it replaces.
    """

    input_layernorm: FusedRMSNorm
    post_attention_layernorm: FusedRMSNorm
    mlp: FusedMLP
    linear_attn: FusedDelta
    self_attn: FusedGatedAttention

    def __init__(self, block: Qwen35Block) -> None:
        super().__init__()
        self.keeps_state = block.keeps_state
        for name, part in block.named_children():
            setattr(self, name, part)

    def forward(
        self,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        mixer: Mixer,
    ) -> Tensor | Stream:
        """Return the block's output for hidden states `x [T, hidden]`: a tensor, or a `Stream`.

        A `Stream` is two tensors whose sum the next norm computes; `x` may be a `Stream`, too.
        cos_sin: RoPE's cosines and sines. attention: the engine's attention over the KV cache.
        mixer: has the engine's recurrent states for Gated DeltaNet.
        """
        layer: Callable[..., Tensor]
        if self.keeps_state:
            layer = partial(self.linear_attn, mixer=mixer)
        else:
            layer = partial(self.self_attn, cos_sin=cos_sin, attention=attention)
        behind, mlp = self.post_attention_layernorm, self.mlp
        if isinstance(x, Tensor) and len(x) == 1:
            x = layer(x, norm=self.input_layernorm.weights, residual=x)
            return mlp.down_proj(
                mlp.gate_up_proj(x, norm=behind.weights, gate=mlp.kind), residual=x
            )
        total, normed = self.input_layernorm.add_and_normalize(x)
        total, normed = behind.add_and_normalize(Stream(total, layer(normed)))
        return Stream(total, mlp(normed))


def fuse(model: Qwen35) -> None:
    """Replace Qwen3.5's unquantized attention, Gated DeltaNet layers and blocks by fused ones, in place."""
    replace(model, GatedDeltaNet, FusedDelta)
    turned_parts = [
        part for name, part in model.named_modules() if name.endswith((".q_proj", ".k_proj"))
    ]
    if all(isinstance(part, nn.Linear) for part in turned_parts):
        turned, sharp = 2 * len(model.rope.inverse_frequencies), model.attention_scaling
        replace(model, GatedAttention, lambda old: FusedGatedAttention(old, turned, sharp))
        still = model.config.head_dim // 2 - turned // 2
        model.rope.inverse_frequencies = F.pad(model.rope.inverse_frequencies, (0, still))
        model.attention_scaling = 1.0
        replace(model, Qwen35Block, FusedHybridBlock)


def picked(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """Return an `nn.Linear` with only the outputs `rows` of `linear`, in that order.

    rows: indices of outputs, int64 of any shape, which is flattened.
    """
    rows = rows.flatten()
    return linear_of(linear.weight[rows], None if linear.bias is None else linear.bias[rows])

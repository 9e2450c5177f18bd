"""Kernels of a quantized layer for one token, and of a block whose activations stay in eight bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forward.attention import Attention
from forward.model import Model
from phases.appendix.latency.layers import HeadCombiner, LatencyBlock, LatencyKernel
from phases.appendix.latency.output_projection import Rounding, project_heads
from phases.appendix.latency.single_request import SingleRequestSplits, starts_early
from phases.appendix.latency.tables import fused_heads_are_faster
from phases.appendix.quant_kernels.gemv import gemv8
from phases.appendix.quant_kernels.gemv4 import gemv4
from phases.appendix.quant_kernels.inputs import (
    PendingScales,
    gated_rows,
    norm_rows,
    round_vector,
    unscaled,
)
from quant.formats import LARGEST, Activations
from quant.kernel_layers import KernelLinear
from quant.products import Rounded, eight_by_eight, hardware_rounds, round_rows
from triton_paged_attention.kernels.rope import ProductScales
from triton_paged_attention.layers import (
    FusedAttention,
    FusedBlock,
    FusedMLP,
    FusedRMSNorm,
    Stream,
)
from triton_paged_attention.linear import FusedLinear

MANY = 1024
"""Tokens from which a product with a scale for each row and column is as fast as one without."""


class QuantLatencyKernel(LatencyKernel):
    """`LatencyKernel` for a layer of 4- or 8-bit weights."""

    linear: KernelLinear

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True for one token, unless the layer has a bias and a gate, or act-order (`desc_act`)."""
        return self.linear.order is None and super().supports(tokens, gate)

    def __call__(self, x: Tensor, **operators: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        linear = self.linear
        how = {
            **operators,
            "bias": linear.bias,
            "trigger_early": self.trigger_early,
            "out_dtype": self.out_dtype,
        }
        if linear.scheme.weights == "int4":
            return gemv4(x, linear.stored, linear.shape[1], **how)
        return gemv8(x, linear.stored, **how)


def heads_of(linear: KernelLinear) -> HeadCombiner | None:
    """Return the function that combines attention's splits in an output projection of 8-bit weights.

    None: its scales are not by channel, it has act-order, or attention combines the splits faster.
    """
    plain = linear.scheme.scales == "channel" and linear.order is None
    return (
        partial(_combine, linear) if plain and fused_heads_are_faster(*linear.shape) else None
    )


def _combine(linear: KernelLinear, parts: SingleRequestSplits, residual: Tensor) -> Tensor:
    stored = linear.stored
    kind = linear.scheme.activations
    hardware = hardware_rounds(residual.device)
    rounding = (
        Rounding(round_vector, LARGEST[kind], kind == "int8", hardware) if kind else None
    )
    return project_heads(
        residual, stored.data, linear.bias, parts,
        rows=16, scale=stored.scale, rounding=rounding,  # twice as many rows, of half the bytes
    )  # fmt: skip


class EightBitBlock:
    """A `BlockKernel` for more than one token whose activations are in eight bits between the projections.

    Norms and activations round their outputs, and multiply their inputs by the pending scales. A single
    token takes the block's other kernels, each of which rounds and scales by itself.

    kind: the format of the activations.
    """

    def __init__(self, kind: Activations) -> None:
        self.kind = kind

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """See `BlockKernel.supports`."""
        return not (isinstance(x, Tensor) and len(x) == 1)

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Stream:
        """See `LlamaBlock.forward`."""
        attend, mlp = block.self_attn, block.mlp
        assert isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP)
        total, delta = x if isinstance(x, Stream) else (x, None)
        total, normed = norm_rows(total, delta, block.input_layernorm.weights, self.kind)
        dtype = total.dtype
        qkv = multiply(attend.qkv_proj, normed, dtype)
        if isinstance(qkv, PendingScales):
            scales = ProductScales(qkv.rows, qkv.columns, dtype)
            mixed = attend.attend(qkv.values, cos_sin, attention, scales)
        else:
            mixed = attend.attend(qkv, cos_sin, attention)
        out = multiply(attend.o_proj, round_rows(mixed, self.kind), dtype)
        total, normed = norm_rows(
            total, out, block.post_attention_layernorm.weights, self.kind
        )
        both = gated_rows(
            multiply(mlp.gate_up_proj, normed, dtype), mlp.kind, self.kind, dtype
        )
        return Stream(total, multiply(mlp.down_proj, both, dtype))  # type: ignore[arg-type]  # see PendingScalesNorm


def multiply(
    layer: FusedLinear, x: Rounded | Tensor, dtype: torch.dtype
) -> PendingScales | Tensor:
    """Return `x` times a layer of eight-bit weights; below `MANY` tokens the product's scales are pending.

    The library multiplies a small batch faster with one scale for all than with a scale for each row and
    column: so it is given scales of 1, and the next kernel multiplies by the true ones.

    dtype: the model's.
    """
    assert isinstance(layer.linear, KernelLinear) and isinstance(x, Rounded)
    weight = layer.linear.stored
    if len(x.values) >= MANY and x.values.is_cuda and weight.scheme.weights == "fp8":
        return eight_by_eight(x, weight, dtype)
    return unscaled(x, weight)


class PendingScalesNorm(FusedRMSNorm):
    """The norm behind the last `EightBitBlock`: it applies the pending scales of that block's product."""

    def __init__(self, norm: FusedRMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = norm.weight
        self.weights = norm.weights

    def add_and_normalize(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """See `FusedRMSNorm.add_and_normalize`."""
        if isinstance(x, Tensor):  # of a single token: nothing is pending
            return super().add_and_normalize(x)
        total, normed = norm_rows(*x, self.weights, None)
        assert isinstance(normed, Tensor)
        return total, normed


def install(model: Model) -> Model:
    """Add kernels to a model's quantized layers and blocks, and return the same model."""
    for fused in model.modules():
        if isinstance(fused, FusedLinear) and isinstance(fused.linear, KernelLinear):
            fused.kernels.insert(0, QuantLatencyKernel(fused.linear))
    blocks = [block for block in model.modules() if isinstance(block, FusedBlock)]
    kinds = {eight_bits(block) for block in blocks}
    kind = kinds.pop() if len(kinds) == 1 else None
    for block in blocks:
        add_kernels(block)
    if kind is not None and isinstance(model.norm, FusedRMSNorm):
        for block in blocks:
            block.kernels.insert(0, EightBitBlock(kind))
        model.norm = PendingScalesNorm(model.norm)
    if isinstance(model.lm_head, FusedLinear):
        for kernel in model.lm_head.kernels:
            if isinstance(kernel, QuantLatencyKernel):
                kernel.out_dtype = torch.float32  # what is sampled
    return model


def add_kernels(block: FusedBlock) -> None:
    """Set when a block's QKV kernel triggers the next, and let the output projection combine attention's
    splits.
    """
    attend = block.self_attn
    if not isinstance(attend, FusedAttention):
        return
    for kernel in attend.qkv_proj.kernels:
        if isinstance(kernel, QuantLatencyKernel):
            kernel.trigger_early = starts_early(attend.spec)
    out = attend.o_proj
    for direct in block.kernels:
        if (
            isinstance(direct, LatencyBlock)
            and isinstance(out.linear, KernelLinear)
            and out.total is None
        ):
            direct.heads = heads_of(out.linear)


def eight_bits(block: FusedBlock) -> Activations | None:
    """Return the format of a block's activations if all its projections multiply eight-bit
    numbers, else None.
    """
    attend, mlp = block.self_attn, block.mlp
    if not (isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP)):
        return None
    kinds = {
        fused.linear.scheme.activations
        if isinstance(fused.linear, KernelLinear)
        and fused.linear.eight
        and fused.linear.bias is None
        and fused.total is None
        else None
        for fused in (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj)
    }
    return kinds.pop() if len(kinds) == 1 else None

"""Ways of a quantized layer for one token, and of a block whose numbers stay in eight bits in between."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forward.attention import Attention
from forward.model import Model
from phases.appendix.latency.heads import Rounding, project_heads
from phases.appendix.latency.layers import CombinesHeads, LatencyBlock, LatencyKernel
from phases.appendix.latency.single_request import SingleRequestSplits, starts_early
from phases.appendix.latency.tables import fused_heads_are_faster
from phases.appendix.quant_kernels.gemv import gemv8
from phases.appendix.quant_kernels.gemv4 import gemv4
from phases.appendix.quant_kernels.inputs import gated_rows, norm_rows, round_vector
from quant.formats import LARGEST, Activations
from quant.kernel_layers import KernelLinear
from quant.products import (
    PendingScales,
    Rounded,
    eight_by_eight_whole,
    hardware_rounds,
    round_rows,
    scales_inside,
    unscaled,
)
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
    """`LatencyKernel` of a layer with few bits."""

    linear: KernelLinear

    def supports(self, tokens: int, gate: str | None) -> bool:
        """See `Way.supports`."""
        return self.linear.order is None and super().supports(tokens, gate)

    def __call__(self, x: Tensor, **around: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        linear = self.linear
        how = {
            **around,
            "bias": linear.bias,
            "run_ahead": self.run_ahead,
            "out_dtype": self.out_dtype,
        }
        if linear.scheme.weights == "int4":
            return gemv4(x, linear.stored, linear.shape[1], **how)
        return gemv8(x, linear.stored, **how)


def heads_of(linear: KernelLinear) -> CombinesHeads | None:
    """See `latency.layers.heads_of`: of a weight of eight bits with scales by channel."""
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
    """A way through a block between whose projections no number of 16 bits is written that has eight.

    Norms and activations round what they make, and multiply what they read by its scales. A lone token goes
    through the block as it was: there every projection is a kernel that does all this by itself.
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
    """`x` times a layer that is `eight`; a product of few tokens is still to be scaled.

    With one scale for all, the library has a faster product of few tokens than with a scale for each row and
    column: so it is told that all scales are 1, and the next kernel does the rest.
    """
    assert isinstance(layer.linear, KernelLinear) and isinstance(x, Rounded)
    weight = layer.linear.stored
    if len(x.values) >= MANY and scales_inside(x, weight, dtype):
        return eight_by_eight_whole(x, weight, dtype)
    return unscaled(x, weight)


class PendingScalesNorm(FusedRMSNorm):
    """The norm behind the last `EightBitBlock`, which hands its product on unscaled."""

    def __init__(self, norm: FusedRMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = norm.weight
        self.eps = norm.eps
        self.one_plus = norm.one_plus

    def both(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """See `FusedRMSNorm.both`."""
        if isinstance(x, Tensor):  # of a lone token, to which all has been added
            return super().both(x)
        total, normed = norm_rows(*x, self.weights, None)
        assert isinstance(normed, Tensor)
        return total, normed


def install(model: Model) -> Model:
    """Add ways to a model's blocks and quantized layers, and return the model, which is the same object."""
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
    """Say how a block's projections start, and combine attention's splits in the one behind it."""
    attend = block.self_attn
    if not isinstance(attend, FusedAttention):
        return
    for kernel in attend.qkv_proj.kernels:
        if isinstance(kernel, QuantLatencyKernel):
            kernel.run_ahead = starts_early(attend.spec)
    out = attend.o_proj
    for direct in block.kernels:
        if (
            isinstance(direct, LatencyBlock)
            and isinstance(out.linear, KernelLinear)
            and out.total is None
        ):
            direct.heads = heads_of(out.linear)


def eight_bits(block: FusedBlock) -> Activations | None:
    """Return what a block's inputs are rounded to, if all its projections are products of eight bits."""
    attend, mlp = block.self_attn, block.mlp
    if not (
        isinstance(attend, FusedAttention)
        and isinstance(mlp, FusedMLP)
        and attend.fused
        and mlp.fused
    ):
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

"""Add ways for one token and for eight bits to a model of quantized layers."""

from __future__ import annotations

import torch

from forward.model import Model
from phases.appendix.latency.block import LatencyBlock
from phases.appendix.latency.lone import starts_early
from phases.appendix.quant_kernels.ways import EightBitBlock, QuantWay, UnscaledNorm, heads_of
from quant.formats import Activations
from quant.kernel_layers import KernelLinear
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm
from triton_paged_attention.linear import FusedLinear


def install(model: Model) -> Model:
    """Add ways to a model's blocks and quantized layers, and return the model, which is the same object."""
    for fused in model.modules():
        if isinstance(fused, FusedLinear) and isinstance(fused.linear, KernelLinear):
            fused.ways.insert(0, QuantWay(fused.linear))
    blocks = [block for block in model.modules() if isinstance(block, FusedBlock)]
    kinds = {eight_bits(block) for block in blocks}
    kind = kinds.pop() if len(kinds) == 1 else None
    for block in blocks:
        add_ways(block)
        if kind is not None and isinstance(model.norm, FusedRMSNorm):
            block.ways.insert(0, EightBitBlock(kind))
    if kind is not None and isinstance(model.norm, FusedRMSNorm):
        model.norm = UnscaledNorm(model.norm)
    if isinstance(model.lm_head, FusedLinear):
        for way in model.lm_head.ways:
            if isinstance(way, QuantWay):
                way.out_dtype = torch.float32  # what is sampled
    return model


def add_ways(block: FusedBlock) -> None:
    """Say how a block's projections start, and combine attention's splits in the one behind it."""
    attend = block.self_attn
    if not isinstance(attend, FusedAttention):
        return
    for way in attend.qkv_proj.ways:
        if isinstance(way, QuantWay):
            way.run_ahead = starts_early(attend.spec)
    out = attend.o_proj
    for direct in block.ways:
        if isinstance(direct, LatencyBlock) and isinstance(out.linear, KernelLinear) and out.total is None:
            direct.heads = heads_of(out.linear)


def eight_bits(block: FusedBlock) -> Activations | None:
    """Return what a block's inputs are rounded to, if all its projections are products of eight bits."""
    attend, mlp = block.self_attn, block.mlp
    if not (isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP) and attend.fused and mlp.fused):
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

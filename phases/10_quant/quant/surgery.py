"""Kernels for the products of quantized layers, and ways for one token and for eight bits."""

from __future__ import annotations

import torch

from cuda_graphs.latency.block import LatencyBlock
from cuda_graphs.latency.lone import starts_early
from forward.model import Model
from quant.formats import Activations
from quant.kernel_layers import EightBitBlock, EightBitHeads, KernelLinear, OneToken, PendingNorm
from quant.linear import QuantLinear
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm
from triton_paged_attention.linear import FusedLinear


def install(model: Model) -> Model:
    """Put kernels in the places of quantized products, and return the model, which is the same object."""
    for fused in model.modules():
        linear = fused.linear if isinstance(fused, FusedLinear) else None
        if isinstance(fused, FusedLinear) and isinstance(linear, QuantLinear) and KernelLinear.takes(linear):
            fused.linear = made = KernelLinear(linear)
            fused.ways.insert(0, OneToken(made))
    blocks = [block for block in model.modules() if isinstance(block, FusedBlock)]
    kinds = {eight_bits(block) for block in blocks}
    kind = kinds.pop() if len(kinds) == 1 else None
    for block in blocks:
        add_ways(block)
        if kind is not None and isinstance(model.norm, FusedRMSNorm):
            block.ways.insert(0, EightBitBlock(kind))
    if kind is not None and isinstance(model.norm, FusedRMSNorm):
        model.norm = PendingNorm(model.norm)
    if isinstance(model.lm_head, FusedLinear):
        for way in model.lm_head.ways:
            if isinstance(way, OneToken):
                way.out_dtype = torch.float32  # what is sampled
    return model


def add_ways(block: FusedBlock) -> None:
    """Say how a block's projections start, and combine attention's splits in the one behind it."""
    attend = block.self_attn
    if not isinstance(attend, FusedAttention):
        return
    for way in attend.qkv_proj.ways:
        if isinstance(way, OneToken):
            way.run_ahead = starts_early(attend.spec)
    out = attend.o_proj
    for direct in block.ways:
        if isinstance(direct, LatencyBlock) and isinstance(out.linear, KernelLinear) and out.total is None:
            direct.heads = EightBitHeads(out.linear)


def unpacked_bytes(model: Model) -> int:
    """Bytes of the largest weight that is unpacked as a whole where it meets many tokens."""
    layers = [layer for layer in model.modules() if isinstance(layer, KernelLinear) and not layer.eight]
    return max((layer.shape[0] * layer.shape[1] * model.dtype.itemsize for layer in layers), default=0)


def eight_bits(block: FusedBlock) -> Activations | None:
    """What a block's inputs are rounded to, if all its projections are products of eight bits."""
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

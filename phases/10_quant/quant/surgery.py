"""The third surgery, after those of phases 06 and 09: kernels for quantized layers."""

from __future__ import annotations

from functools import partial

import torch

from cuda_graphs.latency.block import LatencyBlock
from cuda_graphs.latency.lone import starts_early
from forward.model import Model
from quant.formats import Activations
from quant.fused import QuantFusedLinear
from quant.kernel_layers import EightBitBlock, KernelLinear, KernelOutput, PendingNorm
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm
from triton_paged_attention.linear import FusedLinear
from triton_paged_attention.surgery import replace


def install(model: Model) -> Model:
    """Put kernels in the places of quantized layers, and return the model, which is the same object."""
    for block in model.modules():
        if isinstance(block, LatencyBlock):
            attend = block.self_attn
            if isinstance(attend.o_proj, QuantFusedLinear):
                attend.o_proj = by_kernels(attend.o_proj, KernelOutput)
    replace(model, QuantFusedLinear, by_kernels)
    kinds = {eight_bits(block) for block in model.modules() if isinstance(block, FusedBlock)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and isinstance(model.norm, FusedRMSNorm):
        replace(model, FusedBlock, partial(EightBitBlock, kind=kind))
        model.norm = PendingNorm(model.norm)
    for block in model.modules():
        if isinstance(block, FusedAttention) and isinstance(block.qkv_proj, KernelLinear):
            block.qkv_proj.run_ahead = starts_early(block.spec)
    if isinstance(model.lm_head, KernelLinear):
        model.lm_head.out_dtype = torch.float32  # what is sampled
    return model


def by_kernels(old: QuantFusedLinear, kind: type[KernelLinear] = KernelLinear) -> FusedLinear:
    """A layer by kernels, if there are any for its weight."""
    return kind(old.linear) if kind.takes(old.linear) else old


def unpacked_bytes(model: Model) -> int:
    """Bytes of the largest weight that is unpacked as a whole where it meets many tokens."""
    layers = [layer for layer in model.modules() if isinstance(layer, KernelLinear) and not layer.eight]
    return max((layer.shape[0] * layer.shape[1] * model.dtype.itemsize for layer in layers), default=0)


def eight_bits(block: FusedBlock) -> Activations | None:
    """What a block's inputs are rounded to, if all its projections are products of eight bits."""
    attend, mlp = block.self_attn, block.mlp
    if not (isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP) and attend.fused and mlp.fused):
        return None
    layers = (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj)
    kinds = {
        layer.scheme.activations
        if isinstance(layer, KernelLinear) and layer.eight and layer.bias is None
        else None
        for layer in layers
    }
    return kinds.pop() if len(kinds) == 1 else None

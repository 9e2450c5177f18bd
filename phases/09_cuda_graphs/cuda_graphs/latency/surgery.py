"""The second surgery, after phase 06's: layers that take a direct way for one token, and for a few."""

from __future__ import annotations

import torch

from cuda_graphs.latency.block import LatencyBlock
from cuda_graphs.latency.linear import LatencyLinear
from cuda_graphs.latency.tables import few_pays
from forward.model import Model
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP
from triton_paged_attention.linear import FusedLinear, SideBySide
from triton_paged_attention.surgery import replace


def install(model: Model) -> Model:
    """Put `LatencyBlock`s in the places of phase 06's blocks, and return the model, which is the same object.

    Blocks whose layers were left to torch stay as they are. The way is taken with a `LatencyAttention` only.
    """
    few = few_pays(model.config.hidden_size, model.dtype.itemsize, model.device)
    replace(model, FusedBlock, lambda block: LatencyBlock(block, few=few) if whole(block) else block)
    if isinstance(model.lm_head, FusedLinear):
        head = LatencyLinear.like(model.lm_head)
        if isinstance(head, LatencyLinear):
            # What is sampled is float32: one row comes so, and no one has to convert it afterwards.
            head.out_dtype = torch.float32
        model.lm_head = head
    return model


def whole(block: FusedBlock) -> bool:
    """Whether all layers of a block are kernels of phase 06."""
    attend, mlp = block.self_attn, block.mlp
    return (
        isinstance(attend, FusedAttention)
        and isinstance(mlp, FusedMLP)
        and attend.fused
        and mlp.fused
        and all(
            isinstance(linear, FusedLinear) and not isinstance(linear, SideBySide)
            for linear in (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj)
        )
    )

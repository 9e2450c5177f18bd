"""Give phase 06's layers a direct way for one token."""

from __future__ import annotations

import torch

from forward.model import Model
from phases.appendix.latency.block import LatencyBlock
from phases.appendix.latency.linear import add_way, heads_of
from phases.appendix.latency.lone import starts_early
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP
from triton_paged_attention.linear import FusedLinear, SideBySide


def install(model: Model) -> Model:
    """Add ways to a model's blocks and linear layers, and return the model, which is the same object.

    Blocks whose layers were left to torch stay as they are. The way is taken with a `LatencyAttention` only.
    """
    for block in model.modules():
        if isinstance(block, FusedBlock) and whole(block):
            attend, mlp = block.self_attn, block.mlp
            assert isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP)
            add_way(attend.qkv_proj, run_ahead=starts_early(attend.spec))
            for linear in (attend.o_proj, mlp.gate_up_proj, mlp.down_proj):
                add_way(linear)
            out = attend.o_proj
            block.ways.insert(0, LatencyBlock(heads_of(out.linear) if out.total is None else None))
    if isinstance(model.lm_head, FusedLinear):
        # What is sampled is float32: one row comes so, and no one has to convert it afterwards.
        add_way(model.lm_head, out_dtype=torch.float32)
    return model


def whole(block: FusedBlock) -> bool:
    """Return whether all layers of a block are kernels of phase 06."""
    attend, mlp = block.self_attn, block.mlp
    return (
        isinstance(attend, FusedAttention)
        and isinstance(mlp, FusedMLP)
        and attend.fused
        and mlp.fused
        and attend.spec.sinks is None
        and not any(
            isinstance(fused.linear, SideBySide)
            for fused in (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj)
        )
    )

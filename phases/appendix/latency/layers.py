"""Kernels for one token of phase 06's fused linear layers and transformer blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forward.attention import Attention
from forward.layers import GatedMLP
from forward.model import Model
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.output_projection import project_heads
from phases.appendix.latency.single_request import (
    SingleRequestSplits,
    attend_step,
    single_request_workspace,
)
from phases.appendix.latency.tables import fused_heads_are_faster
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import Workspace
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, Stream
from triton_paged_attention.linear import FusedLinear, FusedProjection

HeadCombiner = Callable[[SingleRequestSplits, Tensor], Tensor]
"""Maps attention's splits and a residual `[1, hidden]` to residual plus output projection `[1, hidden]`."""


@dataclass(eq=False)
class LatencyKernel:
    """Computes a linear layer for one token: norm, product, gate and residual in one launch.

    A `LinearKernel` of phase 06.

    linear: the layer whose weights it reads.
    trigger_early: whether the next kernel may start before the kernel before this one has ended.
    out_dtype: of the result; None: that of the input.
    reads: the classes of layers whose weights it can read.
    """

    linear: Any
    trigger_early: bool = True
    out_dtype: torch.dtype | None = None
    reads: ClassVar[type[nn.Module]] = nn.Linear

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True for one token, unless the layer has both a bias and a gate; else False.

        tokens: of the step. gate: activation by which the product's first half gates its second; None: no
            gate.
        """
        return tokens == 1 and (gate is None or self.linear.bias is None)

    def __call__(self, x: Tensor, **operators: Any) -> Tensor:
        """Return the linear layer's output `[1, N]` for one token `x [1, K]`.

        operators: `norm` of the input, `gate` (activation), `residual` to add; None leaves one out.
        """
        return self.multiply(
            x,
            **operators,
            bias=self.linear.bias,
            trigger_early=self.trigger_early,
            out_dtype=self.out_dtype,
        )

    def multiply(self, x: Tensor, **operators: Any) -> Tensor:
        """Return the layer's product with `x [1, K]`, `[1, N]`, by one kernel.

        operators: what else the kernel computes: norm, bias, residual, gate, out_dtype, trigger_early.
        """
        return gemv(x, self.linear.weight, **operators)

    def combiner(self) -> HeadCombiner | None:
        """Return a function that computes an output projection from attention's splits, or None.

        Attention computes its keys in splits (parts), whose outputs have to be combined. The function
        combines them in the projection's kernel: it gets the splits and a residual `[1, N]`, and returns the
        residual plus the projection. None: the layer is too large for that, and attention combines the splits
        itself.
        """
        linear = self.linear
        if not fused_heads_are_faster(*linear.weight.shape):
            return None
        return lambda parts, residual: project_heads(
            residual, linear.weight, linear.bias, parts
        )


def add_kernels(
    model: Model, kernel: type[LatencyKernel], skip: Collection[nn.Module] = ()
) -> None:
    """Add a one-token kernel to each `FusedLinear` of a model whose weights such a kernel can read.

    The kernel of a QKV projection lets attention start early where that is safe. That of the output head
    writes float32 logits, so no conversion follows.

    kernel: the kernel's class. skip: `FusedLinear`s that stay as they are.
    """
    early = {
        block.self_attn.qkv_proj: block.self_attn.spec.index > 0  # see `attend_step`
        for block in model.modules()
        if isinstance(block, FusedBlock) and isinstance(block.self_attn, FusedAttention)
    }
    for fused in model.modules():
        if (
            isinstance(fused, FusedLinear)
            and isinstance(fused.linear, kernel.reads)
            and fused not in skip
        ):
            dtype = torch.float32 if fused is model.lm_head else None
            made = kernel(fused.linear, trigger_early=early.get(fused, True), out_dtype=dtype)
            fused.kernels.insert(0, made)


@dataclass(eq=False)
class LatencyBlock:
    """Computes a transformer block for one token, with norms and residual additions in the projections.

    A `BlockKernel` of phase 06.

    workspace: memory for the splits (parts over the keys) of attention's output, which all blocks share.
    """

    workspace: Workspace

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return True for a step of one token in all whose KV cache has no scales; else False.

        x: the block's input. attention: the engine's, of phase 06's class.
        """
        return (
            isinstance(x, Tensor)
            and len(x) == 1
            and type(attention) is TritonPagedAttention  # others have tables for each layer
            and len(attention.batch.context_lens) == 1
            and not attention.pool.layers[0].scaled
        )

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        """Return the block's output `[1, hidden]` for one token.

        block: the layers. x: its input `[1, hidden]`. cos_sin: RoPE's cosines and sines. attention: the
            engine's attention over the KV cache.
        """
        attend = block.self_attn
        mlp = block.mlp
        norm = block.post_attention_layernorm
        assert isinstance(x, Tensor) and isinstance(attention, TritonPagedAttention)
        assert isinstance(attend, FusedAttention)
        combine = combiner_of(attend.o_proj)
        parts = attend_step(
            attention,
            attend.spec,
            attend.qkv_proj(x, norm=block.input_layernorm.weights),
            cos_sin,
            attend.norms,
            workspace=self.workspace,
            wait_for_all_splits=combine is None,
        )
        x = attend.o_proj(parts.out, residual=x) if combine is None else combine(parts, x)
        if not isinstance(mlp, FusedMLP):  # a mixture of experts
            return x + mlp(norm(x))
        # Two kernels that read a matrix each, and nothing in between.
        return mlp.down_proj(mlp.gate_up_proj(x, norm=norm.weights, gate=mlp.kind), residual=x)


def combiner_of(out: FusedLinear) -> HeadCombiner | None:
    """Return the function that computes an output projection from attention's splits, or None.

    out: the projection. The function combines the splits (parts of attention over the keys) in the
        projection's kernel. None: the projection has no such function, or several ranks share it.
    """
    kernels = [kernel for kernel in out.kernels if isinstance(kernel, LatencyKernel)]
    return kernels[0].combiner() if kernels and out.total is None else None


def install(model: Model) -> Model:
    """Add latency kernels to a model's blocks and linear layers, in place; return the same model.

    Blocks of which PyTorch computes some layers stay as they are. Linear layers outside of the blocks get
    kernels as well: no kernel after them reads their output early.
    """
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    skip = {part for block in blocks for part in block.modules()}
    workspace: Workspace | None = None
    for block in blocks:
        layers = layers_of(block)
        if layers:
            attend = block.self_attn
            assert isinstance(attend, FusedAttention)
            workspace = workspace or single_request_workspace(attend.spec, model.device)
            block.kernels.insert(0, LatencyBlock(workspace))
            skip -= {*layers}
    add_kernels(model, LatencyKernel, skip)
    return model


def layers_of(block: FusedBlock) -> tuple[FusedLinear, ...]:
    """Return the linear layers of a block that get one-token kernels: all but experts.

    Empty if PyTorch computes some layer of the block, or attention has sinks.
    """
    attend, mlp = block.self_attn, block.mlp
    if isinstance(mlp, GatedMLP) or not isinstance(attend, FusedAttention):
        return ()
    behind = (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, FusedMLP) else ()
    layers = (attend.qkv_proj, attend.o_proj, *behind)
    torch_only = any(isinstance(fused.linear, FusedProjection) for fused in layers)
    return () if torch_only or attend.spec.sinks is not None else layers

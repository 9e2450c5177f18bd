"""Kernels of phase 06's layers for one token and for two to eight, and the attention that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forward.attention import Attention, LayerSpec
from forward.layers import GatedMLP
from forward.model import Model
from paged_cache import BlockPool, PagedBatch
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.output_projection import project_heads
from phases.appendix.latency.single_request import (
    SingleRequestInputs,
    SingleRequestSplits,
    attend_single_request,
    starts_early,
)
from phases.appendix.latency.small_batch import (
    MAX_SMALL_BATCH,
    MOST_ROWS,
    attend_small_batch,
    fits,
)
from phases.appendix.latency.tables import (
    fused_heads_are_faster,
    single_request_default,
    small_batch_config,
)
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.rope import HeadNorms
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, Stream
from triton_paged_attention.linear import FusedLinear, FusedProjection


class LatencyAttention(TritonPagedAttention):
    """Attention over the paged KV cache with fused kernels for steps of a single request.

    `LatencyBlock` calls those; every other step is computed by `TritonPagedAttention`.
    """

    def __init__(self, pool: BlockPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        data, d_pad = pool.data, self._workspace.d_pad
        kv_heads, number = data.shape[-2], data.element_size()
        self._single_request_config = single_request_default(
            kv_heads, d_pad, number, data.device
        )
        self._small_batch_config = small_batch_config(d_pad, number)
        self._small_batch_workspace = Workspace(
            kv_heads * self._small_batch_config.splits * MOST_ROWS, d_pad, data.device
        )
        self._requests = 0

    @property
    def alone(self) -> bool:
        """Return True if the step has one request, and the KV cache has no scales (is not quantized)."""
        return not self.pool.layers[0].scaled and self._requests == 1

    def plan(self) -> None:
        """Sort the step's requests into decode and prefill as `TritonPagedAttention.plan` does, and
        count them.
        """
        super().plan()
        self._requests = len(self.batch.context_lens)

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """Start a step of a CUDA graph whose requests the caller has sorted.

        Arguments as in `TritonPagedAttention.begin_sorted`; the last of the requests in `members` is padding.
        """
        super().begin_sorted(batch, members, tiles)
        self._requests = len(batch.context_lens) - (members is not None)

    def attend_fused(
        self,
        layer: LayerSpec,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        *,
        small_batch: bool,
        wait_for_all_splits: bool,
    ) -> SingleRequestSplits:
        """Compute head norms, RoPE, KV store and attention of a single request from the QKV projection's
        output.

        Args:
            layer: sizes and scale of the layer.
            qkv: `[T, (H + 2 KH) D]`, the projection's output.
            cos_sin: cosines and sines of the tokens' positions, `[T, 1, D]` float32 each.
            norms: of query and key heads, if the model has them.
            small_batch: True if the request has two to eight tokens, False if it has one.
            wait_for_all_splits: True combines the splits of the keys into an output; False leaves them in
                the workspace, for the output projection to combine.
        """
        batch, cache = self.batch, self.pool.layers[layer.index]
        where = batch.block_tables, batch.context_lens, batch.slots
        given = SingleRequestInputs(qkv, cos_sin, norms, layer, cache, *where)
        if small_batch:
            given = given._replace(query_starts=batch.query_starts)
            return attend_small_batch(
                given,
                workspace=self._small_batch_workspace,
                config=self._small_batch_config,
                wait_for_all_splits=wait_for_all_splits,
            )
        return attend_single_request(
            given,
            workspace=self._workspace,
            config=self._single_request_config,
            wait_for_all_splits=wait_for_all_splits,
        )


class LatencyKernel:
    """A `LinearKernel` (faster computation of a linear layer) for one token: norm, product, gate and
    residual in one.

    linear: the layer whose weights it reads.
    trigger_early: False if the next kernel reads, before its own wait, what an earlier kernel has written.
    out_dtype: of the result; None: that of the input.
    """

    def __init__(
        self, linear: Any, *, trigger_early: bool = True, out_dtype: torch.dtype | None = None
    ) -> None:
        self.linear = linear
        self.trigger_early = trigger_early
        self.out_dtype = out_dtype

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True for one token, unless the layer has a bias and a gate."""
        return tokens == 1 and (gate is None or self.linear.bias is None)

    def __call__(self, x: Tensor, **operators: Any) -> Tensor:
        """Return the linear layer's output `[1, N]` for one token `x [1, K]`.

        operators: norm, gate and residual, as in `FusedLinear.forward`; None leaves one out.
        """
        how = {
            **operators,
            "bias": self.linear.bias,
            "trigger_early": self.trigger_early,
            "out_dtype": self.out_dtype,
        }
        return gemv(x, self.linear.weight, **how)


def add_kernel(fused: FusedLinear, **options: Any) -> LatencyKernel | None:
    """Add a `LatencyKernel` to a fused layer that is not quantized, and return it; return None for other
    layers.

    options: `trigger_early` and `out_dtype` of the kernel.
    """
    if not isinstance(fused.linear, nn.Linear):
        return None
    kernel = LatencyKernel(fused.linear, **options)
    fused.kernels.insert(0, kernel)
    return kernel


HeadCombiner = Callable[[SingleRequestSplits, Tensor], Tensor]
"""Maps attention's splits and a residual `[T, hidden]` to residual plus output projection `[T, hidden]`."""


def heads_of(linear: nn.Module) -> HeadCombiner | None:
    """Return the function that combines attention's splits inside this output projection.

    None: the layer is quantized, or attention combines them faster.
    """
    if not (isinstance(linear, nn.Linear) and fused_heads_are_faster(*linear.weight.shape)):
        return None
    return lambda parts, residual: project_heads(residual, linear.weight, linear.bias, parts)


class LatencyBlock:
    """A `BlockKernel` (faster computation of a block) that fuses norms and additions into the projections.

    It computes one token. heads: combines attention's splits in the output projection; None: attention does.
    small_batch: True if the block also takes two to eight tokens; its layers then need kernels for these.
    small_batch_heads: as `heads`, for two to eight tokens.
    """

    small_batch = False
    small_batch_heads: HeadCombiner | None = None

    def __init__(self, heads: HeadCombiner | None = None) -> None:
        self.heads = heads

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return True for a step of one token, or with `small_batch` of up to eight; attention must be
        a `LatencyAttention`.
        """
        if not (isinstance(x, Tensor) and isinstance(attention, LatencyAttention)):
            return False
        if len(x) == 1 and attention.alone:
            return True
        return self.small_batch and len(x) <= MAX_SMALL_BATCH

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        """Return the block's output `[T, hidden]`; arguments as in `LlamaBlock.forward`, after the
        block itself.
        """
        attend = block.self_attn
        mlp = block.mlp
        norm = block.post_attention_layernorm
        assert isinstance(x, Tensor) and isinstance(attention, LatencyAttention)
        assert isinstance(attend, FusedAttention)
        alone = len(x) == 1 and attention.alone
        heads = self.heads if alone else self.small_batch_heads
        qkv = attend.qkv_proj(x, norm=block.input_layernorm.weights)
        if not alone and not (
            attention.alone and fits(len(x), attend.spec)
        ):  # of several requests
            x = attend.o_proj(attend.attend(qkv, cos_sin, attention), residual=x)
        else:
            wait_for_all_splits = heads is None
            parts = attention.attend_fused(
                attend.spec,
                qkv,
                cos_sin,
                attend.norms,
                small_batch=not alone,
                wait_for_all_splits=wait_for_all_splits,
            )
            x = attend.o_proj(parts.out, residual=x) if heads is None else heads(parts, x)
        if not isinstance(mlp, FusedMLP):  # a mixture of experts
            return x + mlp(norm(x))
        # Two kernels that read a matrix each, and nothing in between.
        return mlp.down_proj(mlp.gate_up_proj(x, norm=norm.weights, gate=mlp.kind), residual=x)


def install(model: Model) -> Model:
    """Add latency kernels to a model's blocks and linear layers, and return the same model.

    Blocks of which phase 06 has not replaced every layer stay as they are. A `LatencyBlock` runs only with
    a `LatencyAttention`. Linear layers outside of these blocks get kernels as well: no kernel behind them
    reads their output early.
    """
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    inside = {part for block in blocks for part in block.modules()}
    for part in model.modules():
        if isinstance(part, FusedLinear) and part not in inside and part is not model.lm_head:
            add_kernel(part)
    for block in blocks:
        if whole(block):
            attend, mlp = block.self_attn, block.mlp
            assert isinstance(attend, FusedAttention)
            add_kernel(attend.qkv_proj, trigger_early=starts_early(attend.spec))
            behind = (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, FusedMLP) else ()
            for linear in (attend.o_proj, *behind):
                add_kernel(linear)
            out = attend.o_proj
            block.kernels.insert(
                0, LatencyBlock(heads_of(out.linear) if out.total is None else None)
            )
    if isinstance(model.lm_head, FusedLinear):
        # What is sampled is float32: one row comes so, and no one has to convert it afterwards.
        add_kernel(model.lm_head, out_dtype=torch.float32)
    return model


def whole(block: FusedBlock) -> bool:
    """Return True if phase 06 has replaced every layer of a block; a mixture of experts may stand for
    the MLP.
    """
    attend, mlp = block.self_attn, block.mlp
    inside = (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, FusedMLP) else ()
    return (
        isinstance(attend, FusedAttention)
        and attend.spec.sinks is None
        and (bool(inside) or not isinstance(mlp, FusedMLP | GatedMLP))
        and not any(
            isinstance(fused.linear, FusedProjection)
            for fused in (attend.qkv_proj, attend.o_proj, *inside)
        )
    )

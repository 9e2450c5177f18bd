"""Ways of phase 06's layers for one token and for a few, and the attention that they call."""

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
from phases.appendix.latency.heads import project_heads
from phases.appendix.latency.single_request import (
    SingleRequestInputs,
    SingleRequestSplits,
    attend_single_request,
    starts_early,
)
from phases.appendix.latency.small_batch import FEW_TOKENS, MOST_ROWS, attend_small_batch, fits
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
    """`TritonPagedAttention`, and what `LatencyBlock` calls in its place for a lone request."""

    def __init__(self, pool: BlockPool, num_heads: int, **options: Any) -> None:
        super().__init__(pool, num_heads, **options)
        data, d_pad = pool.data, self._workspace.d_pad
        kv_heads, number = data.shape[-2], data.element_size()
        self._lone_config = single_request_default(kv_heads, d_pad, number, data.device)
        self._few_config = small_batch_config(d_pad, number)
        self._few_workspace = Workspace(
            kv_heads * self._few_config.splits * MOST_ROWS, d_pad, data.device
        )
        self._requests = 0

    @property
    def alone(self) -> bool:
        """True if the step is one request's, whose tokens then come first, and the cache has no scales."""
        return self.stores_early and not self.pool.layers[0].scaled and self._requests == 1

    def plan(self) -> None:
        """Also: count the requests."""
        super().plan()
        self._requests = len(self.batch.context_lens)

    def begin_sorted(self, batch: PagedBatch, members: Tensor | None, tiles: Tensor) -> None:
        """See `TritonPagedAttention.begin_sorted`; the last of the requests that are listed is padding."""
        super().begin_sorted(batch, members, tiles)
        self._requests = len(batch.context_lens) - (members is not None)

    def attend_fused(
        self,
        layer: LayerSpec,
        qkv: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
        *,
        few: bool,
        wait_for_all_splits: bool,
    ) -> SingleRequestSplits:
        """From the projection's output to attention's, head norms, RoPE and KV store included.

        few: whether the request has more than one token. meet: see `attend_single_request`.
        """
        batch, cache = self.batch, self.pool.layers[layer.index]
        where = batch.block_tables, batch.context_lens, batch.slots
        given = SingleRequestInputs(qkv, cos_sin, norms, layer, cache, *where)
        if few:
            given = given._replace(query_starts=batch.query_starts)
            return attend_small_batch(
                given,
                workspace=self._few_workspace,
                config=self._few_config,
                wait_for_all_splits=wait_for_all_splits,
            )
        return attend_single_request(
            given,
            workspace=self._workspace,
            config=self._lone_config,
            wait_for_all_splits=wait_for_all_splits,
        )


class LatencyKernel:
    """One token in one kernel, norm, gate and residual included.

    run_ahead: see `gemv`.
    out_dtype: of the result; by default that of the input.
    """

    def __init__(
        self, linear: Any, *, run_ahead: bool = True, out_dtype: torch.dtype | None = None
    ) -> None:
        self.linear = linear
        self.run_ahead = run_ahead
        self.out_dtype = out_dtype

    def supports(self, tokens: int, gate: str | None) -> bool:
        """See `Way.supports`; the kernel has no gate for biased outputs."""
        return tokens == 1 and (gate is None or self.linear.bias is None)

    def __call__(self, x: Tensor, **around: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        how = {
            **around,
            "bias": self.linear.bias,
            "run_ahead": self.run_ahead,
            "out_dtype": self.out_dtype,
        }
        return gemv(x, self.linear.weight, **how)


def add_kernel(fused: FusedLinear, **options: Any) -> LatencyKernel | None:
    """Give a layer of plain weights its way; one of another format has none here."""
    if not isinstance(fused.linear, nn.Linear):
        return None
    kernel = LatencyKernel(fused.linear, **options)
    fused.kernels.insert(0, kernel)
    return kernel


CombinesHeads = Callable[[SingleRequestSplits, Tensor], Tensor]
"""From the splits of a request's tokens and a residual `[T, hidden]` to its sum with the projection behind
attention."""


def heads_of(linear: nn.Module) -> CombinesHeads | None:
    """Return what combines splits in a projection of plain weights; None: attention had better do it."""
    if not (isinstance(linear, nn.Linear) and fused_heads_are_faster(*linear.weight.shape)):
        return None
    return lambda parts, residual: project_heads(residual, linear.weight, linear.bias, parts)


class LatencyBlock:
    """A direct way: norms and residual additions go along with the projections.

    heads, few_heads: combine attention's splits in the output projection; None: attention does it.
    few: whether it takes two to eight tokens, too. It pays where the layers have ways for these.
    """

    few = False
    few_heads: CombinesHeads | None = None

    def __init__(self, heads: CombinesHeads | None = None) -> None:
        self.heads = heads

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """See `BlockKernel.supports`."""
        if not (isinstance(x, Tensor) and isinstance(attention, LatencyAttention)):
            return False
        if len(x) == 1 and attention.alone:
            return True
        return self.few and len(x) <= FEW_TOKENS and attention.stores_early

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Tensor:
        """See `LlamaBlock.forward`."""
        attend = block.self_attn
        mlp = block.mlp
        norm = block.post_attention_layernorm
        assert isinstance(x, Tensor) and isinstance(attention, LatencyAttention)
        assert isinstance(attend, FusedAttention)
        lone = len(x) == 1 and attention.alone
        heads = self.heads if lone else self.few_heads
        qkv = attend.qkv_proj(x, norm=block.input_layernorm.weights)
        if not lone and not (
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
                few=not lone,
                wait_for_all_splits=wait_for_all_splits,
            )
            x = attend.o_proj(parts.out, residual=x) if heads is None else heads(parts, x)
        if not isinstance(mlp, FusedMLP):  # a mixture of experts
            return x + mlp(norm(x))
        # Two kernels that read a matrix each, and nothing in between.
        return mlp.down_proj(mlp.gate_up_proj(x, norm=norm.weights, gate=mlp.kind), residual=x)


def install(model: Model) -> Model:
    """Add ways to a model's blocks and linear layers, and return the model, which is the same object.

    Blocks whose layers were left to torch stay as they are. The way is taken with a `LatencyAttention` only.
    Products outside of these blocks have ways as well: nothing behind them reads early what they write.
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
            add_kernel(attend.qkv_proj, run_ahead=starts_early(attend.spec))
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
    """Return whether all layers of a block are kernels of phase 06, or experts in the place of an MLP."""
    attend, mlp = block.self_attn, block.mlp
    inside = (
        (mlp.gate_up_proj, mlp.down_proj) if isinstance(mlp, FusedMLP) and mlp.fused else ()
    )
    return (
        isinstance(attend, FusedAttention)
        and attend.fused
        and attend.spec.sinks is None
        and (bool(inside) or not isinstance(mlp, FusedMLP | GatedMLP))
        and not any(
            isinstance(fused.linear, FusedProjection)
            for fused in (attend.qkv_proj, attend.o_proj, *inside)
        )
    )

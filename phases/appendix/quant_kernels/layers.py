"""Kernels for quantized layers and one token, and for blocks whose activations stay in eight bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from forward.attention import Attention
from forward.model import Model
from phases.appendix.latency.layers import (
    HeadCombiner,
    LatencyKernel,
    add_kernels,
)
from phases.appendix.latency.output_projection import project_heads
from phases.appendix.latency.tables import fused_heads_are_faster
from phases.appendix.quant_kernels.gemv import gemv8
from phases.appendix.quant_kernels.gemv4 import gemv4
from phases.appendix.quant_kernels.inputs import (
    PendingScales,
    gated_rows,
    norm_rows,
    round_vector,
)
from quant.formats import Activations
from quant.kernel_layers import KernelLinear
from quant.products import (
    Rounded,
    eight_by_eight,
    hardware_rounds,
    multiply_numbers,
    round_rows,
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
    """Computes a linear layer with 4- or 8-bit weights for one token, in one launch.

    A `LatencyKernel`: norm, product, gate and residual are one kernel.
    """

    reads = KernelLinear
    linear: KernelLinear

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True for one token, unless the layer has a bias and a gate, or act-order (`desc_act`).

        False otherwise. tokens: of the step. gate: activation by which the product's first half gates its
        second; None: no gate.
        """
        return self.linear.order is None and super().supports(tokens, gate)

    def multiply(self, x: Tensor, **operators: Any) -> Tensor:
        """Return the layer's product with `x [1, K]`, `[1, N]`, by one kernel.

        operators: what else the kernel computes: norm, bias, residual, gate, out_dtype, trigger_early.
        """
        linear = self.linear
        if linear.scheme.weights == "int4":
            return gemv4(x, linear.stored, linear.shape[1], **operators)
        return gemv8(x, linear.stored, **operators)

    def combiner(self) -> HeadCombiner | None:
        """Return a function that computes an output projection from attention's splits, or None.

        A split is attention over some of the keys; the function combines them in the projection's kernel.
        None: the layer is too large for that, or its scales are not by channel; attention combines the splits
        itself.
        """
        linear = self.linear
        if linear.scheme.scales != "channel" or not fused_heads_are_faster(*linear.shape):
            return None
        stored, kind = linear.stored, linear.scheme.activations
        rounding = (
            round_vector if kind else None,
            kind == "int8",
            hardware_rounds(stored.data.device),
        )

        return lambda parts, residual: project_heads(
            residual, stored.data, linear.bias, parts,
            rows=16, scale=stored.scale, rounding=rounding,  # twice as many rows, of half the bytes
        )  # fmt: skip


@dataclass(eq=False)
class EightBitBlock:
    """Computes a transformer block whose activations stay in eight bits between its products.

    A `BlockKernel` of phase 06. It computes steps of more than one token: a single token takes the block's
    other kernels, each of which rounds and scales by itself. Norms and activation functions round their
    outputs. Products leave their scales pending: the next kernel multiplies by them.

    kind: the format of the activations.
    """

    kind: Activations

    def supports(self, x: Tensor | Stream, attention: Attention) -> bool:
        """Return True if a step has more than one token, False for a single one.

        x: the block's input. attention: not used.
        """
        return not (isinstance(x, Tensor) and len(x) == 1)

    def __call__(
        self,
        block: FusedBlock,
        x: Tensor | Stream,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
    ) -> Stream:
        """Return the block's output `[T, hidden]` as a `Stream`: two tensors that the next norm adds.

        block: the layers. x: the input, a tensor or a `Stream`. cos_sin: RoPE's cosines and sines. attention:
            the engine's attention over the KV cache.
        """
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
    """Return `x [T, K]` times a layer of eight-bit weights, `[T, N]`, perhaps with scales still pending.

    x: inputs rounded to eight bits; a plain tensor is refused. dtype: the model's. The result is a plain
        tensor for `MANY` (1024) fp8 tokens or more on a GPU, and otherwise has pending scales.
    For a small batch PyTorch's product is faster with one scale for all than with a scale for each row and
    column: so it gets scales of 1, and the next kernel multiplies by the true ones.
    """
    assert isinstance(layer.linear, KernelLinear) and isinstance(x, Rounded)
    weight = layer.linear.stored
    if not (x.values.is_cuda and weight.scheme.weights == "fp8"):
        return PendingScales(multiply_numbers(x.values, weight.data), x.scale, weight.scale)
    if len(x.values) >= MANY:
        return eight_by_eight(x, weight, dtype)
    one = _one(x.values.device)
    out = torch._scaled_mm(
        x.values, weight.data.t(), scale_a=one, scale_b=one,
        out_dtype=torch.bfloat16, use_fast_accum=True,  # sums overflow float16
    )  # fmt: skip
    return PendingScales(out, x.scale, weight.scale)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


class PendingScalesNorm(FusedRMSNorm):
    """The model's last norm, after `EightBitBlock`s: it multiplies the last product by its pending scales.

    norm: the norm that it replaces.
    """

    def __init__(self, norm: FusedRMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = norm.weight
        self.weights = norm.weights

    def add_and_normalize(self, x: Tensor | Stream) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its last addition done, and the same normalized.

        x: `[..., size]`, or a `Stream`: two tensors of this shape that are to be added, the second perhaps
            with pending scales. Both results have this shape.
        """
        if isinstance(x, Tensor):  # of a single token: nothing is pending
            return super().add_and_normalize(x)
        total, normed = norm_rows(*x, self.weights, None)
        assert isinstance(normed, Tensor)
        return total, normed


def install(model: Model) -> Model:
    """Add one-token kernels to a model's quantized layers, in place; return the same model.

    If all blocks can keep their activations in one eight-bit format, they get kernels for that, too.
    """
    add_kernels(model, QuantLatencyKernel)
    blocks = [block for block in model.modules() if isinstance(block, FusedBlock)]
    kinds = {eight_bits(block) for block in blocks}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is not None and isinstance(model.norm, FusedRMSNorm):
        for block in blocks:
            block.kernels.insert(0, EightBitBlock(kind))
        model.norm = PendingScalesNorm(model.norm)
    return model


def eight_bits(block: FusedBlock) -> Activations | None:
    """Return the eight-bit format of a block's activations, "fp8" or "int8"; None if it has none.

    It has one if all its products can multiply eight-bit numbers of the same format.
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

"""Quantized layers by kernels: the linear layer, and a block whose numbers stay in eight bits in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cuda_graphs.latency.lone import Parts
from cuda_graphs.latency.tables import HeadsConfig, heads_config
from forward.attention import Attention
from quant.formats import Activations
from quant.kernels.gemv import gemv8
from quant.kernels.gemv4 import from_words, gemv4, to_words, words_fit
from quant.kernels.heads import project_heads8
from quant.kernels.inputs import Pending, Rounded, gated_rows, norm_rows, round_rows
from quant.kernels.products import eight_by_eight, eight_by_eight_whole, eight_pays, unpack
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight
from triton_paged_attention.kernels.rope import ProductScales
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm, Stream
from triton_paged_attention.linear import FusedLinear


class KernelLinear(nn.Module):
    """A linear layer whose weight has few bits, multiplied by kernels and by the library."""

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    bias: nn.Parameter | None

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        weight = linear.weight.per_channel()
        self.scheme, self.shape = weight.scheme, weight.shape
        data = to_words(weight) if self.scheme.weights == "int4" else weight.data
        tensors = {"data": data, "scale": weight.scale, "zero": weight.zero, "order": weight.order}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.register_parameter("bias", linear.bias)
        self.eight = eight_pays(weight, data.device)

    @staticmethod
    def takes(linear: QuantLinear) -> bool:
        """Whether there are kernels for a layer's weight."""
        return linear.scheme.weights != "int4" or words_fit(linear.weight)

    @property
    def stored(self) -> QuantizedWeight:
        """The weight as it lies here: four bits in words, see `to_words`, and `order` left out."""
        return QuantizedWeight(self.scheme, self.data, self.scale, self.zero)

    def quantized(self) -> QuantizedWeight:
        """The weight in its usual form."""
        weight = replace(self.stored, order=self.order)
        if self.scheme.weights != "int4":
            return weight
        numbers = from_words(self.data, self.shape[1])
        return replace(weight, data=numbers[:, ::2] | (numbers[:, 1::2] << 4))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., N]` in `x`'s dtype."""
        x = x if self.order is None else x.index_select(-1, self.order)
        kind = self.scheme.activations
        if kind is not None and x.numel():
            numbers = round_rows(x, kind)
            if self.eight:
                out = eight_by_eight_whole(numbers, self.stored, x.dtype).view(*x.shape[:-1], self.shape[0])
                return out if self.bias is None else out + self.bias
            x = (numbers.values.float() * numbers.scale[:, None]).to(x.dtype).view(x.shape)
        return F.linear(x, unpack(self.stored, self.shape[1], x.dtype), self.bias)


class OneToken:
    """A layer's way for one token, in one kernel.

    run_ahead, out_dtype: see `cuda_graphs.latency.linear.LatencyWay`.
    """

    def __init__(
        self, linear: KernelLinear, *, run_ahead: bool = True, out_dtype: torch.dtype | None = None
    ) -> None:
        self.linear, self.run_ahead, self.out_dtype = linear, run_ahead, out_dtype

    def takes(self, tokens: int, gate: str | None) -> bool:
        """See `Way.takes`."""
        linear = self.linear
        return tokens == 1 and linear.order is None and (gate is None or linear.bias is None)

    def __call__(self, x: Tensor, **around: Any) -> Tensor:
        """See `FusedLinear.forward`."""
        linear = self.linear
        how = {**around, "bias": linear.bias, "run_ahead": self.run_ahead, "out_dtype": self.out_dtype}
        if linear.scheme.weights == "int4":
            return gemv4(x, linear.stored, linear.shape[1], **how)
        return gemv8(x, linear.stored, **how)


class EightBitHeads:
    """`CombinesHeads` with a weight of eight bits and scales by channel."""

    def __init__(self, linear: KernelLinear) -> None:
        self.linear = linear

    @property
    def config(self) -> HeadsConfig | None:
        """The kernel's configuration; None: it does not take this weight."""
        plain = self.linear.scheme.scales == "channel" and self.linear.order is None
        found = heads_config(*self.linear.shape) if plain else None
        return found and replace(found, rows=2 * found.rows)  # of half the bytes

    def takes(self) -> bool:
        """See `CombinesHeads.takes`."""
        return self.config is not None

    def combine(self, parts: Parts, residual: Tensor) -> Tensor:
        """See `CombinesHeads.combine`."""
        config = self.config
        assert config is not None
        return project_heads8(residual, self.linear.stored, self.linear.bias, parts, shape=config)


class EightBitBlock:
    """A way through a block between whose projections no number of 16 bits is written that has eight.

    Norms and activations round what they make, and multiply what they read by its scales. A lone token goes
    through the block as it was: there every projection is a kernel that does all this by itself.
    """

    def __init__(self, kind: Activations) -> None:
        self.kind = kind

    def takes(self, x: Tensor | Stream, attention: Attention) -> bool:
        """See `BlockWay.takes`."""
        return not (isinstance(x, Tensor) and len(x) == 1)

    def __call__(
        self, block: FusedBlock, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Stream:
        """See `LlamaBlock.forward`."""
        attend, mlp = block.self_attn, block.mlp
        assert isinstance(attend, FusedAttention) and isinstance(mlp, FusedMLP)
        total, delta = x if isinstance(x, Stream) else (x, None)
        total, normed = norm_rows(total, delta, block.input_layernorm.weights, self.kind)
        dtype = total.dtype
        qkv = multiply(attend.qkv_proj, normed, dtype)
        if isinstance(qkv, Pending):
            scales = ProductScales(qkv.rows, qkv.columns, dtype)
            mixed = attend.attend(qkv.values, cos_sin, attention, scales)
        else:
            mixed = attend.attend(qkv, cos_sin, attention)
        out = multiply(attend.o_proj, round_rows(mixed, self.kind), dtype)
        total, normed = norm_rows(total, out, block.post_attention_layernorm.weights, self.kind)
        both = gated_rows(multiply(mlp.gate_up_proj, normed, dtype), mlp.kind, self.kind, dtype)
        return Stream(total, multiply(mlp.down_proj, both, dtype))  # type: ignore[arg-type]  # see PendingNorm


def multiply(layer: FusedLinear, x: Rounded | Tensor, dtype: torch.dtype) -> Pending | Tensor:
    """A layer's product with an input of eight bits, perhaps still to be scaled; the layer is `eight`."""
    assert isinstance(layer.linear, KernelLinear) and isinstance(x, Rounded)
    return eight_by_eight(x, layer.linear.stored, dtype)


class PendingNorm(FusedRMSNorm):
    """The norm behind the last `EightBitBlock`, which has left its product to whoever reads it."""

    def __init__(self, norm: FusedRMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps, self.one_plus = norm.weight, norm.eps, norm.one_plus

    def add(self, x: Tensor, delta: Tensor | Pending) -> tuple[Tensor, Tensor]:
        """See `FusedRMSNorm.add`."""
        total, normed = norm_rows(x, delta, self.weights, None)
        assert isinstance(normed, Tensor)
        return total, normed

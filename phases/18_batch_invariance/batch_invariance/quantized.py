"""Quantized linear layers: sums of integers need no order; other weights are unpacked to floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from batch_invariance.linear import FixedLinear, ProductCosts, measured_costs, multiply
from forward.model import Model
from quant.cpu import CpuLinear
from quant.linear import QuantLinear
from quant.rtn import rounded


def sums_whole_numbers(layer: QuantLinear) -> bool:
    """Return True if a layer multiplies and adds integers, so that its sums are the same in every order."""
    if layer.scheme.activations != "int8":
        return False
    if not layer.data.is_cuda:
        return isinstance(layer, CpuLinear)
    from quant.kernel_layers import KernelLinear

    return isinstance(layer, KernelLinear) and layer.eight


def dense_weight(layer: QuantLinear, dtype: torch.dtype) -> Tensor:
    """Return a quantized layer's weight as floats, `[N, K]` in `dtype`."""
    if layer.data.is_cuda and layer.order is None:
        from quant.kernel_layers import KernelLinear
        from quant.products import unpack

        if isinstance(layer, KernelLinear):
            return unpack(layer.stored, layer.shape[1], dtype)
    return layer.weight.dequantize().to(dtype)


class FixedQuantLinear(nn.Module):
    """A quantized linear layer whose rows have the same bits in every batch: it unpacks its weight at each
    call.

    layer: the quantized layer. costs: times of products with weights of this shape.
    """

    def __init__(self, layer: QuantLinear, costs: ProductCosts) -> None:
        super().__init__()
        self.layer, self.costs = layer, costs

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]` in `x`'s dtype; round `x` if the layer quantizes its inputs."""
        inputs = rounded(x.float(), self.layer.scheme.activations).to(x.dtype)
        weight = dense_weight(self.layer, x.dtype)
        return multiply(inputs, weight, self.layer.bias, self.costs)


def fix_linears(model: Model, sizes: Sequence[int]) -> None:
    """Replace all linear layers of a model whose sums depend on the batch, in place; they keep the weights.

    sizes: numbers of rows for which PyTorch's product is compared with the fixed one, once for each shape of
        weights.
    """
    shapes: dict[tuple[tuple[int, ...], bool], dict[str, nn.Linear | QuantLinear]] = {}
    for name, part in model.named_modules():
        if isinstance(part, QuantLinear) and sums_whole_numbers(part):
            continue
        if isinstance(part, nn.Linear | QuantLinear):
            shape = part.shape if isinstance(part, QuantLinear) else part.weight.shape
            shapes.setdefault((shape, part.bias is not None), {})[name] = part
    for layers in shapes.values():
        first = next(iter(layers.values()))
        weights = [part.weight for part in layers.values() if isinstance(part, nn.Linear)]
        if isinstance(first, QuantLinear):
            weights = [dense_weight(first, model.dtype)]
        costs = measured_costs(weights, first.bias, sizes)
        for name, part in layers.items():
            if isinstance(part, QuantLinear):
                model.set_submodule(name, FixedQuantLinear(part, costs))
            else:
                model.set_submodule(name, FixedLinear(part, costs))

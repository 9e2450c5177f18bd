"""AWQ (arXiv 2306.00978): weights of large inputs are made larger before rounding, and their inputs smaller.

`W x = (W s) (x / s)` for any `s` above 0. A weight's rounding error is about the same wherever in its group
it lies, so what is multiplied by 2 before has half the error after. The division costs nothing: it goes into
the weights of the norm, or of the projection, that made the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant import rtn
from quant.formats import Scheme
from quant.gptq import search_scales
from quant.weights import QuantizedWeight

POWERS = tuple(step / 10 for step in range(10))
"""Of the inputs' size, tried as `s`: 0 leaves the weights as they are."""


def input_scales(weights: Sequence[Tensor], hessian: Tensor, scheme: Scheme) -> Tensor:
    """Return factors `s [K]` float32 of a layer's inputs by which rounding its weights to int4 loses least.

    weights: `[N, K]` each, of layers that read one input.
    hessian: `[K, K]` float32 of their input, `X^T X` over the rows of inputs `X`. scheme: int4.

    Weights are multiplied by `s` before they are rounded, and divided by it afterwards. For each exponent
    of `POWERS`, the factors tried are the inputs' sizes to that power, divided by the geometric mean of the
    largest and the smallest. An input's size is the root of its entry on the Hessian's diagonal, at least
    1e-6. The loss is the trace of `D H D^T`, where `D [all N, K]` is the change of all layers' weights. Of
    equal losses the lower power wins.
    """
    size = hessian.diagonal().sqrt().clamp_min(1e-6)
    together = torch.cat([weight.float() for weight in weights])
    best, least = torch.ones_like(size), float("inf")
    for power in POWERS:
        scales = size**power
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = rtn.quantize(together * scales, scheme).dequantize() / scales
        change = rounded - together
        error = float(((change @ hessian) * change).sum())
        if error < least:
            best, least = scales, error
    return best


def quantize(
    weight: Tensor,
    importance: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Return `weight [N, K]` rounded to int4 by groups, each with the scale of the least squared error.

    A scale may clip the largest weights of its group.

    importance: `[K]`, the mean square of each input, by which its weights' squared errors count.
    scheme: int4 in groups. scale_dtype: of the groups' scales.
    """
    weight = weight.float()
    return rtn.in_groups(
        weight, scheme, search_scales(weight, importance, scheme, scale_dtype), None
    )

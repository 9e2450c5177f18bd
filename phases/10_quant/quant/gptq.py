"""GPTQ (arXiv 2210.17323): round the weights of one input, and correct those of the inputs that follow."""

from __future__ import annotations

import torch
from torch import Tensor

from quant import rtn
from quant.formats import DTYPES, Scheme
from quant.rtn import group_scales, to_eight_bits, to_nibbles
from quant.weights import MIDDLE, QuantizedWeight, pack_nibbles

DAMPING = 0.01
"""Share of the mean diagonal that is added to it: else inputs that are always equal give no inverse."""
COLUMNS = 128
"""Inputs rounded before their errors are passed on to all the others in one product."""
SHRINKS = tuple(1 - step / 40 for step in range(13))
"""Factors tried for a group's scale: 1 just holds its largest weight, 0.7 clips the largest ones."""


def quantize(
    weight: Tensor, hessian: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Return a layer's weight, rounded so that its outputs change least for the inputs the Hessian describes.

    weight: `[N, K]`. hessian: `[K, K]` float32, `X^T X` over the rows of inputs `X`. Both stay as they are.
    scheme: int4 without zero points, or eight bits with a scale for each channel.
    scale_dtype: of the scales of groups.

    Inputs are rounded in the order of the Hessian's diagonal, the largest first, while most other inputs can
    still correct their errors ("act-order"). Scales belong to groups of neighbouring inputs and are chosen
    before, so the file needs no index ("static" order): by `search_scales` for int4, by `rtn.quantize` for
    eight bits. An input that was never seen has 0 on the diagonal; 1 is put there, and its weights become 0.
    """
    weight, hessian = weight.float().clone(), hessian.clone()
    diagonal = hessian.diagonal()
    unseen = diagonal == 0
    diagonal[unseen] = 1
    weight[:, unseen] = 0
    kind, four = scheme.weights, scheme.weights == "int4"
    if four:
        scale, middle = search_scales(weight, diagonal, scheme, scale_dtype), MIDDLE
    else:
        scale, middle = rtn.quantize(weight, scheme).scale[:, None], 0  # one group
    order = diagonal.argsort(descending=True)
    groups = order // (scheme.group or len(order))
    inverse = inverse_factor(hessian[order][:, order])
    columns = weight[:, order].contiguous()
    numbers = torch.empty_like(columns, dtype=DTYPES[scheme.weights])
    for begin in range(0, len(order), COLUMNS):
        end = min(begin + COLUMNS, len(order))
        block, own = columns[:, begin:end], inverse[begin:end, begin:end]
        errors = torch.empty_like(block)
        for at in range(end - begin):
            group, column = groups[begin + at], block[:, at]
            step = scale[:, group].float()
            chosen = (
                to_nibbles(column, step, None) if four else to_eight_bits(column / step, kind)
            )
            numbers[:, begin + at] = chosen
            rounded = (chosen.float() - middle) * step
            errors[:, at] = pass_on(block, at, rounded, own)
        columns[:, end:].addmm_(errors, inverse[begin:end, end:], alpha=-1)
    found = numbers[:, order.argsort()]
    if four:
        return QuantizedWeight(scheme, pack_nibbles(found), scale)
    return QuantizedWeight(scheme, found, scale[:, 0])


def pass_on(block: Tensor, at: int, rounded: Tensor, factor: Tensor) -> Tensor:
    """Correct the columns after column `at` for the rounding error of that column; return the error `[N]`.

    block: `[N, C]`, the weights of N outputs for C inputs, changed in place. at: the column that was rounded.
    rounded: `[N]`, what column `at` was rounded to.
    factor: `[C, C]`, upper triangular, of the inverse Hessian (`inverse_factor`).

    The error is the column less its rounded values, divided by `factor[at, at]`. From column `at` and each
    column after it, subtract the error times their entry in row `at` of `factor`; earlier columns stay.
    """
    error = (block[:, at] - rounded) / factor[at, at]
    block[:, at:].addr_(error, factor[at, at:], alpha=-1)
    return error


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return U, upper triangular, of the inverse H^-1 = U^T U; a float32 `hessian` stays.

    `DAMPING` of the mean diagonal is added to the diagonal first. Computed in float64, returned in float32.
    """
    hessian = hessian.double()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True).float()


def search_scales(
    weight: Tensor, importance: Tensor, scheme: Scheme, dtype: torch.dtype
) -> Tensor:
    """Return scales `[N, K / g]` of a weight's groups, each chosen for the least squared error.

    Tried are 1 to 0.7 times (`SHRINKS`) the scale that just holds the group's largest weight; a smaller
    scale clips it.

    weight: `[N, K]`. importance: `[K]`, the mean square of each input, by which its weights' squared errors
        count. scheme: int4 in groups of `g`. dtype: of the scales.
    """
    groups = weight.view(len(weight), -1, scheme.group)
    weights = importance.view(-1, scheme.group)
    full, _ = group_scales(weight, scheme)
    best, least = full.to(dtype), torch.full_like(full, torch.inf)
    for shrink in SHRINKS:
        scale = (full * shrink).to(dtype)
        step = scale.float()[..., None]
        rounded = (to_nibbles(groups, step, None).float() - MIDDLE) * step
        error = ((groups - rounded).square_() * weights).sum(-1)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best

"""Inputs of a layer in eight bits: each token gets a scale of its own, found on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats import LARGEST, Activations
from quant.rtn import to_eight_bits


def quantize_tokens(x: Tensor, kind: Activations) -> tuple[Tensor, Tensor]:
    """Round `x [..., K]` to numbers `[..., K]`, int8 or fp8, and scales `[..., 1]` float32, one a token.

    A token's largest magnitude becomes the largest number of the format, `LARGEST[kind]`. A token of zeros
    has numbers of 0 and the smallest normal scale, not 0. Scales are float32 whatever `x` is, and x is
    multiplied by their reciprocal.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) * (1.0 / LARGEST[kind])
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a token of zeros stays one
    return to_eight_bits(x * scale.reciprocal(), kind), scale  # as the kernels do it: one division a token


def rounded(x: Tensor, kind: Activations | None) -> Tensor:
    """Round `x [..., K]` as `quantize_tokens` does, in `x`'s dtype; return it unchanged if `kind` is None."""
    if kind is None:
        return x
    numbers, scale = quantize_tokens(x, kind)
    return (numbers.float() * scale).to(x.dtype)

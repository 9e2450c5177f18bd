"""Quantized layers, and what tests of kernels for them have in common."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.formats import FP8, FP8_BLOCK, INT4, INT8, W8A8, Scheme
from quant.linear import QuantLinear
from quant.rtn import quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
"""Of the largest number of the output."""
INT4_64, INT4_32 = INT4.with_group(64), INT4.with_group(32)
ZEROS = Scheme("int4-zeros", "int4", "group", group=128, zeros=True)
ZEROS_32 = Scheme("int4-zeros", "int4", "group", group=32, zeros=True)
SCHEMES = [FP8, FP8_BLOCK, INT8, W8A8, INT4, INT4_64, INT4_32, ZEROS, ZEROS_32]
named = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.group}")


def layer_of(
    scheme: Scheme, n: int, k: int, rng: torch.Generator, bias: bool = False
) -> QuantLinear:
    weight = torch.randn(n, k, device=DEVICE, generator=rng) / k**0.5
    weight[3, 5] = 1.0  # an outlier
    bias_of = torch.randn(n, device=DEVICE, generator=rng).to(DTYPE) if bias else None
    return QuantLinear(quantize(weight, scheme), bias_of)


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    wanted = wanted.float()
    off = ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
    assert off < CLOSE[DTYPE], f"{what}: off by {off:.1e} of the largest number"

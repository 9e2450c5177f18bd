"""What calls `gemv.cu`: when it fits, and with what."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quant.cuda.launch import CudaKernel, available
from quant.weights import QuantizedWeight
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.kernels.norms import NormWeights

WARPS = 8
MOST_WEIGHTS = 65_536
"""Weights of a program: they have to fit into its registers, and the next kernel's programs beside it."""


def suits(weight: QuantizedWeight) -> bool:
    """Whether `product.cuh` has a weight's format, e4m3 with scales by channel, on a GPU that can run it."""
    scheme = weight.scheme
    kind = scheme.weights == "fp8" and scheme.scales == "channel" and weight.order is None
    divides = weight.shape[1] % (64 * WARPS) == 0
    return kind and divides and weight.scale.dtype == torch.float32 and available(weight.data.device)


@cache
def rows_of(outputs: int, size: int, matrices: int, device: torch.device) -> int | None:
    """Outputs of a program, so that all programs run side by side; None: they do not."""
    rows = -(-outputs // multiprocessors(device) // 8) * 8
    if matrices == 1 and rows > 8:
        rows = -(-rows // 16) * 16
    return rows if rows * matrices * size <= MOST_WEIGHTS and rows <= 32 * WARPS else None


def fits(weight: QuantizedWeight, gate: str | None) -> int | None:
    """Outputs of a program, where the kernel can be a weight's."""
    if not suits(weight) or gate not in (None, "silu"):
        return None
    (whole, size), matrices = weight.shape, 1 if gate is None else 2
    return rows_of(whole // matrices, size, matrices, weight.data.device)


@cache
def kernel(
    size: int, outputs: int, rows: int, norms: tuple[bool, bool], rounds: bool, gated: bool, adds: bool,
    ahead: bool, device: torch.device,
) -> CudaKernel:  # fmt: skip
    """The kernel for a shape, compiled once. norms: whether there is one, and it has distances from 1."""
    names = ["K", "N", "ROWS", "NORM", "ONE_PLUS", "ROUND", "GATED", "ADD", "AHEAD"]
    numbers = (size, outputs, rows, *norms, rounds, gated, adds, ahead)
    constants = dict(zip(names, numbers, strict=True)) | {"WARPS": WARPS}
    return CudaKernel(Path(__file__).with_name("gemv.cu"), constants, device)


def gemv(
    x: Tensor,  # [1, K] bfloat16
    weight: QuantizedWeight,  # [N, K]; with a gate [2 N, K]
    rows: int,
    *,
    norm: NormWeights | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,  # [1, N]
    run_ahead: bool = True,
) -> Tensor:
    """`quant.kernels.gemv.gemv8` of a weight that `fits`, with so many outputs a program: `[1, N]`."""
    whole, size = weight.shape
    outputs = whole // (1 if gate is None else 2)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    call = kernel(
        size, outputs, rows, (norm is not None, one_plus), weight.scheme.activations is not None,
        gate is not None, residual is not None, run_ahead, x.device,
    )  # fmt: skip
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    call(
        -(-outputs // rows), WARPS * 32,
        out, x, weight.data, weight.scale, norm_weight, x if residual is None else residual, eps,
    )  # fmt: skip
    return out

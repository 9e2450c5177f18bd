"""Matrix times vector for a batch of one token, with the operators before and after it in the same kernel.

With one token every weight is used once: a projection is a read of its matrix, and a library's tiles for
matrix products only get in the way. Here a program computes `ROWS` outputs and reads each row in one sweep.
The norm before the product costs so little that every program repeats it; bias, residual addition and the
gate follow in registers.

On Hopper the kernel starts while the kernel before it still runs (programmatic dependent launch): weights
depend on no kernel, so their loads are issued before `gdc_wait`, and only the input vector and the residual
are read after it. `gdc_launch_dependents` lets the next kernel start in turn. If the next kernel, too, reads
nothing but weights before its wait, it may start at once, even while the kernel before this one still runs: a
wait returns when the kernel before is complete, which it cannot be before its own wait has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phases.appendix.latency.tables import gemv_config
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.linear import KINDS, activate


@triton.jit
def wait_for_input(TRIGGER: tl.constexpr, PDL: tl.constexpr):
    """Wait until the kernel before has ended, whose results the rest of this kernel reads.

    PDL: programmatic dependent launch is on; otherwise there is nothing to do.
    TRIGGER: let the next kernel start before the wait (0), after it (1), or leave that to the caller (2).
    """
    if PDL:
        if TRIGGER == 0:
            gdc_launch_dependents()
        gdc_wait()
        if TRIGGER == 1:
            gdc_launch_dependents()


@triton.jit
def add_vector(total, vector, row, N):
    """Return `total [ROWS]` float32 plus the numbers at indices `row [ROWS]` of `vector [N]`.

    vector: a pointer; None: `total` is returned unchanged. Indices from N on add nothing.
    """
    if vector is not None:
        total += tl.load(vector + row, mask=row < N, other=0.0).to(tl.float32)
    return total


@triton.jit
def gemv_kernel(
    out, x, weight, norm_weight, bias, residual, eps, N,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr, TRIGGER: tl.constexpr,
):  # fmt: skip
    """Compute a matrix times a vector, with norm, bias, residual and gate. One program per `ROWS` outputs.

    out: `[N]`. x: `[K]`. weight: `[N, K]`, or `[2 N, K]` with GATED: the gate's rows above the up
        projection's.
    norm_weight, eps: `[K]` weights of the input's RMSNorm, and its epsilon.
    bias, residual: `[N]`, added. None leaves out the norm or an addition.
    KIND: number of the gate's activation (`linear.KINDS`). BLOCK_K: inputs that are read at a time.
    TRIGGER, PDL: see `wait_for_input`; if K > BLOCK_K, the next kernel starts when the matrix has been read.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    mask = (row < N)[:, None] & (k < K)[None, :]
    up_at = at + N.to(tl.int64) * K
    w = tl.load(weight + at, mask=mask, other=0.0)
    up = tl.load(weight + up_at, mask=mask, other=0.0) if GATED else w
    g = tl.load(norm_weight + k, mask=k < K, other=0.0) if norm_weight is not None else k
    added = add_vector(tl.zeros([ROWS], tl.float32), bias, row, N)
    wait_for_input(TRIGGER if K <= BLOCK_K else 2, PDL)
    vector = tl.load(x + k, mask=k < K, other=0.0)
    added = add_vector(added, residual, row, N)
    scale = 1.0
    if norm_weight is not None:
        square = vector.to(tl.float32) * vector.to(tl.float32)
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            part = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            square += part * part
        scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    total = tl.zeros([ROWS], tl.float32)
    total_up = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        if start > 0:
            mask = (row < N)[:, None] & (start + k < K)[None, :]
            w = tl.load(weight + at + start, mask=mask, other=0.0)
            if GATED:
                up = tl.load(weight + up_at + start, mask=mask, other=0.0)
            if norm_weight is not None:
                g = tl.load(norm_weight + start + k, mask=start + k < K, other=0.0)
            vector = tl.load(x + start + k, mask=start + k < K, other=0.0)
        if norm_weight is not None:
            # Rounded as a norm apart.
            vector = (vector.to(tl.float32) * scale * g.to(tl.float32)).to(vector.dtype)
        total += tl.sum(w.to(tl.float32) * vector.to(tl.float32)[None, :], axis=1)
        if GATED:
            total_up += tl.sum(up.to(tl.float32) * vector.to(tl.float32)[None, :], axis=1)
    if PDL and K > BLOCK_K:
        gdc_launch_dependents()
    if GATED:
        total = activate(total, KIND) * total_up
    tl.store(out + row, (total + added).to(out.dtype.element_ty), mask=row < N)


class FusedOperators(TypedDict, total=False):
    """Keyword arguments of `gemv`: operators that its kernel computes, too; each may be left out.

    norm: RMSNorm of the input. bias: `[N]`, added to the product. residual: `[..., N]`, added to the result.
    gate: activation, a key of `linear.KINDS`; the matrix has the gate's rows above the up projection's.
    out_dtype: of the result; by default that of the input.
    trigger_early: True (the default) lets the next kernel start while the kernel before this one still runs.
        It must be False if the next kernel reads, before its own wait, what an earlier kernel has written.
    """

    norm: NormWeights | None
    bias: Tensor | None
    residual: Tensor | None
    gate: str | None
    out_dtype: torch.dtype | None
    trigger_early: bool


def launch(
    kernel: Any,
    programs: int,
    x: Tensor,
    weights: Sequence[Tensor | None],
    rows: int,
    operators: FusedOperators,
    **more: Any,
) -> Tensor:
    """Launch a matrix-vector kernel with operators around its product; return its output `[..., rows]`.

    kernel: a Triton kernel with the arguments of `gemv_kernel`. programs: size of the grid.
    x: the input vector `[..., K]`, one row. rows: number of outputs.
    weights: the kernel's arguments between `x` and the norm's weight.
    operators: what to compute in the same kernel, such as a norm or a residual addition.
    more: further constants of the kernel.
    """
    gate, dtype = operators.get("gate"), operators.get("out_dtype") or x.dtype
    out = torch.empty(*x.shape[:-1], rows, dtype=dtype, device=x.device)
    norm_weight, eps = operators.get("norm") or (None, 0.0)
    kernel[(programs,)](
        out, x, *weights, norm_weight, operators.get("bias"), operators.get("residual"), eps, rows,
        GATED=gate is not None, KIND=0 if gate is None else KINDS[gate],
        TRIGGER=0 if operators.get("trigger_early", True) else 1, **more,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out


def gemv(x: Tensor, weight: Tensor, **operators: Unpack[FusedOperators]) -> Tensor:
    """Multiply a matrix with one vector, and compute the operators around the product in the same kernel.

    Args:
        x: `[..., K]`, one row.
        weight: `[N, K]`, or `[2 N, K]` with a gate: the gate's rows above the up projection's.
        operators: keys of `FusedOperators`: norm, bias, residual, gate, out_dtype, trigger_early.

    Returns:
        `[..., N]`: `residual + bias + weight @ norm(x)`, or with a gate `act(gate rows @ norm(x)) * (up rows
        @ norm(x))`.
    """
    gated = operators.get("gate") is not None
    size, rows = weight.shape[1], weight.shape[0] // (1 + gated)
    shape = gemv_config(rows, size, gated, x.device)
    return launch(
        gemv_kernel, triton.cdiv(rows, shape.rows), x, [weight], rows, operators,
        K=size, ROWS=shape.rows, BLOCK_K=shape.block_k, num_warps=shape.num_warps,
    )  # fmt: skip

"""Matrix products of a few tokens, with what stands before and after them in the same kernel.

Up to 8 tokens a projection is still a read of its matrix, and a library's tiles for matrix products still
get in the way. So this is `gemv.py` with the tensor cores: a program owns a few output rows, has their
weights in registers before the kernel in front is done, and multiplies all tokens at once. Its warps share
out the inputs, not the outputs, of which there are too few: one product for each warp's part of a row, and
a sum over warps at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from phases.appendix.latency.tables import few_config
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.activation import KINDS, activate
from triton_paged_attention.kernels.norms import NormWeights

FEW_TOKENS = 8
"""With 16, the tensor cores' next size, it gains little over the library."""
TOKENS = tl.constexpr(FEW_TOKENS)


@triton.jit
def few_kernel(
    out, x, weight, norm_weight, bias, residual, eps, tokens, N,
    K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    RUN_AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per `ROWS` outputs of all tokens; `GATED`: rows `r` of the gate and `N + r` of the up
    projection. A sweep takes `PARTS * PART` inputs, a part for each warp.
    """
    SWEEP: tl.constexpr = PARTS * PART
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    k = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]  # [PARTS, PART]
    at = row.to(tl.int64)[None, :, None] * K + k[:, None, :]
    real = (row < N)[None, :, None]
    w = tl.load(weight + at, mask=real & (k < K)[:, None, :], other=0.0)  # [PARTS, ROWS, PART]
    up_at = at + N.to(tl.int64) * K
    up = tl.load(weight + up_at, mask=real & (k < K)[:, None, :], other=0.0) if GATED else w
    factors = ()
    if NORM:
        for start in tl.static_range(0, K, SWEEP):
            factor = tl.load(norm_weight + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            factors += (factor + 1.0 if ONE_PLUS else factor,)  # type: ignore[assignment]
    added = tl.zeros([ROWS], tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    if PDL:
        if RUN_AHEAD:
            gdc_launch_dependents()  # which reads nothing but weights before its own wait
        gdc_wait()
        if not RUN_AHEAD:
            gdc_launch_dependents()
    at_x = token[None, :, None] * K + k[:, None, :]
    here = (token < tokens)[None, :, None]
    at_out = token[:, None].to(tl.int64) * N + row[None, :]
    keep = (token < tokens)[:, None] & (row < N)[None, :]
    # All that has to be waited for at once: each further load would wait for itself.
    vectors = ()
    for start in tl.static_range(0, K, SWEEP):  # [PARTS, TOKENS, PART] each
        part = tl.load(x + at_x + start, mask=here & (start + k < K)[:, None, :], other=0.0)
        vectors += (part,)  # type: ignore[assignment]
    more = tl.load(residual + at_out, mask=keep, other=0.0).to(tl.float32) if ADD else 0.0
    scale = tl.full([TOKENS], 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([PARTS, TOKENS], tl.float32)
        for i in tl.static_range((K + SWEEP - 1) // SWEEP):
            full = vectors[i].to(tl.float32)  # type: ignore[var-annotated]
            squares += tl.sum(full * full, axis=2)
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    total = tl.zeros([PARTS, TOKENS, ROWS], tl.float32)
    total_up = tl.zeros([PARTS, TOKENS, ROWS], tl.float32)
    for i in tl.static_range((K + SWEEP - 1) // SWEEP):
        if i > 0:
            inside = real & (i * SWEEP + k < K)[:, None, :]
            w = tl.load(weight + at + i * SWEEP, mask=inside, other=0.0)
            if GATED:
                up = tl.load(weight + up_at + i * SWEEP, mask=inside, other=0.0)
        vector = vectors[i]  # type: ignore[var-annotated]
        if NORM:  # rounded as a norm apart
            normed = vector.to(tl.float32) * scale[None, :, None] * factors[i][:, None, :]
            vector = normed.to(vector.dtype)
        total = tl.dot(vector, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
        if GATED:
            total_up = tl.dot(vector, tl.permute(up, (0, 2, 1)), total_up, input_precision="ieee")
    result = tl.sum(total, axis=0)  # [TOKENS, ROWS]
    if GATED:
        result = activate(result, KIND) * tl.sum(total_up, axis=0)
    result += added[None, :] + more
    tl.store(out + at_out, result.to(out.dtype.element_ty), mask=keep)


def few(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K], or [2 N, K] when gated
    *,
    norm: NormWeights | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
    run_ahead: bool = True,
) -> Tensor:
    """`gemv` for up to `FEW_TOKENS` tokens: `[T, N]`. See there for the arguments."""
    tokens, size = x.shape
    assert tokens <= FEW_TOKENS, f"x has {tokens} tokens, but may have {FEW_TOKENS}"
    rows = weight.shape[0] // (1 if gate is None else 2)
    shape = few_config(size)
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    early = dependent_launch(x.device)
    few_kernel[(triton.cdiv(rows, shape.rows),)](
        out, x, weight, norm_weight, x if bias is None else bias, x if residual is None else residual,
        eps, tokens, rows,
        K=size, ROWS=shape.rows, PARTS=shape.num_warps, PART=shape.block_k // shape.num_warps,
        NORM=norm is not None, ONE_PLUS=one_plus, BIAS=bias is not None, ADD=residual is not None,
        GATED=gate is not None, KIND=0 if gate is None else KINDS[gate], RUN_AHEAD=run_ahead, PDL=early,
        num_warps=shape.num_warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out

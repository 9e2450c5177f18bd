"""The experts of a small batch: each choice of a token reads its expert's matrix where it lies.

With one token each of its experts is used once: a product is a read of eight matrices that do not lie side by
side, and sorting choices by expert would save nothing. A program finds its expert's matrix by the choice and
computes some of its outputs, as a product of a matrix and a vector does. The first product has a program per
choice and tile of outputs; the second one per token and tile, which adds up the token's choices in the order
of the router, so nothing is left to combine.

Lower bound, for one token of Qwen3-30B-A3B in bfloat16: 8 experts of 9.4 MB are 75 MB a layer, 16 us on an
H200; 48 layers are 0.76 ms. Prediction: 85 % of that speed in the first kernel, 80 % in the second, whose
reads are shorter. Two tokens that share an expert read it twice, the second time mostly from the L2 cache; of
more than `SMALL_BATCH` tokens the tiles of `grouped` read it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from experts.grouped_experts import GroupedExperts
from experts.kernels.grouped import finish_sums, gated_unit, product_arguments
from triton_paged_attention.hardware import dependent_launch

Shape = tuple[int, int, int]
"""Outputs of a program, inputs it reads at a time, and warps."""
SMALL_BATCH = 4
"""Tokens up to which experts are gathered."""
SHAPES = ((8, 512, 4), (4, 256, 4))
"""Of the first product and of the second."""


@triton.jit
def read_tile(data, row, inside, k, scale, columns, K: tl.constexpr, SIDE: tl.constexpr):
    """Return weights of rows `row [N]` at inputs `k [BLOCK_K]`, times their scales: `[N, BLOCK_K]` float32.

    data: one expert's `[rows, K]`. inside: `[N]`, which rows exist.
    scale: one for each block of SIDE x SIDE weights, `[rows / SIDE, columns]`; SIDE 0: none is applied.
    """
    there = inside[:, None] & (k < K)[None, :]
    w = tl.load(data + row[:, None] * K + k[None, :], mask=there, other=0.0).to(tl.float32)
    if SIDE > 0:
        w *= tl.load(
            scale + row[:, None] // SIDE * columns + k[None, :] // SIDE, mask=there, other=0.0
        )
    return w


@triton.jit
def small_batch_expert_kernel(
    out, x, x_scale, data, scale, bias, weights, chosen, E, scale_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, UP: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr, CHANNEL: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `BLOCK_N` of `N` outputs of one choice (UP), or of the sum over one token's choices.

    A choice is a pair of a token and one of its experts. One program per choice or token, and part of the
    outputs. UP, the first product: `x [T, K]` -> `out [T k, N]`, gated. Otherwise the second one: `x [T k,
    K]` -> `out [T, N]`, choices added up with `weights [T, k]`.
    chosen: `[T, k]`, numbers of experts; those that are not below E are on another rank and count 0.
    data: `[E, N, K]`, with UP `[E, 2 N, K]`: gates, then ups. bias: `[E, N]`, `[E, 2 N]` or None.
    scale: of each weight row (CHANNEL) or of SIDE x SIDE blocks; `scale_stride` numbers per expert.
    x_scale: `[rows of x]`, if the input was rounded, or None. TOP_K: k, choices per token.
    KIND, LIMIT: activation and clamp of `gated_unit`.
    PDL: programmatic dependent launch: the kernel before may still run, so it is waited for.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns: tl.constexpr = (K + SIDE - 1) // SIDE if SIDE > 0 else 0
    rows: tl.constexpr = 2 * N if UP else N
    choices: tl.constexpr = 1 if UP else TOP_K
    total = tl.zeros([BLOCK_N], tl.float32)
    if PDL and UP:
        gdc_wait()
        gdc_launch_dependents()
    for place in tl.static_range(choices):
        choice = tl.program_id(0) * choices + place
        expert = tl.load(chosen + choice)
        here = (expert >= 0) & (expert < E)
        inside = tl.where(
            here, n < N, False
        )  # nothing is read of an expert that is on another rank
        source = choice // TOP_K if UP else choice
        matrix, scales = data + expert * rows * K, scale + expert * scale_stride
        parts = tl.zeros(
            [BLOCK_N, BLOCK_K], tl.float32
        )  # summed at the end, so that no read waits for it
        ups = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w = read_tile(matrix, n, inside, k, scales, columns, K, SIDE)
            if UP:
                w_up = read_tile(matrix, n + N, inside, k, scales, columns, K, SIDE)
            if PDL and not UP and place + start == 0:
                gdc_wait()  # only now: choices and weights are older than the kernel before, which waited too
            vector = tl.load(x + source * K + k, mask=tl.where(here, k < K, False), other=0.0)
            vector = vector.to(tl.float32)[None, :]
            parts += w * vector
            if UP:
                ups += w_up * vector
        unit = None
        biases = None
        if x_scale is not None:
            unit = tl.load(x_scale + source, mask=here, other=0.0)
        if bias is not None:
            biases = bias + expert * rows
        part = finish_sums(tl.sum(parts, axis=1), unit, scales, biases, n, inside, CHANNEL)
        if UP:
            up = finish_sums(tl.sum(ups, axis=1), unit, scales, biases, n + N, inside, CHANNEL)
            total += gated_unit(part, up, KIND, LIMIT)
        else:
            total += part * tl.load(weights + choice, mask=here, other=0.0)
    at = out + tl.program_id(0) * N + n
    tl.store(at, total.to(out.dtype.element_ty), mask=n < N)


def gathered(
    layer: GroupedExperts,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    shapes: tuple[Shape, Shape] = SHAPES,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, `[T, hidden]`, by Triton kernels.

    For at most `SMALL_BATCH` tokens. x: `[T, hidden]`. weights, chosen: `[T, k]`, the router's weights and
    numbers of experts. shapes: for each of the two products (outputs of a program, inputs read at a time,
    warps).
    """
    chosen = chosen.contiguous()
    weights = weights.contiguous()
    tokens, top_k = chosen.shape
    both = zip((layer.gate_up, layer.down), (layer.act, None), shapes, strict=True)
    for experts, act, (block_n, block_k, warps) in both:
        tensors, constants = product_arguments(x.contiguous(), experts, act, top_k)
        programs = tokens if act is None else tokens * top_k
        n, k = constants["N"], constants["K"]
        out = torch.empty(programs, n, dtype=x.dtype, device=x.device)
        small_batch_expert_kernel[(programs, triton.cdiv(n, block_n))](
            out, *tensors, weights, chosen, len(experts.data), **constants, BLOCK_N=block_n,
            BLOCK_K=min(block_k, triton.next_power_of_2(k)), num_warps=warps,
            **dependent_launch(x.device),
        )  # fmt: skip
        x = out
    return x

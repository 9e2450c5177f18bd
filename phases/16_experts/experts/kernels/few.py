"""The experts of a few tokens: gathered by choice, and read as one matrix after the other.

With one token each of its experts is used once: a product is a read of eight matrices that do not lie side by
side, and sorting would only be in the way. A program finds its expert's matrix by the choice and owns a few
of its outputs, as a product of a matrix and a vector does. The first kernel has a program per choice and
tile of outputs; the second one per token and tile, which adds up the token's choices in the order of the
router, so nothing is left to combine.

Floor, of one token of Qwen3-30B-A3B in bfloat16: 8 experts of 9.4 MB are 75 MB a layer, 16 us on an H200; 48
layers are 0.76 ms. Prediction: 85 % of that speed in the first kernel, 80 % in the second, whose reads are
shorter. Two tokens that share an expert read it twice, the second time mostly from the L2 cache; from `FEW`
tokens on the tiles of `grouped` read it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from experts.kernels.grouped import GroupedWay, gated_unit, weights_for_kernel
from experts.kernels.stack import ExpertStack, Swiglu
from triton_paged_attention.linear import KINDS

FEW = 4
"""Tokens up to which experts are gathered."""


@triton.jit
def read_tile(data, row, inside, k, x, scale, columns, K: tl.constexpr, SIDE: tl.constexpr):
    """Products of weight rows `row [N]` and `x [BLOCK_K]` at the inputs `k`: `[N]` float32."""
    w = tl.load(data + row[:, None] * K + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
    w = w.to(tl.float32)
    if SIDE > 0:
        at = row[:, None] // SIDE * columns + k[None, :] // SIDE
        w *= tl.load(scale + at, mask=inside[:, None] & (k < K)[None, :], other=0.0)
    return tl.sum(w * x[None, :], axis=1)


@triton.jit
def finish_vector(total, scale, bias, row, inside, CHANNEL: tl.constexpr, BIAS: tl.constexpr):
    """Finished sums `[N]` of weight rows, with what belongs to each of these."""
    if CHANNEL:
        total *= tl.load(scale + row, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def few_up_kernel(
    out, x, x_scale, data, scale, bias, chosen, first, E, scale_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, CHANNEL: tl.constexpr, SIDE: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per choice and `BLOCK_N` of its `N` gated outputs."""
    choice = tl.program_id(0)
    expert = tl.load(chosen + choice) - first
    if (expert < 0) | (expert >= E):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    row = n * 2 if INTERLEAVED else n
    up_row = n * 2 + 1 if INTERLEAVED else N + n
    columns: tl.constexpr = (K + SIDE - 1) // SIDE if SIDE > 0 else 0
    data += expert * 2 * N * K
    bias += expert * 2 * N
    scale += expert * scale_stride
    token = choice // TOP_K
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        vector = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
        gate += read_tile(data, row, inside, k, vector, scale, columns, K, SIDE)
        up += read_tile(data, up_row, inside, k, vector, scale, columns, K, SIDE)
    if ROUNDED:
        unit = tl.load(x_scale + token)
        gate *= unit
        up *= unit
    gate = finish_vector(gate, scale, bias, row, inside, CHANNEL, BIAS)
    up = finish_vector(up, scale, bias, up_row, inside, CHANNEL, BIAS)
    inner = gated_unit(gate, up, KIND, LIMIT)
    tl.store(out + choice * N + n, inner.to(out.dtype.element_ty), mask=inside)


@triton.jit
def few_down_kernel(
    out, x, x_scale, data, scale, bias, chosen, weights, first, E, scale_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, CHANNEL: tl.constexpr,
    SIDE: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per token and `BLOCK_N` of its `N` outputs: the sum over its choices."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns: tl.constexpr = (K + SIDE - 1) // SIDE if SIDE > 0 else 0
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        choice = token * TOP_K + place
        expert = tl.load(chosen + choice) - first
        here = (expert >= 0) & (expert < E)
        inside = (n < N) & here
        part = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            vector = tl.load(x + choice * K + k, mask=(k < K) & here, other=0.0).to(tl.float32)
            part += read_tile(data + expert * N * K, n, inside, k, vector, scale + expert * scale_stride,
                              columns, K, SIDE)  # fmt: skip
        if ROUNDED:
            part *= tl.load(x_scale + choice, mask=here, other=0.0)
        part = finish_vector(part, scale + expert * scale_stride, bias + expert * N, n, inside, CHANNEL, BIAS)
        total += part * tl.load(weights + choice, mask=here, other=0.0)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def few_mlp(
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    weights: Tensor,
    chosen: Tensor,
    act: Swiglu,
    *,
    first: int = 0,
    shape: tuple[int, int, int] = (8, 512, 4),
) -> Tensor:
    """`grouped_mlp` for a few tokens.

    shape: `BLOCK_N`, `BLOCK_K` and warps, for measurements.
    """
    chosen, weights, (block_n, block_k, warps) = chosen.contiguous(), weights.contiguous(), shape
    (count, hidden, inside), top_k = down.data.shape, chosen.shape[1]
    tile = {"TOP_K": top_k, "BLOCK_N": block_n, "num_warps": warps}
    args, constants = weights_for_kernel(gate_up, x.contiguous())
    inner = torch.empty(chosen.numel(), inside, dtype=x.dtype, device=x.device)
    if down.rounds:  # it is rounded as a whole, and choices of other ranks' experts are never written
        inner.zero_()
    few_up_kernel[(chosen.numel(), triton.cdiv(inside, block_n))](
        inner, *args, chosen, first, count, gate_up.scale_stride, N=inside, K=hidden, KIND=KINDS[act.kind],
        LIMIT=act.limit, INTERLEAVED=act.interleaved, BLOCK_K=min(block_k, triton.next_power_of_2(hidden)),
        **tile, **constants,
    )  # fmt: skip
    args, constants = weights_for_kernel(down, inner)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    few_down_kernel[(len(x), triton.cdiv(hidden, block_n))](
        out, *args, chosen, weights, first, count, down.scale_stride, N=hidden, K=inside,
        BLOCK_K=min(block_k, triton.next_power_of_2(inside)), **tile, **constants,
    )  # fmt: skip
    return out


class GatheredWay(GroupedWay):
    """An `ExpertWay` for a few tokens."""

    def takes(self, tokens: int) -> bool:
        """See `ExpertWay.takes`."""
        return tokens <= FEW

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertWay`."""
        return few_mlp(x, self.gate_up, self.down, weights, chosen, self.act, first=self.first)

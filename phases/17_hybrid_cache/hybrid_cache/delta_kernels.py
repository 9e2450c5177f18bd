"""Gated DeltaNet in Triton: all between a layer's two projections. One launch each for decodes and prompts.

Of requests that compute one token, a program owns a key head, with the value heads that share its keys: their
channels of the convolution, and their states. So no other program reads what it updates in place, and every
number of a state crosses the memory bus once each way.

A prompt goes through `delta_rule.one_chunk` in small chunks, with the state in registers all the while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.models.config import DeltaConfig
from hybrid_cache.state_pool import StatePool
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.norms import NormWeights

CHUNK = 16
"""Tokens in a chunk, the fewest that a matrix product takes: more would be spent on the triangular system."""


@triton.jit
def unit(x):
    """`delta_rule.unit` of vectors along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def gates(row, live, head, a_log, dt_bias, H: tl.constexpr, SIDE: tl.constexpr):
    """Return the decay and the strength of a head's tokens, whose projections are in `row`."""
    b = tl.load(row + SIDE + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(row + SIDE + H + head, mask=live, other=0.0) + tl.load(dt_bias + head).to(
        tl.float32
    )
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * soft, 0.0)
    return decay, tl.sigmoid(b).to(row.dtype.element_ty).to(tl.float32)


@triton.jit
def finish(o, z, weight, eps, DV: tl.constexpr):
    """The norm of a head's outputs `[rows, DV_PAD]` and their gate, rounded as torch rounds them."""
    o = o.to(z.dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=-1, keep_dims=True) / DV + eps)
    o, z = (
        (o * scale * weight.to(tl.float32)[None, :]).to(z.dtype).to(tl.float32),
        z.to(tl.float32),
    )
    return o * z * tl.sigmoid(z)


@triton.jit
def inputs_at(
    x, kept, at, channel, mask, C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr
):
    """Load a request's inputs at some offsets, `[offsets, channels]`; negative ones are kept ones."""
    new, old = mask & (at >= 0)[:, None], mask & (at < 0)[:, None]
    fresh = tl.load(
        x + at[:, None].to(tl.int64) * WIDTH + channel[None, :], mask=new, other=0.0
    )
    return fresh + tl.load(
        kept + (W - 1 + at)[:, None] * C + channel[None, :], mask=old, other=0.0
    )


@triton.jit
def convolve(
    x, weight, kept, at, live, start,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of the channels from `start`: `[ROWS, PAD]` float32."""
    i = tl.arange(0, PAD)
    total = tl.zeros([ROWS, PAD], tl.float32)
    mask = live[:, None] & (i < SIZE)[None, :]
    for w in tl.static_range(W):
        factor = tl.load(weight + (start + i) * W + w, mask=i < SIZE, other=0.0).to(tl.float32)
        value = inputs_at(x, kept, at - (W - 1 - w), start + i, mask, C, W, WIDTH)
        total += value.to(tl.float32) * factor[None, :]
    return (
        (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)
    )  # as torch rounds it


@triton.jit
def shift(
    x, kept, source, boundary, into, cut, count, start,
    C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Keep the last `W - 1` inputs behind `cut` and behind `count` tokens, for the tokens that follow."""
    row, channel = tl.arange(0, W_PAD), start + tl.arange(0, PAD)
    mask = (row < W - 1)[:, None] & (tl.arange(0, PAD) < SIZE)[None, :]
    size: tl.constexpr = (W - 1) * C
    at_cut = inputs_at(
        x, kept + source * size, cut - (W - 1) + row, channel, mask, C, W, WIDTH
    )
    at_end = inputs_at(
        x, kept + source * size, count - (W - 1) + row, channel, mask, C, W, WIDTH
    )
    tl.debug_barrier()  # all threads have read what is overwritten
    to = kept + row[:, None] * C + channel[None, :]
    tl.store(to + boundary * size, at_cut, mask=tl.where(boundary >= 0, mask, False))
    tl.store(to + into * size, at_end, mask=mask)


@triton.jit
def step_kernel(
    out, x, weight, a_log, dt_bias, norm, states, kept, query_starts, step, requests, scale,
    eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per request and key head; requests of more than one token are left out.

    The state is loaded before the wait, since no kernel of this step has written it.
    """
    request, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    source, into = (
        tl.load(step + request).to(tl.int64),
        tl.load(step + 2 * requests + request).to(tl.int64),
    )
    if (count == 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        at = tl.zeros([1], tl.int32)
        i = tl.arange(0, DK_PAD)
        j = tl.arange(0, DV_PAD)
        live = at == 0
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        queries = key_head * DK
        keys = (KH + key_head) * DK
        size = H * DK * DV
        row, old = x + first * WIDTH, kept + source * (W - 1) * C
        place = key_head * GROUPS * DK * DV + i[:, None] * DV + j[None, :]
        state = tl.load(states + source * size + place, mask=mask, other=0.0)
        factor = tl.load(norm + j, mask=j < DV, other=0.0)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        q = (
            unit(convolve(row, weight, old, at, live, queries, C, W, WIDTH, 1, DK, DK_PAD))
            * scale
        )
        k = unit(convolve(row, weight, old, at, live, keys, C, W, WIDTH, 1, DK, DK_PAD))
        q, k = tl.trans(q), tl.trans(k)  # [DK_PAD, 1]
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values = 2 * KH * DK + head * DV
            v = convolve(row, weight, old, at, live, values, C, W, WIDTH, 1, DV, DV_PAD)
            decay, beta = gates(row + at, live, head, a_log, dt_bias, H, C + H * DV)
            z = tl.load(row + C + head * DV + j, mask=j < DV, other=0.0)[None, :]
            state *= tl.exp(decay)[:, None]
            state += k * ((v - tl.sum(state * k, axis=0)[None, :]) * beta[:, None])
            o = finish(tl.sum(state * q, axis=0)[None, :], z, factor, eps, DV)
            to = out + (first * H + head) * DV + j[None, :]
            tl.store(to, o.to(out.dtype.element_ty), mask=(j < DV)[None, :])
            tl.store(states + into * size + place, state, mask=mask)
            shift(row, kept, source, -1, into, 0, 1, values, C, W, W_PAD, WIDTH, DV, DV_PAD)
            place += DK * DV
            state = tl.load(
                states + source * size + place, mask=mask & (group + 1 < GROUPS), other=0.0
            )
        shift(row, kept, source, -1, into, 0, 1, queries, C, W, W_PAD, WIDTH, DK, DK_PAD)
        shift(row, kept, source, -1, into, 0, 1, keys, C, W, W_PAD, WIDTH, DK, DK_PAD)


@triton.jit
def solve(system, t, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of `1 - system`, strictly lower triangular: of blocks of 1, of 2, and so on, two by two."""
    inverse = (t[:, None] == t[None, :]).to(tl.float32)
    size = 1
    while size < CHUNK:
        half = t // size
        corner = (half[:, None] // 2 == half[None, :] // 2) & (half[:, None] > half[None, :])
        right = tl.dot(tl.where(corner, system, 0.0), inverse, input_precision=PRECISION)
        inverse += tl.dot(inverse, right, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def scan_kernel(
    out, x, weight, a_log, dt_bias, norm, states, kept, query_starts, step, requests, scale,
    eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per request and key head; requests of one token are left out."""
    request, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = (tl.load(query_starts + request + 1) - first).to(tl.int32)
    source, into = (
        tl.load(step + request).to(tl.int64),
        tl.load(step + 2 * requests + request).to(tl.int64),
    )
    if (count > 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        boundary = tl.load(step + requests + request).to(tl.int64)
        cut = tl.load(step + 3 * requests + request)
        t = tl.arange(0, CHUNK)
        i = tl.arange(0, DK_PAD)
        j = tl.arange(0, DV_PAD)
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        queries = key_head * DK
        keys = (KH + key_head) * DK
        size = H * DK * DV
        earlier, seen = t[:, None] > t[None, :], t[:, None] >= t[None, :]
        row, old = x + first * WIDTH, kept + source * (W - 1) * C
        factor = tl.load(norm + j, mask=j < DV, other=0.0)
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values, place = (
                2 * KH * DK + head * DV,
                head * (DK * DV) + i[:, None] * DV + j[None, :],
            )
            state = tl.load(states + source * size + place, mask=mask, other=0.0)
            for start in range(
                -((CHUNK - cut % CHUNK) % CHUNK), count, CHUNK
            ):  # a chunk ends at the cut
                at = start + t
                live, token = (at >= 0) & (at < count), row + at.to(tl.int64) * WIDTH
                q = convolve(
                    row, weight, old, at, live, queries, C, W, WIDTH, CHUNK, DK, DK_PAD
                )
                k = convolve(row, weight, old, at, live, keys, C, W, WIDTH, CHUNK, DK, DK_PAD)
                q, k = unit(q) * scale, unit(k)
                v = convolve(
                    row, weight, old, at, live, values, C, W, WIDTH, CHUNK, DV, DV_PAD
                )
                decay, beta = gates(token, live, head, a_log, dt_bias, H, C + H * DV)
                total = tl.cumsum(decay, axis=0)
                whole = tl.sum(decay, axis=0)
                beta = beta[:, None]
                since = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
                faded = tl.exp(total)[:, None]

                alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
                inverse = solve(
                    tl.where(earlier, -beta * since * alike, 0.0), t, CHUNK, PRECISION
                )
                wrong = beta * (v - faded * tl.dot(k, state, input_precision=PRECISION))
                writes = tl.dot(inverse, wrong, input_precision=PRECISION)

                scores = since * tl.dot(q, tl.trans(k), input_precision=PRECISION)
                o = faded * tl.dot(q, state, input_precision=PRECISION)
                o += tl.dot(scores, writes, input_precision=PRECISION)
                left = tl.trans(k * tl.exp(whole - total)[:, None])
                state = tl.exp(whole) * state + tl.dot(left, writes, input_precision=PRECISION)
                here = live[:, None] & (j < DV)[None, :]
                z = tl.load(token[:, None] + C + head * DV + j[None, :], mask=here, other=0.0)
                to = out + ((first + at) * H + head)[:, None] * DV + j[None, :]
                tl.store(to, finish(o, z, factor, eps, DV).to(out.dtype.element_ty), mask=here)
                if (start + CHUNK == cut) & (boundary >= 0):
                    tl.store(states + boundary * size + place, state, mask=mask)
            tl.store(states + into * size + place, state, mask=mask)
            shift(
                row,
                kept,
                source,
                boundary,
                into,
                cut,
                count,
                values,
                C,
                W,
                W_PAD,
                WIDTH,
                DV,
                DV_PAD,
            )
        shift(
            row,
            kept,
            source,
            boundary,
            into,
            cut,
            count,
            queries,
            C,
            W,
            W_PAD,
            WIDTH,
            DK,
            DK_PAD,
        )
        shift(
            row, kept, source, boundary, into, cut, count, keys, C, W, W_PAD, WIDTH, DK, DK_PAD
        )


class DeltaWeights(NamedTuple):
    """Weights between a layer's projections; the names are `GatedDeltaNet`'s."""

    layer: int
    config: DeltaConfig
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: NormWeights


Scan = Callable[[Tensor, StatePool, DeltaWeights, Tensor, dict[str, Any]], None]
"""Fills in the rows of requests with several tokens: `(out, pool, weights, x, sizes)`."""


def mix(pool: StatePool, weights: DeltaWeights, x: Tensor, scan: Scan | None) -> Tensor:
    """Map the first projection's outputs `[T, ...]` to the last one's inputs `[T, H Dv]`, a ragged batch.

    scan: computes prompts; None: every request computes one token.
    """
    layer = weights.config
    out = x.new_empty(len(x), layer.value_heads, layer.value_dim)
    sizes = {
        "KH": layer.key_heads, "GROUPS": layer.value_heads // layer.key_heads,
        "DK": layer.key_dim, "DK_PAD": max(16, triton.next_power_of_2(layer.key_dim)),
        "DV": layer.value_dim, "DV_PAD": max(16, triton.next_power_of_2(layer.value_dim)),
        "C": layer.channels, "W": layer.conv_width, "W_PAD": triton.next_power_of_2(layer.conv_width),
        "WIDTH": x.shape[1],
    }  # fmt: skip
    early = len(x) == 1 and dependent_launch(x.device)
    how = {"PDL": early, "num_warps": 8, **({"launch_pdl": True} if early else {})}
    step_kernel[pool.step.shape[1], layer.key_heads](
        *given(out, pool, weights, x), **sizes, **how
    )
    if scan is not None:
        scan(out, pool, weights, x, sizes)
    return out.view(len(x), -1)


def scan(
    out: Tensor, pool: StatePool, weights: DeltaWeights, x: Tensor, sizes: dict[str, Any]
) -> None:
    """Compute prompts chunk by chunk, in one kernel."""
    how = {
        "CHUNK": CHUNK,
        "PRECISION": "ieee" if x.dtype.itemsize == 4 else "tf32",
        "num_warps": 8,
    }
    scan_kernel[pool.step.shape[1], sizes["KH"]](*given(out, pool, weights, x), **sizes, **how)


def given(out: Tensor, pool: StatePool, weights: DeltaWeights, x: Tensor) -> tuple[Any, ...]:
    """The arguments of both kernels."""
    layer, config, *own, norm = weights
    states = pool.recurrent[pool.index[layer]], pool.conv[pool.index[layer]]
    step = pool.batch.query_starts, pool.step, pool.step.shape[1]
    return out, x, *own, norm.weight, *states, *step, config.key_dim**-0.5, norm.eps

"""Gated DeltaNet in Triton: all between a layer's two projections. A decode is one launch, a prompt is two.

Of requests that compute one token, a program owns a key head, with the value heads that share its keys: their
channels of the convolution, and their states. So no other program reads what it updates in place, and every
number of a state crosses the memory bus once each way.

A prompt goes through `delta_rule.one_chunk`. `prepare_kernel` computes for all chunks at once what does not
depend on the state: convolution, decays, and the inverse of the triangular system. `scan_kernel` then goes
from chunk to chunk with the state in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.models.config import DeltaConfig
from hybrid_cache.state_pool import StatePool
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.kernels.norms import NormWeights

CHUNK = 32
"""Tokens in a chunk: its system is solved row by row."""
MOST_PARTS = 16
"""Programs that prepare a request's chunks, for each key head."""


@triton.jit
def unit(x):
    """`delta_rule.unit` of vectors along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def silu(x, like):
    """SiLU in float32, rounded as torch rounds it."""
    return (x * tl.sigmoid(x)).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def gates(row, live, head, a_log, dt_bias, H: tl.constexpr, SIDE: tl.constexpr):
    """Return the decay and the strength of a head's tokens, whose projections are in `row`."""
    b = tl.load(row + SIDE + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(row + SIDE + H + head, mask=live, other=0.0).to(tl.float32)
    a += tl.load(dt_bias + head).to(tl.float32)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * soft, 0.0)
    return decay, tl.sigmoid(b).to(row.dtype.element_ty).to(tl.float32)


@triton.jit
def finish(o, z, weight, eps, DV: tl.constexpr):
    """The norm of a head's outputs `[rows, DV_PAD]` and their gate, rounded as torch rounds them."""
    o = o.to(z.dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=-1, keep_dims=True) / DV + eps)
    o, z = (o * scale * weight.to(tl.float32)[None, :]).to(z.dtype).to(tl.float32), z.to(tl.float32)
    return o * z * tl.sigmoid(z)


@triton.jit
def window(
    kept, weight, start, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, SIZE, PAD: tl.constexpr
):
    """Load the kept inputs of the channels from `start` and their weights, `[W_PAD, PAD]`; the newest's."""
    w, channel = tl.arange(0, W_PAD)[:, None], start + tl.arange(0, PAD)[None, :]
    mask = (w < W - 1) & (tl.arange(0, PAD) < SIZE)[None, :]
    old = tl.load(kept + w * C + channel, mask=mask, other=0.0)
    factor = tl.load(weight + channel * W + w, mask=mask, other=0.0)
    i = tl.arange(0, PAD)
    return old, factor, tl.load(weight + (start + i) * W + W - 1, mask=i < SIZE, other=0.0)


@triton.jit
def convolve_one(old, factor, last, x):
    """SiLU of the convolution of one token: `[1, PAD]`."""
    total = tl.sum(old.to(tl.float32) * factor.to(tl.float32), axis=0) + x.to(tl.float32) * last.to(
        tl.float32
    )
    return total[None, :]


@triton.jit
def push(kept, old, x, start, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, SIZE, PAD: tl.constexpr):
    """Keep the inputs but the oldest, and the newest."""
    w, i = tl.arange(0, W_PAD)[:, None], tl.arange(0, PAD)
    to = kept + (w - 1) * C + start + i[None, :]
    tl.store(to, old, mask=(w > 0) & (w < W - 1) & (i < SIZE)[None, :])
    tl.store(kept + (W - 2) * C + start + i, x, mask=(i < SIZE) & (W > 1))


@triton.jit
def step_kernel(
    out, x, weight, a_log, dt_bias, norm, states, kept, query_starts, step, requests, scale, eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per request and key head; requests of more than one token are left out.

    All that no kernel of this step writes is loaded before the wait: the state above all.
    """
    request, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    source, into = tl.load(step + request).to(tl.int64), tl.load(step + 2 * requests + request).to(tl.int64)
    if (count == 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        i, j = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        queries, keys = key_head * DK, (KH + key_head) * DK
        place = key_head * GROUPS * DK * DV + i[:, None] * DV + j[None, :]
        row, old = x + first * WIDTH, kept + source * (W - 1) * C
        state = tl.load(states + source * H * DK * DV + place, mask=mask, other=0.0)
        old_q, factor_q, last_q = window(old, weight, queries, C, W, W_PAD, DK, DK_PAD)
        old_k, factor_k, last_k = window(old, weight, keys, C, W, W_PAD, DK, DK_PAD)
        if PDL:
            gdc_wait()
        new_q = tl.load(row + queries + i, mask=i < DK, other=0.0)
        new_k = tl.load(row + keys + i, mask=i < DK, other=0.0)
        if PDL:
            gdc_launch_dependents()
        q = unit(silu(convolve_one(old_q, factor_q, last_q, new_q), x)) * scale
        k = unit(silu(convolve_one(old_k, factor_k, last_k, new_k), x))
        q, k = tl.trans(q), tl.trans(k)  # [DK_PAD, 1]
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values = 2 * KH * DK + head * DV
            old_v, factor_v, last_v = window(old, weight, values, C, W, W_PAD, DV, DV_PAD)
            new_v = tl.load(row + values + j, mask=j < DV, other=0.0)
            v = silu(convolve_one(old_v, factor_v, last_v, new_v), x)
            decay, beta = gates(row, count == 1, head, a_log, dt_bias, H, C + H * DV)
            state *= tl.exp(decay)
            state += k * (v - tl.sum(state * k, axis=0)[None, :]) * beta
            o = tl.sum(state * q, axis=0)[None, :]
            z = tl.load(row + C + head * DV + j, mask=j < DV, other=0.0)[None, :]
            o = finish(o, z, tl.load(norm + j, mask=j < DV, other=0.0), eps, DV)
            to = out + (first * H + head) * DV + j[None, :]
            tl.store(to, o.to(out.dtype.element_ty), mask=(j < DV)[None, :])
            tl.store(states + into * H * DK * DV + place, state, mask=mask)
            tl.debug_barrier()  # all threads have read what is overwritten
            push(kept + into * (W - 1) * C, old_v, new_v, values, C, W, W_PAD, DV, DV_PAD)
            place += DK * DV
            state = tl.load(
                states + source * H * DK * DV + place, mask=mask & (group + 1 < GROUPS), other=0.0
            )
        push(kept + into * (W - 1) * C, old_q, new_q, queries, C, W, W_PAD, DK, DK_PAD)
        push(kept + into * (W - 1) * C, old_k, new_k, keys, C, W, W_PAD, DK, DK_PAD)


@triton.jit
def inputs_at(x, kept, at, channel, mask, C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr):
    """Load a request's inputs at some offsets, `[offsets, channels]`; negative ones are kept ones."""
    new, old = mask & (at >= 0)[:, None], mask & (at < 0)[:, None]
    fresh = tl.load(x + at[:, None].to(tl.int64) * WIDTH + channel[None, :], mask=new, other=0.0)
    return fresh + tl.load(kept + (W - 1 + at)[:, None] * C + channel[None, :], mask=old, other=0.0)


@triton.jit
def convolve(
    x, weight, kept, at, live, start,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
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
    return silu(total, x)


@triton.jit
def shift(
    x, kept, source, boundary, into, cut, count, start,
    C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    PAD: tl.constexpr,
):  # fmt: skip
    """Keep the last `W - 1` inputs behind `cut` and behind `count` tokens, for the tokens that follow."""
    row, channel = tl.arange(0, W_PAD), start + tl.arange(0, PAD)
    mask = (row < W - 1)[:, None] & (tl.arange(0, PAD) < SIZE)[None, :]
    size: tl.constexpr = (W - 1) * C
    at_cut = inputs_at(x, kept + source * size, cut - (W - 1) + row, channel, mask, C, W, WIDTH)
    at_end = inputs_at(x, kept + source * size, count - (W - 1) + row, channel, mask, C, W, WIDTH)
    tl.debug_barrier()  # all threads have read what is overwritten
    to = kept + row[:, None] * C + channel[None, :]
    tl.store(to + boundary * size, at_cut, mask=mask & (boundary >= 0))
    tl.store(to + into * size, at_end, mask=mask)


@triton.jit
def prepare_kernel(
    q_out, k_out, v_out, solved, scores, totals, x, weight, a_log, dt_bias, kept, query_starts, step,
    requests, scale,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per request, key head and part of its chunks; requests of one token are left out."""
    request, key_head, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(2)
    first = tl.load(query_starts + request).to(tl.int64)
    count = (tl.load(query_starts + request + 1) - first).to(tl.int32)
    source, into = tl.load(step + request).to(tl.int64), tl.load(step + 2 * requests + request)
    if (count > 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        cut = tl.load(step + 3 * requests + request)
        t, i, j = tl.arange(0, CHUNK), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        earlier, seen = t[:, None] > t[None, :], t[:, None] >= t[None, :]
        row, old = x + first * WIDTH, kept + source * (W - 1) * C
        begin = -((CHUNK - cut % CHUNK) % CHUNK)  # so that a chunk ends at the boundary
        for start in range(begin + tl.program_id(2) * CHUNK, count, parts * CHUNK):
            at = start + t
            live, token = (at >= 0) & (at < count), first + at
            q = convolve(row, weight, old, at, live, key_head * DK, C, W, WIDTH, CHUNK, DK, DK_PAD)
            k = convolve(row, weight, old, at, live, (KH + key_head) * DK, C, W, WIDTH, CHUNK, DK, DK_PAD)
            q, k = (unit(q) * scale).to(q_out.dtype.element_ty), unit(k).to(q_out.dtype.element_ty)
            to = (token * KH + key_head)[:, None] * DK + i[None, :]
            tl.store(q_out + to, q, mask=live[:, None] & (i < DK)[None, :])
            tl.store(k_out + to, k, mask=live[:, None] & (i < DK)[None, :])
            alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            asked = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            for group in range(GROUPS):
                head = key_head * GROUPS + group
                values = 2 * KH * DK + head * DV
                v = convolve(row, weight, old, at, live, values, C, W, WIDTH, CHUNK, DV, DV_PAD)
                to = (token * H + head)[:, None] * DV + j[None, :]
                tl.store(v_out + to, v.to(v_out.dtype.element_ty), mask=live[:, None] & (j < DV)[None, :])
                decay, beta = gates(row + at.to(tl.int64) * WIDTH, live, head, a_log, dt_bias, H, C + H * DV)
                total = tl.cumsum(decay, axis=0)
                tl.store(totals + token * H + head, total, mask=live)
                since = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
                inverse = tl.where(earlier, -beta[:, None] * since * alike, 0.0)
                for at_row in range(1, CHUNK):  # forward substitution: rows before are the inverse's by now
                    here = (t == at_row)[:, None]
                    below = tl.sum(tl.where(here, inverse, 0.0), axis=0)
                    below += tl.sum(below[:, None] * inverse, axis=0)
                    inverse = tl.where(here, below[None, :], inverse)
                inverse = (inverse + (t[:, None] == t[None, :]).to(tl.float32)) * beta[None, :]
                to = (token * H + head)[:, None] * CHUNK + t[None, :]
                tl.store(solved + to, inverse.to(solved.dtype.element_ty), mask=live[:, None])
                tl.store(scores + to, (since * asked).to(scores.dtype.element_ty), mask=live[:, None])


@triton.jit
def scan_kernel(
    out, q_in, k_in, v_in, solved, scores, totals, x, norm, states, kept, query_starts, step, requests, eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per request and value head; requests of one token are left out."""
    request, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = (tl.load(query_starts + request + 1) - first).to(tl.int32)
    source, into = tl.load(step + request).to(tl.int64), tl.load(step + 2 * requests + request).to(tl.int64)
    if (count > 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        boundary = tl.load(step + requests + request).to(tl.int64)
        cut, key_head = tl.load(step + 3 * requests + request), head // GROUPS
        t, i, j = tl.arange(0, CHUNK), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        place, size = head * (DK * DV) + i[:, None] * DV + j[None, :], H * DK * DV
        weight, row = tl.load(norm + j, mask=j < DV, other=0.0), x + first * WIDTH
        state = tl.load(states + source * size + place, mask=mask, other=0.0)
        dtype = q_in.dtype.element_ty
        for start in range(-((CHUNK - cut % CHUNK) % CHUNK), count, CHUNK):
            at = start + t
            live, token = (at >= 0) & (at < count), first + at
            is_key, is_value = live[:, None] & (i < DK)[None, :], live[:, None] & (j < DV)[None, :]
            at_key = (token * KH + key_head)[:, None] * DK + i[None, :]
            at_chunk = (token * H + head)[:, None] * CHUNK + t[None, :]
            at_value = (token * H + head)[:, None] * DV + j[None, :]
            q = tl.load(q_in + at_key, mask=is_key, other=0.0)
            k = tl.load(k_in + at_key, mask=is_key, other=0.0)
            v = tl.load(v_in + at_value, mask=is_value, other=0.0).to(tl.float32)
            inverse = tl.load(solved + at_chunk, mask=live[:, None], other=0.0)
            score = tl.load(scores + at_chunk, mask=live[:, None], other=0.0)
            total = tl.load(totals + token * H + head, mask=live, other=0.0)
            z = tl.load(
                row + at[:, None].to(tl.int64) * WIDTH + C + head * DV + j[None, :], mask=is_value, other=0.0
            )
            whole, faded = tl.min(total, axis=0), tl.exp(total)[:, None]

            before = state.to(dtype)
            wrong = v - faded * tl.dot(k, before, input_precision=PRECISION)
            writes = tl.dot(inverse, wrong.to(dtype), input_precision=PRECISION).to(dtype)
            o = faded * tl.dot(q, before, input_precision=PRECISION)
            o += tl.dot(score, writes, input_precision=PRECISION)
            left = tl.trans((k.to(tl.float32) * tl.exp(whole - total)[:, None]).to(dtype))
            state = tl.exp(whole) * state + tl.dot(left, writes, input_precision=PRECISION)
            tl.store(out + at_value, finish(o, z, weight, eps, DV).to(out.dtype.element_ty), mask=is_value)
            if (start + CHUNK == cut) & (boundary >= 0):
                tl.store(states + boundary * size + place, state, mask=mask)
        tl.store(states + into * size + place, state, mask=mask)
        values = 2 * KH * DK + head * DV
        shift(row, kept, source, boundary, into, cut, count, values, C, W, W_PAD, WIDTH, DV, DV_PAD)
        if head % GROUPS == 0:
            queries, keys = key_head * DK, (KH + key_head) * DK
            shift(row, kept, source, boundary, into, cut, count, queries, C, W, W_PAD, WIDTH, DK, DK_PAD)
            shift(row, kept, source, boundary, into, cut, count, keys, C, W, W_PAD, WIDTH, DK, DK_PAD)


class DeltaWeights(NamedTuple):
    """What stands between a layer's projections; the names are `GatedDeltaNet`'s."""

    layer: int
    config: DeltaConfig
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: NormWeights


def mix(pool: StatePool, weights: DeltaWeights, x: Tensor, decodes: bool) -> Tensor:
    """What the first projection makes of a ragged batch `[T, ...]` -> what the last one reads, `[T, H Dv]`.

    decodes: True if every request computes one token.
    """
    layer, config, conv, *rates, (norm, eps, _) = weights
    index = pool.index[layer]
    requests, heads, keys = pool.step.shape[1], config.value_heads, config.key_heads
    shape = len(x), heads, config.value_dim
    out = x.new_empty(shape)
    scale, early = config.key_dim**-0.5, len(x) == 1 and dependent_launch(x.device)
    where = pool.batch.query_starts, pool.step, requests
    states, kept = pool.recurrent[index], pool.conv[index]
    sizes = {
        "KH": keys, "GROUPS": heads // keys, "C": config.channels, "W": config.conv_width,
        "DK": config.key_dim, "DK_PAD": max(16, triton.next_power_of_2(config.key_dim)),
        "DV": config.value_dim, "DV_PAD": max(16, triton.next_power_of_2(config.value_dim)),
        "WIDTH": x.shape[1],
    }  # fmt: skip
    width = {"W_PAD": triton.next_power_of_2(config.conv_width)}
    step_kernel[requests, keys](
        out, x, conv, *rates, norm, states, kept, *where, scale, eps,
        **sizes, **width, PDL=early, num_warps=8, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    if not decodes:
        chunked = {"CHUNK": CHUNK, "PRECISION": "ieee" if x.dtype.itemsize == 4 else "tf32"}
        q, k = (x.new_empty(len(x), keys, config.key_dim) for _ in range(2))
        solved, scores = (x.new_empty(len(x), heads, CHUNK) for _ in range(2))
        made = q, k, x.new_empty(shape), solved, scores, x.new_empty(shape[:2], dtype=torch.float32)
        parts = min(MOST_PARTS, triton.cdiv(len(x), CHUNK))
        prepare_kernel[requests, keys, parts](
            *made, x, conv, *rates, kept, *where, scale, **sizes, **chunked, num_warps=4
        )
        scan_kernel[requests, heads](
            out, *made, x, norm, states, kept, *where, eps,
            **sizes, **width, **chunked, num_warps=8,
        )  # fmt: skip
    return out.view(len(x), -1)

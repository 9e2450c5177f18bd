"""The mixer in Triton: one launch a layer where every request computes one token, two elsewhere.

A program owns a request and a key head, with the value heads that share its keys: their channels of the
convolution, and their states. So no other program reads what it updates in place, and every number of a state
crosses the memory bus once each way. `step_kernel` applies the rule once. `scan_kernel` goes through a prompt
in small chunks, as `delta_rule.one_chunk` does, with the state in registers all the while.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_cache.mixer import DeltaInputs
from hybrid_cache.state_pool import StatePool

CHUNK = 16
"""Tokens in a chunk, the fewest that a matrix product takes: more would be spent on the triangular system."""


@triton.jit
def inputs_at(x, kept, source, first, at, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Load a request's inputs at some offsets, `[offsets, channels]`; negative ones are in its slot."""
    new, old = mask & (at >= 0)[:, None], mask & (at < 0)[:, None]
    fresh = tl.load(x + (first + at)[:, None] * C + channel[None, :], mask=new, other=0.0)
    slot = kept + (source * (W - 1) + W - 1 + at)[:, None] * C
    return fresh + tl.load(slot + channel[None, :], mask=old, other=0.0)


@triton.jit
def convolve(
    x, weight, kept, source, first, at, live, start,
    C: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the convolution of the channels from `start`, `[ROWS, PAD]` float32."""
    i = tl.arange(0, PAD)
    total = tl.zeros([ROWS, PAD], tl.float32)
    mask = live[:, None] & (i < SIZE)[None, :]
    for w in tl.static_range(W):
        factor = tl.load(weight + (start + i) * W + w, mask=i < SIZE, other=0.0).to(tl.float32)
        value = inputs_at(x, kept, source, first, at - (W - 1 - w), start + i, mask, C, W)
        total += value.to(tl.float32) * factor[None, :]
    total = total * tl.sigmoid(total)
    return total.to(x.dtype.element_ty).to(tl.float32)  # as torch rounds it


@triton.jit
def shift(
    x, kept, source, boundary, into, first, cut, count, start,
    C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Keep the last `W - 1` inputs behind `cut` and behind `count` tokens, for the tokens that follow."""
    row, channel = tl.arange(0, W_PAD), start + tl.arange(0, PAD)
    mask = (row < W - 1)[:, None] & (tl.arange(0, PAD) < SIZE)[None, :]
    at_cut = inputs_at(x, kept, source, first, cut - (W - 1) + row, channel, mask, C, W)
    at_end = inputs_at(x, kept, source, first, count - (W - 1) + row, channel, mask, C, W)
    to = kept + row[:, None] * C + channel[None, :]
    tl.store(to + boundary * (W - 1) * C, at_cut, mask=mask & (boundary >= 0))
    tl.store(to + into * (W - 1) * C, at_end, mask=mask)


@triton.jit
def unit(x):
    """`delta_rule.unit` of vectors along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def step_kernel(
    out, x, weight, decay, beta, states, kept, query_starts, step, requests, scale,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """One program per request and key head; requests of more than one token are left out."""
    request, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    source, into = tl.load(step + request).to(tl.int64), tl.load(step + 2 * requests + request).to(tl.int64)
    if (count == 1) & (into >= 0):
        at = tl.zeros([1], tl.int32)
        i, j, live = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD), at == 0
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        queries, keys = key_head * DK, (KH + key_head) * DK
        q = convolve(x, weight, kept, source, first, at, live, queries, C, W, 1, DK, DK_PAD)
        k = convolve(x, weight, kept, source, first, at, live, keys, C, W, 1, DK, DK_PAD)
        q, k = tl.sum(unit(q), axis=0) * scale, tl.sum(unit(k), axis=0)
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values, token = 2 * KH * DK + head * DV, first * (KH * GROUPS) + head
            v = convolve(x, weight, kept, source, first, at, live, values, C, W, 1, DV, DV_PAD)
            place = head * (DK * DV) + i[:, None] * DV + j[None, :]
            size = KH * GROUPS * DK * DV
            state = tl.load(states + source * size + place, mask=mask, other=0.0)
            state *= tl.exp(tl.load(decay + token))
            known = tl.sum(state * k[:, None], axis=0)
            delta = (tl.sum(v, axis=0) - known) * tl.load(beta + token).to(tl.float32)
            state += k[:, None] * delta[None, :]
            o = tl.sum(state * q[:, None], axis=0)
            tl.store(states + into * size + place, state, mask=mask)
            tl.store(out + token * DV + j, o.to(out.dtype.element_ty), mask=j < DV)
            shift(x, kept, source, -1, into, first, 0, 1, values, C, W, W_PAD, DV, DV_PAD)
        shift(x, kept, source, -1, into, first, 0, 1, queries, C, W, W_PAD, DK, DK_PAD)
        shift(x, kept, source, -1, into, first, 0, 1, keys, C, W, W_PAD, DK, DK_PAD)


@triton.jit
def scan_kernel(
    out, x, weight, decay, beta, states, kept, query_starts, step, requests, scale,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per request and key head; requests of one token are left out."""
    request, key_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts + request).to(tl.int64)
    count = (tl.load(query_starts + request + 1) - first).to(tl.int32)
    source, into = tl.load(step + request).to(tl.int64), tl.load(step + 2 * requests + request).to(tl.int64)
    if (count > 1) & (into >= 0):
        boundary, cut = (
            tl.load(step + requests + request).to(tl.int64),
            tl.load(step + 3 * requests + request),
        )
        t, i, j = tl.arange(0, CHUNK), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        queries, keys = key_head * DK, (KH + key_head) * DK
        earlier, seen = t[:, None] > t[None, :], t[:, None] >= t[None, :]
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values = 2 * KH * DK + head * DV
            place = head * (DK * DV) + i[:, None] * DV + j[None, :]
            size = KH * GROUPS * DK * DV
            state = tl.load(states + source * size + place, mask=mask, other=0.0)
            start = -((CHUNK - cut % CHUNK) % CHUNK)  # so that a chunk ends at the boundary
            while start < count:
                at = start + t
                live = (at >= 0) & (at < count)
                q = convolve(x, weight, kept, source, first, at, live, queries, C, W, CHUNK, DK, DK_PAD)
                k = convolve(x, weight, kept, source, first, at, live, keys, C, W, CHUNK, DK, DK_PAD)
                v = convolve(x, weight, kept, source, first, at, live, values, C, W, CHUNK, DV, DV_PAD)
                q, k, token = unit(q) * scale, unit(k), (first + at) * (KH * GROUPS) + head
                b = tl.load(beta + token, mask=live, other=0.0).to(tl.float32)[:, None]
                g = tl.load(decay + token, mask=live, other=0.0)
                total, whole = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
                since = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
                faded = tl.exp(total)[:, None]

                inverse = tl.where(
                    earlier, -b * since * tl.dot(k, tl.trans(k), input_precision=PRECISION), 0.0
                )
                for row in range(1, CHUNK):  # forward substitution: the rows before are the inverse's by now
                    here = (t == row)[:, None]
                    old = tl.sum(tl.where(here, inverse, 0.0), axis=0)
                    new = old + tl.sum(old[:, None] * inverse, axis=0)
                    inverse = tl.where(here, new[None, :], inverse)
                inverse += (t[:, None] == t[None, :]).to(tl.float32)
                wrong = b * (v - faded * tl.dot(k, state, input_precision=PRECISION))
                writes = tl.dot(inverse, wrong, input_precision=PRECISION)

                scores = since * tl.dot(q, tl.trans(k), input_precision=PRECISION)
                o = faded * tl.dot(q, state, input_precision=PRECISION)
                o += tl.dot(scores, writes, input_precision=PRECISION)
                left = tl.trans(k * tl.exp(whole - total)[:, None])
                state = tl.exp(whole) * state + tl.dot(left, writes, input_precision=PRECISION)
                to = out + token[:, None] * DV + j[None, :]
                tl.store(to, o.to(out.dtype.element_ty), mask=live[:, None] & (j < DV)[None, :])
                start += CHUNK
                if (start == cut) & (boundary >= 0):
                    tl.store(states + boundary * size + place, state, mask=mask)
            tl.store(states + into * size + place, state, mask=mask)
            shift(x, kept, source, boundary, into, first, cut, count, values, C, W, W_PAD, DV, DV_PAD)
        shift(x, kept, source, boundary, into, first, cut, count, queries, C, W, W_PAD, DK, DK_PAD)
        shift(x, kept, source, boundary, into, first, cut, count, keys, C, W, W_PAD, DK, DK_PAD)


def mix_by_kernels(pool: StatePool, inputs: DeltaInputs, decodes: bool) -> Tensor:
    """`StatePool.mix` by kernels. decodes: True if every request computes one token."""
    layer, index, x = inputs.config, pool.index[inputs.layer], inputs.mixed.contiguous()
    out = x.new_empty(len(x), layer.value_heads, layer.value_dim)
    weight, decay, beta = (part.contiguous() for part in (inputs.conv, inputs.decay, inputs.beta))
    step = pool.step, pool.step.shape[1], layer.key_dim**-0.5
    given = (out, x, weight, decay, beta, pool.recurrent[index], pool.conv[index], pool.batch.query_starts)
    sizes = {
        "KH": layer.key_heads, "GROUPS": layer.value_heads // layer.key_heads,
        "DK": layer.key_dim, "DK_PAD": max(16, triton.next_power_of_2(layer.key_dim)),
        "DV": layer.value_dim, "DV_PAD": max(16, triton.next_power_of_2(layer.value_dim)),
        "C": layer.channels, "W": layer.conv_width, "W_PAD": triton.next_power_of_2(layer.conv_width),
        "num_warps": 8,
    }  # fmt: skip
    grid = pool.step.shape[1], layer.key_heads
    step_kernel[grid](*given, *step, **sizes)
    if not decodes:
        precision = "ieee" if x.dtype.itemsize == 4 else "tf32"
        scan_kernel[grid](*given, *step, **sizes, CHUNK=CHUNK, PRECISION=precision)
    return out

"""Gated DeltaNet's step of one token in Triton: all between a layer's two projections, in one launch.

A program owns a key head of a request, with the value heads that share its keys: their channels of the
convolution, and their recurrent states. So no other program reads what this program updates in place, and
every number of a state crosses the memory bus once each way.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.models.config import DeltaConfig
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.tiles import padded


@triton.jit
def unit(x):
    """Return vectors `x [..., D]` scaled to length 1: `x / sqrt(sum of squares + 1e-6)`, so 0 stays 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def gates(row, live, head, a_log, dt_bias, H: tl.constexpr, SIDE: tl.constexpr):
    """Return (logarithm of the decay, update strength beta) of each token for one head: float32 `[rows]`.

    row: pointers `[rows]` to the tokens' rows of the first projection's output; from SIDE on they hold betas
        and then decays of H heads, before activation.
    live: `[rows]`, True where there is a token. head: the head's number. a_log, dt_bias: `[H]`.
    """
    b = tl.load(row + SIDE + head, mask=live, other=0.0).to(tl.float32)
    a = tl.load(row + SIDE + H + head, mask=live, other=0.0) + tl.load(dt_bias + head).to(
        tl.float32
    )
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.where(live, -tl.exp(tl.load(a_log + head).to(tl.float32)) * soft, 0.0)
    return decay, tl.sigmoid(b).to(row.dtype.element_ty).to(tl.float32)


@triton.jit
def finish(o, z, weight, eps, DV: tl.constexpr):
    """Return a head's outputs `o [rows, DV_PAD]` normalized and gated: `norm(o) * silu(z)`, float32.

    z: `[rows, DV_PAD]`, the gate. weight: `[DV_PAD]`, eps: of the RMSNorm. Intermediate results are rounded
        to `z`'s dtype as in PyTorch.
    """
    o = o.to(z.dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, axis=-1, keep_dims=True) / DV + eps)
    o = (o * scale * weight.to(tl.float32)[None, :]).to(z.dtype).to(tl.float32)
    z = z.to(tl.float32)
    return o * z * tl.sigmoid(z)


@triton.jit
def inputs_at(
    x, kept, at, channel, mask, C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr
):
    """Load a request's convolution inputs at token offsets `at [n]` for channels `channel [m]`: `[n, m]`.

    x: pointer to the request's first row in the step, rows WIDTH apart. kept: pointer to the `[W - 1, C]`
        stored inputs before that row, which negative offsets read. mask: `[n, m]`, False: 0 is returned.
    """
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
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return SiLU of the causal convolution for SIZE channels from `start` on: `[rows, SIZE]` float32, SIZE
    padded to a power of two.

    x: pointer to the request's first row in the step, rows WIDTH apart. weight: `[C, W]`. kept: pointer to
        the `[W - 1, C]` stored inputs before that row. at: `[rows]`, the tokens' offsets from that row. live:
        `[rows]`, True where there is a token.
    """
    i = tl.arange(0, padded(SIZE))
    total = tl.zeros([at.shape[0], padded(SIZE)], tl.float32)
    mask = live[:, None] & (i < SIZE)[None, :]
    for w in tl.static_range(W):
        factor = tl.load(weight + (start + i) * W + w, mask=i < SIZE, other=0.0).to(tl.float32)
        value = inputs_at(x, kept, at - (W - 1 - w), start + i, mask, C, W, WIDTH)
        total += value.to(tl.float32) * factor[None, :]
    # As torch rounds it.
    return (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def shift(
    x, kept, source, boundary, into, cut, count, start,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the `W - 1` convolution inputs before token `cut`, and those before token `count`.

    Later steps continue the convolution from them.

    x: pointer to the request's first row in the step, rows WIDTH apart. kept: `[slots, W - 1, C]`, stored
        inputs: slot `source` is read, slot `boundary` gets those before `cut` (negative: none is written),
        and slot `into` those before `count`, the request's number of tokens in the step.
    start: first of SIZE channels.
    """
    row, i = tl.arange(0, triton.next_power_of_2(W)), tl.arange(0, padded(SIZE))
    channel = start + i
    mask = (row < W - 1)[:, None] & (i < SIZE)[None, :]
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
def work_of(query_starts, step, request, requests):
    """Return (first token, number of tokens, state slot to read, state slot to write) of a request.

    query_starts: `[requests + 1]`, each request's first token. step: `[4, requests]`, whose rows 0 and 2 have
        these slots. All four results are int64.
    """
    first = tl.load(query_starts + request).to(tl.int64)
    count = tl.load(query_starts + request + 1) - first
    source = tl.load(step + request).to(tl.int64)
    return first, count, source, tl.load(step + 2 * requests + request).to(tl.int64)


@triton.jit
def step_kernel(
    out, x, weight, a_log, dt_bias, norm, states, kept, query_starts, step, requests, scale,
    eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a Gated DeltaNet layer for one token and key head. One program per request and key head.

    Requests of more than one token are skipped. out: `[T, H, DV]`, normalized and gated; H = KH GROUPS.
    x: `[T, WIDTH]`, the first projection's output. weight: `[C, W]`, of the convolution. scale: factor of the
        queries.
    a_log, dt_bias: `[H]`, of the decay. norm, eps: `[DV]` weights of the output's norm and its epsilon.
        query_starts: `[requests + 1]`, each request's first token.
    states: `[slots, H, DK, DV]` float32. kept: `[slots, W - 1, C]`, the last convolution inputs of each state
        slot.
    step: `[4, requests]`, the slots to read and to write.
    KH: key heads, each shared by GROUPS value heads. C, W: channels and width of the convolution.
    PDL: programmatic dependent launch. The state is loaded before the wait for the kernel before, since no
        kernel of this step has written it.
    """
    request, key_head = tl.program_id(0), tl.program_id(1)
    first, count, source, into = work_of(query_starts, step, request, requests)
    if (count == 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        at = tl.zeros([1], tl.int32)
        i = tl.arange(0, padded(DK))
        j = tl.arange(0, padded(DV))
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
        q = unit(convolve(row, weight, old, at, live, queries, C, W, WIDTH, DK)) * scale
        k = unit(convolve(row, weight, old, at, live, keys, C, W, WIDTH, DK))
        q, k = tl.trans(q), tl.trans(k)  # [padded, 1]
        for group in range(GROUPS):
            head = key_head * GROUPS + group
            values = 2 * KH * DK + head * DV
            v = convolve(row, weight, old, at, live, values, C, W, WIDTH, DV)
            decay, beta = gates(row + at, live, head, a_log, dt_bias, H, C + H * DV)
            z = tl.load(row + C + head * DV + j, mask=j < DV, other=0.0)[None, :]
            state *= tl.exp(decay)[:, None]
            state += k * ((v - tl.sum(state * k, axis=0)[None, :]) * beta[:, None])
            o = finish(tl.sum(state * q, axis=0)[None, :], z, factor, eps, DV)
            to = out + (first * H + head) * DV + j[None, :]
            tl.store(to, o.to(out.dtype.element_ty), mask=(j < DV)[None, :])
            tl.store(states + into * size + place, state, mask=mask)
            shift(row, kept, source, -1, into, 0, 1, values, C, W, WIDTH, DV)
            place += DK * DV
            state = tl.load(
                states + source * size + place, mask=mask & (group + 1 < GROUPS), other=0.0
            )
        for part in tl.static_range(2):  # queries, keys
            shift(
                row, kept, source, -1, into, 0, 1, (part * KH + key_head) * DK,
                C, W, WIDTH, DK,
            )  # fmt: skip


class DeltaWeights(NamedTuple):
    """Weights of a Gated DeltaNet layer between its projections: convolution, decay and output norm.

    layer: the layer's index in the model. config: sizes. conv: `[C, W]`. a_log, dt_bias: `[H]`, of the decay.
        norm: RMSNorm of the output.
    """

    layer: int
    config: DeltaConfig
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: NormWeights

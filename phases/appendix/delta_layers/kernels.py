"""Kernels of Gated DeltaNet's prompts, of gated attention's gate, and of the lookups when a step begins.

A prompt is cut into chunks of `CHUNK` tokens. `prepare_kernel` makes queries, keys, values and the inverses
of each chunk's triangular system, with up to `MOST_PARTS` programs for a request's chunks; `scan_kernel` then
has only matrix products left, with the state in registers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybrid_cache.pool import HybridPool
from hybrid_cache.states.pool import StatePool
from paged_cache.attention import PagedBatch
from phases.appendix.delta_layers.step import (
    DeltaWeights,
    convolve,
    finish,
    gates,
    shift,
    step_kernel,
    unit,
    work_of,
)
from triton_paged_attention.hardware import dependent_launch
from triton_paged_attention.tiles import padded

CHUNK = 32
"""Tokens in a chunk."""
MOST_PARTS = 16
"""Programs that prepare a request's chunks, for each key head."""


@triton.jit
def solve(system, t, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of `1 - system`, `[CHUNK, CHUNK]`, for a strictly lower triangular `system`.

    It is built from the inverses of diagonal blocks of size 1, then 2, and so on. t: `arange(CHUNK)`.
    PRECISION: `tl.dot`'s `input_precision`.
    """
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
def prepare_kernel(
    q_out, k_out, v_out, solved, scores, totals, x, weight, a_log, dt_bias, kept, query_starts,
    step,
    requests, scale,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prepare chunks of prompts for one key head: q, k, v, decays, and each chunk's solved system.

    One program per request, key head and part of the request's chunks. Requests of one token are skipped.
    x: `[T, WIDTH]`, the first projection's output. weight: `[C, W]`, of the convolution. a_log, dt_bias:
        `[H]`, of the decay.
    q_out, k_out: `[T, KH, DK]`. v_out: `[T, H, DV]`, H = KH GROUPS. totals: `[T, H]`, sums of the logarithmic
        decays since the chunk began.
    solved, scores: `[T, H, CHUNK]`: inverted systems times beta; and products of queries and keys, decayed.
    kept: `[slots, W - 1, C]`, the last convolution inputs of each state slot. step: `[4, requests]`, the
        state slots to use.
    query_starts: `[requests + 1]`, each request's first token. scale: factor of the queries.
    KH: key heads, each shared by GROUPS value heads. C, W: channels and width of the convolution.
        PRECISION: `tl.dot`'s `input_precision`.
    """
    request = tl.program_id(0)
    key_head = tl.program_id(1)
    parts = tl.num_programs(2)
    first, count, source, into = work_of(query_starts, step, request, requests)
    count = count.to(tl.int32)
    if (count > 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        cut = tl.load(step + 3 * requests + request)
        t = tl.arange(0, CHUNK)
        i = tl.arange(0, padded(DK))
        j = tl.arange(0, padded(DV))
        earlier, seen = t[:, None] > t[None, :], t[:, None] >= t[None, :]
        row, old = x + first * WIDTH, kept + source * (W - 1) * C
        begin = -((CHUNK - cut % CHUNK) % CHUNK)  # so that a chunk ends at the boundary
        for start in range(begin + tl.program_id(2) * CHUNK, count, parts * CHUNK):
            at = start + t
            live, token = (at >= 0) & (at < count), first + at
            q = convolve(row, weight, old, at, live, key_head * DK, C, W, WIDTH, DK)
            k = convolve(
                row,
                weight,
                old,
                at,
                live,
                (KH + key_head) * DK,
                C,
                W,
                WIDTH,
                DK,
            )
            q = (unit(q) * scale).to(q_out.dtype.element_ty)
            k = unit(k).to(q_out.dtype.element_ty)
            at_key = (token * KH + key_head)[:, None] * DK + i[None, :]
            is_key = live[:, None] & (i < DK)[None, :]
            tl.store(q_out + at_key, q, mask=is_key)
            tl.store(k_out + at_key, k, mask=is_key)
            key_products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
            query_products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            for group in range(GROUPS):
                head = key_head * GROUPS + group
                values = 2 * KH * DK + head * DV
                v = convolve(row, weight, old, at, live, values, C, W, WIDTH, DV)
                at_value = (token * H + head)[:, None] * DV + j[None, :]
                is_value = live[:, None] & (j < DV)[None, :]
                tl.store(v_out + at_value, v.to(v_out.dtype.element_ty), mask=is_value)
                decay, beta = gates(
                    row + at.to(tl.int64) * WIDTH, live, head, a_log, dt_bias, H, C + H * DV
                )
                total = tl.cumsum(decay, axis=0)
                tl.store(totals + token * H + head, total, mask=live)
                since = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
                system = tl.where(earlier, -beta[:, None] * since * key_products, 0.0)
                inverse = solve(system, t, CHUNK, PRECISION) * beta[None, :]
                at_chunk = (token * H + head)[:, None] * CHUNK + t[None, :]
                tl.store(
                    solved + at_chunk, inverse.to(solved.dtype.element_ty), mask=live[:, None]
                )
                tl.store(
                    scores + at_chunk,
                    (since * query_products).to(scores.dtype.element_ty),
                    mask=live[:, None],
                )


@triton.jit
def scan_kernel(
    out, q_in, k_in, v_in, solved, scores, totals, x, norm, states, kept, query_starts, step,
    requests, eps,
    KH: tl.constexpr, GROUPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the recurrence over requests' prepared chunks for one value head; write outputs and new states.

    One program per request and value head. Requests of one token are skipped. out: `[T, H, DV]`, normalized
    and gated. q_in, k_in, v_in, solved, scores, totals: the outputs of `prepare_kernel`.
    x: `[T, WIDTH]`, the first projection's output, for the gate. norm: `[DV]`, weights of the output's norm,
        eps: its epsilon.
    states: `[slots, H, DK, DV]` float32. kept: `[slots, W - 1, C]`, the last convolution inputs of each state
        slot.
    step: `[4, requests]`, the slots to read and to write. query_starts: `[requests + 1]`, each request's
        first token.
    KH: key heads, each shared by GROUPS value heads. C, W: channels and width of the convolution.
        PRECISION: `tl.dot`'s `input_precision`.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    first, count, source, into = work_of(query_starts, step, request, requests)
    count = count.to(tl.int32)
    if (count > 1) & (into >= 0):
        H: tl.constexpr = KH * GROUPS
        boundary = tl.load(step + requests + request).to(tl.int64)
        cut, key_head = tl.load(step + 3 * requests + request), head // GROUPS
        t = tl.arange(0, CHUNK)
        i = tl.arange(0, padded(DK))
        j = tl.arange(0, padded(DV))
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        place, size = head * (DK * DV) + i[:, None] * DV + j[None, :], H * DK * DV
        weight, row = tl.load(norm + j, mask=j < DV, other=0.0), x + first * WIDTH
        state = tl.load(states + source * size + place, mask=mask, other=0.0)
        dtype = q_in.dtype.element_ty
        for start in range(-((CHUNK - cut % CHUNK) % CHUNK), count, CHUNK):
            at = start + t
            live, token = (at >= 0) & (at < count), first + at
            is_key = live[:, None] & (i < DK)[None, :]
            is_value = live[:, None] & (j < DV)[None, :]
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
                row + at[:, None].to(tl.int64) * WIDTH + C + head * DV + j[None, :],
                mask=is_value,
                other=0.0,
            )
            whole, faded = tl.min(total, axis=0), tl.exp(total)[:, None]

            before = state.to(dtype)
            wrong = v - faded * tl.dot(k, before, input_precision=PRECISION)
            writes = tl.dot(inverse, wrong.to(dtype), input_precision=PRECISION).to(dtype)
            o = faded * tl.dot(q, before, input_precision=PRECISION)
            o += tl.dot(score, writes, input_precision=PRECISION)
            left = tl.trans((k.to(tl.float32) * tl.exp(whole - total)[:, None]).to(dtype))
            state = tl.exp(whole) * state + tl.dot(left, writes, input_precision=PRECISION)
            tl.store(
                out + at_value,
                finish(o, z, weight, eps, DV).to(out.dtype.element_ty),
                mask=is_value,
            )
            if (start + CHUNK == cut) & (boundary >= 0):
                tl.store(states + boundary * size + place, state, mask=mask)
        tl.store(states + into * size + place, state, mask=mask)
        values = 2 * KH * DK + head * DV
        shift(
            row, kept, source, boundary, into, cut, count, values,
            C, W, WIDTH, DV,
        )  # fmt: skip
        if head % GROUPS == 0:
            for part in tl.static_range(2):  # queries, keys
                shift(
                    row, kept, source, boundary, into, cut, count, (part * KH + key_head) * DK,
                    C, W, WIDTH, DK,
                )  # fmt: skip


def mix(pool: StatePool, weights: DeltaWeights, x: Tensor, decodes: bool) -> Tensor:
    """Run a Gated DeltaNet layer between its projections; return its output `[T, H Dv]`.

    The recurrent states in `pool` are updated in place.

    pool: recurrent states, and which slots of them this step reads and writes.
    weights: those between the projections. x: `[T, ...]`, the first projection's outputs for the step's
        tokens, request after request.
    decodes: True if every request computes one token; otherwise two more kernels run for the longer requests.
    """
    number, config, conv, *rates, norm = weights
    states, kept = (part[pool.index[number]] for part in (pool.recurrent, pool.conv))
    tokens, keys = len(x), config.key_heads
    requests = pool.step.shape[1]
    where = pool.batch.query_starts, pool.step, requests
    out = x.new_empty(tokens, config.value_heads, config.value_dim)
    sizes = {
        "KH": keys, "GROUPS": config.value_heads // keys,
        "DK": config.key_dim, "DV": config.value_dim,
        "C": config.channels, "W": config.conv_width, "WIDTH": x.shape[1],
    }  # fmt: skip
    scale = config.key_dim**-0.5
    step_kernel[requests, keys](
        out, x, conv, *rates, norm.weight, states, kept, *where, scale, norm.eps, **sizes,
        num_warps=8, **dependent_launch(x.device, tokens == 1),
    )  # fmt: skip
    if not decodes:
        q, k = (x.new_empty(tokens, keys, config.key_dim) for _ in range(2))
        solved, scores = (x.new_empty(*out.shape[:2], CHUNK) for _ in range(2))
        totals = x.new_empty(out.shape[:2], dtype=torch.float32)
        made = q, k, torch.empty_like(out), solved, scores, totals
        chunked = {
            **sizes,
            "CHUNK": CHUNK,
            "PRECISION": "ieee" if x.dtype.itemsize == 4 else "tf32",
        }
        prepare_kernel[requests, keys, min(MOST_PARTS, triton.cdiv(tokens, CHUNK))](
            *made, x, conv, *rates, kept, *where, scale, **chunked, num_warps=4
        )
        scan_kernel[requests, config.value_heads](
            out, *made, x, norm.weight, states, kept, *where, norm.eps, **chunked, num_warps=8
        )
    return out.view(tokens, -1)


@triton.jit
def apply_gate_kernel(
    out, x, gate, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Write `x * sigmoid(gate)` to `out` for BLOCK numbers of a row. One program per row and BLOCK numbers.

    out, x: `[T, SIZE]`. gate: `[T, SIZE]`, rows `stride` numbers apart. PDL: programmatic dependent launch is
        on, so let the next kernel start early, since it reads only weights before it waits for this one.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0)
    share = tl.sigmoid(
        tl.load(gate + row * stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    )
    share = share.to(value.dtype).to(tl.float32)  # as torch rounds it
    tl.store(
        out + row * SIZE + i, (value.to(tl.float32) * share).to(value.dtype), mask=i < SIZE
    )


def apply_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)`, `[T, N]` like both inputs; the rows of `gate` may have any stride."""
    out, size = torch.empty_like(x), x.shape[-1]
    apply_gate_kernel[len(x), triton.cdiv(size, 1024)](
        out, x, gate, gate.stride(0),
        SIZE=size, BLOCK=1024, **dependent_launch(x.device, len(x) == 1),
    )  # fmt: skip
    return out


@triton.jit
def begin_kernel(
    tables, slots, step, page_tables, page_slots, query_starts, context_lens, blocks, states,
    tokens_after_snapshot,
    requests, tokens, width, pages, null,
    P: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Look up a step's blocks and state slots for every KV cache group. One program per request or token.

    A page is a number that stands for one block in each group; P is the tokens of a page, KINDS the
    number of groups. The snapshot boundary is the position whose state is kept; slot `null` has zeros, the
    state before a text. All tensors are int32.

    Writes: tables: `[KINDS, requests, width]`, block tables of the groups. slots: `[KINDS, tokens]`, where
        each token's key and value go: block times P plus offset in it. step: `[4, requests]`: state slot to
        read; slot for the state at the snapshot boundary (-1: none); slot for the last state (-1: padding,
        `null + 1`: drafts, whose state no one reads); tokens before the boundary.
    Reads: page_tables: `[requests, width]`, pages of each request. page_slots: `[tokens]`, page times P plus
        offset, -1: padding. blocks: `[KINDS, pages]`, the block of each page. query_starts: `[requests + 1]`,
        each request's first token. context_lens: `[requests]`. states: `[pages]`, the state slot of each
        page, or `null`. tokens_after_snapshot: `[pages]`, tokens of a step that ends in the page after its
        snapshot boundary; negative: they are drafts.
    """
    at = tl.program_id(0)
    if at < tokens:
        slot = tl.load(page_slots + at)
        page = tl.maximum(slot, 0) // P
        for kind in range(KINDS):
            block = tl.load(blocks + kind * pages + page).to(tl.int64)
            tl.store(
                slots + kind * tokens + at, tl.where(slot < 0, slot, block * P + slot % P)
            )
    if at < requests:
        table = page_tables + at.to(tl.int64) * width
        for first in range(0, width, BLOCK):
            i = first + tl.arange(0, BLOCK)
            page = tl.load(table + i, mask=i < width, other=0)
            for kind in range(KINDS):
                to = tables + (kind * requests + at).to(tl.int64) * width + i
                tl.store(to, tl.load(blocks + kind * pages + page), mask=i < width)
        end = tl.load(context_lens + at)
        count = tl.load(query_starts + at + 1) - tl.load(query_starts + at)
        last = tl.load(table + tl.maximum(end - 1, 0) // P)
        tail = tl.load(tokens_after_snapshot + last)
        cut, start = count - tl.abs(tail), end - count
        source = tl.load(states + tl.load(table + tl.maximum(start - 1, 0) // P))
        boundary = tl.load(states + tl.load(table + tl.maximum(start + cut - 1, 0) // P))
        saves = (count > 1) & (end > 0) & (tail != 0) & (boundary != null)
        into = tl.where((count > 1) & (tail < 0), null + 1, tl.load(states + last))
        tl.store(step + at, tl.where(start > 0, source, null))
        tl.store(step + requests + at, tl.where(saves, boundary, -1))
        tl.store(step + 2 * requests + at, tl.where((count > 0) & (end > 0), into, -1))
        tl.store(step + 3 * requests + at, tl.where(saves, cut, 0))


def begin(pool: HybridPool, batch: PagedBatch) -> list[PagedBatch]:
    """Return a step's batch once for each KV cache group, with that group's block tables and slots.

    One kernel looks them up, and also writes into `pool` which state slots the step reads and writes.

    pool: blocks and recurrent states. batch: the step's; its tables hold pages, numbers that stand for one
        block in each group.
    """
    states = pool.states
    kinds = len(pool.page_blocks)
    tokens = len(batch.slots)
    assert states is not None
    requests, width = batch.block_tables.shape
    tables = batch.block_tables.new_empty(kinds, requests, width)
    slots = batch.slots.new_empty(kinds, tokens)
    states.start(batch, pool.page_blocks.new_empty(4, requests))
    begin_kernel[(max(requests, tokens),)](
        tables, slots, states.step, batch.block_tables, batch.slots, batch.query_starts,
        batch.context_lens, pool.page_blocks, states.page_slots, states.page_tokens_after,
        requests, tokens, width, pool.page_blocks.shape[1], states.null,
        P=pool.block_size, KINDS=kinds, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return [
        replace(batch, block_tables=t, slots=s) for t, s in zip(tables, slots, strict=True)
    ]

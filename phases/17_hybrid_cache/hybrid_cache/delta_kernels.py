"""The mixer in Triton: two launches a layer where every request computes one token, four elsewhere.

`conv_kernel` convolves all tokens. `step_kernel` applies the rule to requests of one token: a program reads a
tile of one head's state, decays it, corrects it, reads it and writes it, so the state crosses the memory bus
once each way. Longer requests are cut into chunks. `solve_kernel` inverts each chunk's triangular system
(`delta_rule.one_chunk`), all chunks at once, since none needs the state; `scan_kernel` then carries the state
through a request's chunks. Both that write states also move the convolution's last inputs on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_cache.delta_rule import CHUNK
from hybrid_cache.mixer import DeltaInputs, DeltaSpec
from hybrid_cache.state_pool import StatePool
from paged_cache.attention import PagedBatch

TILE = 32
"""Values of a head in one program: its part of the state is `[Dk, TILE]`."""


@triton.jit
def conv_kernel(
    out, x, weight, state, requests, query_starts, step, tokens,
    C: tl.constexpr, W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens and channels: `x [T, C]` -> SiLU of the convolution."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live, inside = token < tokens, channel < C
    request = tl.load(requests + token, mask=live, other=0)
    offset = token - tl.load(query_starts + request, mask=live, other=0)
    source = tl.load(step + request, mask=live, other=0).to(tl.int64)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for w in tl.static_range(W):
        back = W - 1 - w
        new = live & (offset >= back)
        fresh = tl.load(
            x + (token - back).to(tl.int64)[:, None] * C + channel[None, :],
            mask=new[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        kept = tl.load(
            state + (source * (W - 1) + W - 1 + offset - back)[:, None] * C + channel[None, :],
            mask=(live & (offset < back))[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        factor = tl.load(weight + channel * W + w, mask=inside, other=0.0).to(tl.float32)
        total += (fresh + kept).to(tl.float32) * factor[None, :]
    total = total * tl.sigmoid(total)
    at = token.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def last_inputs(x, state, first, count, source, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """Return the inputs of the last `W - 1` of a request's first `count` tokens, and rows of padding."""
    j = tl.arange(0, triton.next_power_of_2(W))
    offset = count - (W - 1) + j
    fresh = tl.load(
        x + (first + offset).to(tl.int64)[:, None] * C + channel[None, :],
        mask=((offset >= 0) & (j < W - 1))[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    kept = tl.load(
        state + (source * (W - 1) + W - 1 + offset)[:, None] * C + channel[None, :],
        mask=((offset < 0) & (j < W - 1))[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    return fresh + kept


@triton.jit
def keep_inputs(state, into, inputs, channel, inside, C: tl.constexpr, W: tl.constexpr):
    """Write what `last_inputs` has returned to a slot, or nowhere."""
    j = tl.arange(0, triton.next_power_of_2(W))
    at = (into * (W - 1) + j)[:, None] * C + channel[None, :]
    tl.store(state + at, inputs, mask=((j < W - 1) & (into >= 0))[:, None] & inside[None, :])


@triton.jit
def unit(x):
    """`delta_rule.unit` of vectors along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def step_kernel(
    out, mixed, x, decay, beta, states, conv, query_starts, step, requests, scale,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One program per request, head and tile of its values; requests of more than a token are left out."""
    request, part = tl.program_id(0), tl.program_id(1)
    head, tile = part // TILES, part % TILES
    first = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - first
    into = tl.load(step + 2 * requests + request).to(tl.int64)
    if (count == 1) & (into >= 0):
        source = tl.load(step + request).to(tl.int64)
        first = first.to(tl.int64)
        channel = part * SHARE + tl.arange(0, triton.next_power_of_2(SHARE))
        inside = (channel < (part + 1) * SHARE) & (channel < C)
        inputs = last_inputs(x, conv, first, count, source, channel, inside, C, W)

        i, j = tl.arange(0, DK_PAD), tile * TILE + tl.arange(0, TILE)
        key = first * C + (head // (H // KH)) * DK + i
        q = tl.load(mixed + key, mask=i < DK, other=0.0).to(tl.float32)
        k = tl.load(mixed + key + KH * DK, mask=i < DK, other=0.0).to(tl.float32)
        v = tl.load(mixed + first * C + 2 * KH * DK + head * DV + j, mask=j < DV, other=0.0).to(tl.float32)
        q, k = unit(q) * scale, unit(k)
        at = (head * DK + i)[:, None] * DV + j[None, :]
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        state = tl.load(states + source * (H * DK * DV) + at, mask=mask, other=0.0)
        state *= tl.exp(tl.load(decay + first * H + head))
        known = tl.sum(state * k[:, None], axis=0)
        delta = (v - known) * tl.load(beta + first * H + head).to(tl.float32)
        state += k[:, None] * delta[None, :]
        o = tl.sum(state * q[:, None], axis=0)
        tl.store(states + into * (H * DK * DV) + at, state, mask=mask)
        tl.store(out + (first * H + head) * DV + j, o.to(out.dtype.element_ty), mask=j < DV)
        keep_inputs(conv, into, inputs, channel, inside, C, W)


@triton.jit
def solve_kernel(
    u, w, mixed, decay, beta, chunks, count,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per chunk and head: what the chunk writes is `u - w @ state`."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(chunks + chunk).to(tl.int64), tl.load(chunks + count + chunk)
    if length > 0:
        t, i, j = tl.arange(0, CHUNK), tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
        live, token = t < length, first + t
        key = token[:, None] * C + KH * DK + (head // (H // KH)) * DK + i[None, :]
        value = token[:, None] * C + 2 * KH * DK + head * DV + j[None, :]
        keys, values = live[:, None] & (i < DK)[None, :], live[:, None] & (j < DV)[None, :]
        k = unit(tl.load(mixed + key, mask=keys, other=0.0).to(tl.float32))
        v = tl.load(mixed + value, mask=values, other=0.0).to(tl.float32)
        b = tl.load(beta + token * H + head, mask=live, other=0.0).to(tl.float32)
        total = tl.cumsum(tl.load(decay + token * H + head, mask=live, other=0.0), axis=0)

        earlier = t[:, None] > t[None, :]
        since = tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))
        inverse = -b[:, None] * since * tl.dot(k, tl.trans(k), input_precision=PRECISION)
        for row in range(1, CHUNK):  # forward substitution: the rows before are those of the inverse by now
            here = (t == row)[:, None]
            old = tl.sum(tl.where(here, inverse, 0.0), axis=0)
            inverse = tl.where(here, old[None, :] + tl.sum(old[:, None] * inverse, axis=0)[None, :], inverse)
        inverse += (t[:, None] == t[None, :]).to(tl.float32)
        writes = tl.dot(inverse, b[:, None] * v, input_precision=PRECISION)
        reads = tl.dot(inverse, (b * tl.exp(total))[:, None] * k, input_precision=PRECISION)
        at = (token * H + head)[:, None]
        tl.store(u + at * DV + j[None, :], writes.to(u.dtype.element_ty), mask=values)
        tl.store(w + at * DK + i[None, :], reads.to(w.dtype.element_ty), mask=keys)


@triton.jit
def scan_kernel(
    out, u, w, mixed, x, decay, states, conv, query_starts, step, cuts, requests, scale,
    KH: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SHARE: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per request, head and tile of its values; requests of one token are left out."""
    part, request = tl.program_id(0), tl.program_id(1)
    head, tile = part // TILES, part % TILES
    first = tl.load(query_starts + request).to(tl.int64)
    count = (tl.load(query_starts + request + 1) - first).to(tl.int32)
    into = tl.load(step + 2 * requests + request).to(tl.int64)
    if (count > 1) & (into >= 0):
        source, boundary = (
            tl.load(step + request).to(tl.int64),
            tl.load(step + requests + request).to(tl.int64),
        )
        cut = tl.load(cuts + request)
        channel = part * SHARE + tl.arange(0, triton.next_power_of_2(SHARE))
        inside = (channel < (part + 1) * SHARE) & (channel < C)
        at_cut = last_inputs(x, conv, first, cut, source, channel, inside, C, W)
        at_end = last_inputs(x, conv, first, count, source, channel, inside, C, W)

        t, i, j = tl.arange(0, CHUNK), tl.arange(0, DK_PAD), tile * TILE + tl.arange(0, TILE)
        at = (head * DK + i)[:, None] * DV + j[None, :]
        mask = (i < DK)[:, None] & (j < DV)[None, :]
        state = tl.load(states + source * (H * DK * DV) + at, mask=mask, other=0.0)
        start = -((CHUNK - cut % CHUNK) % CHUNK)  # so that a chunk ends at the boundary
        while start < count:
            offset = start + t
            live, token = (offset >= 0) & (offset < count), first + offset
            keys, values = live[:, None] & (i < DK)[None, :], live[:, None] & (j < DV)[None, :]
            query = token[:, None] * C + (head // (H // KH)) * DK + i[None, :]
            q = unit(tl.load(mixed + query, mask=keys, other=0.0).to(tl.float32)) * scale
            k = unit(tl.load(mixed + query + KH * DK, mask=keys, other=0.0).to(tl.float32))
            place = (token * H + head)[:, None]
            writes = tl.load(u + place * DV + j[None, :], mask=values, other=0.0).to(tl.float32)
            reads = tl.load(w + place * DK + i[None, :], mask=keys, other=0.0).to(tl.float32)
            g = tl.load(decay + token * H + head, mask=live, other=0.0)
            total, whole = tl.cumsum(g, axis=0), tl.sum(g, axis=0)

            writes -= tl.dot(reads, state, input_precision=PRECISION)
            seen = t[:, None] >= t[None, :]
            since = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
            scores = since * tl.dot(q, tl.trans(k), input_precision=PRECISION)
            o = tl.exp(total)[:, None] * tl.dot(q, state, input_precision=PRECISION)
            o += tl.dot(scores, writes, input_precision=PRECISION)
            left = tl.trans(k * tl.exp(whole - total)[:, None])
            state = tl.exp(whole) * state + tl.dot(left, writes, input_precision=PRECISION)
            tl.store(out + place * DV + j[None, :], o.to(out.dtype.element_ty), mask=values)
            start += CHUNK
            if (start == cut) & (boundary >= 0):
                tl.store(states + boundary * (H * DK * DV) + at, state, mask=mask)
        tl.store(states + into * (H * DK * DV) + at, state, mask=mask)
        keep_inputs(conv, boundary, at_cut, channel, inside, C, W)
        keep_inputs(conv, into, at_end, channel, inside, C, W)


class KernelMixer:
    """`StatePool` with kernels; all that they need of a step is found on the device, once a step."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def begin(self, batch: PagedBatch, decodes: bool) -> None:
        """Start a step. decodes: True if every request computes one token."""
        self.pool.begin(batch)
        self.batch, self.chunks = batch, None
        tokens = torch.arange(len(batch.input_ids), dtype=torch.int32, device=batch.positions.device)
        if decodes:
            self.requests = tokens
            return
        starts, requests = batch.query_starts, len(batch.context_lens)
        self.requests = _owners(starts[1:], tokens).clamp(max=requests - 1)
        # A chunk ends at the boundary where a state is saved, so the first may be short.
        counts, ends = starts.diff(), batch.context_lens
        size = self.pool.block_size
        cuts = counts - ends + (ends - 1).div(size, rounding_mode="floor") * size
        self.cuts = torch.where(self.pool.step[1] >= 0, cuts, 0).int()
        before = -self.cuts % CHUNK
        each = torch.where(counts > 1, (counts + before + CHUNK - 1) // CHUNK, 0)
        most = len(tokens) // CHUNK + 2 * requests
        chunk = torch.arange(most, dtype=torch.int32, device=tokens.device)
        totals = each.cumsum(0, dtype=torch.int32)
        owner = _owners(totals, chunk).clamp(max=requests - 1)
        offset = (chunk - totals[owner] + each[owner]) * CHUNK - before[owner]
        last = torch.minimum(offset + CHUNK, counts[owner])
        offset = offset.clamp(min=0)
        length = torch.where(chunk < totals[-1], last - offset, 0)
        self.chunks = torch.stack((starts[owner] + offset, length)).int()  # first token, tokens

    def mix(self, layer: DeltaSpec, inputs: DeltaInputs) -> Tensor:
        """See `Mixer.mix`, for a ragged batch."""
        pool, starts, step = self.pool, self.batch.query_starts, self.pool.step
        index, x, scale = pool.index[layer.index], inputs.mixed.contiguous(), layer.key_dim**-0.5
        states, conv, (tokens, channels) = pool.recurrent[index], pool.conv[index], x.shape
        heads, values, requests = layer.value_heads, layer.value_dim, step.shape[1]
        mixed, out = torch.empty_like(x), x.new_empty(tokens, heads, values)
        block_t = 1 if self.chunks is None else 16
        conv_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(channels, 256))](
            mixed, x, inputs.conv.contiguous(), conv, self.requests, starts, step, tokens,
            C=channels, W=layer.conv_width, BLOCK_T=block_t, BLOCK_C=256,
        )  # fmt: skip
        decay, beta = inputs.decay.contiguous(), inputs.beta.contiguous()
        tiles = triton.cdiv(values, TILE)
        sizes = {
            "KH": layer.key_heads, "H": heads, "DK": layer.key_dim, "DV": values, "C": channels,
            "DK_PAD": max(16, triton.next_power_of_2(layer.key_dim)),
        }  # fmt: skip
        parts = {"TILE": TILE, "TILES": tiles, "W": layer.conv_width}
        parts["SHARE"] = triton.cdiv(channels, heads * tiles)
        if self.chunks is not None:
            precision = "ieee" if x.dtype == torch.float32 else "tf32"
            u, w = x.new_empty(tokens, heads, values), x.new_empty(tokens, heads, layer.key_dim)
            solve_kernel[(self.chunks.shape[1], heads)](
                u, w, mixed, decay, beta, self.chunks, self.chunks.shape[1], **sizes,
                DV_PAD=max(16, triton.next_power_of_2(values)), CHUNK=CHUNK, PRECISION=precision,
            )  # fmt: skip
            scan_kernel[(heads * tiles, requests)](
                out, u, w, mixed, x, decay, states, conv, starts, step, self.cuts, requests, scale,
                **sizes, **parts, CHUNK=CHUNK, PRECISION=precision, num_warps=8,
            )  # fmt: skip
        step_kernel[(requests, heads * tiles)](
            out, mixed, x, decay, beta, states, conv, starts, step, requests, scale, **sizes, **parts,
        )  # fmt: skip
        return out


def _owners(ends: Tensor, items: Tensor) -> Tensor:
    """Return which of the ranges that end at `ends` each item lies in."""
    return torch.searchsorted(ends, items, right=True, out_int32=True)

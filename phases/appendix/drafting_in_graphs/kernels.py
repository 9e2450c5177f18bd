"""Work of a step that verifies and drafts between its layers, one small kernel each and one program per
request. In torch these would be thirty kernels, a tenth of a small model's step.

Every step has `K` drafts a request, the newest token before them: `K + 1` places. `given [4, B]` int64 has
each request's row (-1: padding), its row at the drafter, by how much its positions there are smaller, and the
length of its prompt.

N-grams are looked up on the device, which has the whole text of each request in its row: no index is needed.
A thousand threads read a thousand places at once, in the time of a small kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from speculative.ngram import MOST_TOKENS
from triton_paged_attention.hardware import dependent_launch

AT_ONCE = 1024
"""StepPositions that are compared at once."""


@triton.jit
def positions_kernel(
    given, next_at, at, rows, token_rows, token_at, steps, contexts,
    small_rows, small_token_rows, small_at, small_contexts, size, K: tl.constexpr,
):  # fmt: skip
    """Work out where each request stands, and what follows for the model's inputs and the drafter's."""
    i = tl.program_id(0)
    row, small_row = tl.load(given + i), tl.load(given + size + i)
    base, prompt = tl.load(given + 2 * size + i), tl.load(given + 3 * size + i)
    real = row >= 0
    row = tl.maximum(row, 0)
    start = tl.where(real, tl.load(next_at + row), -1)
    tl.store(at + i, start)
    tl.store(rows + i, row)
    tl.store(small_rows + i, small_row)
    # Padding attends to whatever lies in row 0: it is stored nowhere, and finite.
    tl.store(contexts + i, tl.where(real, start + K + 1, K + 1).to(tl.int32))
    tl.store(small_contexts + i, tl.where(real, start + K + 2 - base, K + 1).to(tl.int32))
    for j in tl.static_range(K + 1):
        place = i * (K + 1) + j
        tl.store(token_rows + place, row)
        tl.store(token_at + place, tl.where(real, start + j, -1))
        tl.store(steps + place, start + 1 + j - prompt)
        tl.store(small_token_rows + place, small_row)
        tl.store(small_at + place, tl.where(real, start + 1 + j - base, -1))


@triton.jit
def accept_kernel(
    sampled, ids, at, rows, given, tokens, next_at, host_output, picked, draft_steps,
    chain_rows, chain_at, chain_contexts, max_len, size, K: tl.constexpr,
):  # fmt: skip
    """Compare drafts with what was sampled in their places, keep what agrees, and move on behind it.

    With that it is known, too, where all drafts will stand.
    """
    i = tl.program_id(0)
    start = tl.load(at + i)
    row = tl.load(rows + i)
    prompt = tl.load(given + 3 * size + i)
    small_row, base = tl.load(given + size + i), tl.load(given + 2 * size + i)
    real = start >= 0
    right = 0
    same = 1
    for j in tl.static_range(K):
        said = tl.load(sampled + i * (K + 1) + j)
        same = same * (said == tl.load(ids + i * (K + 1) + j + 1)).to(tl.int32)
        right += same
    for j in tl.static_range(K + 1):
        said = tl.load(sampled + i * (K + 1) + j)
        tl.store(host_output + i * (2 * K + 2) + 1 + j, said)
        tl.store(tokens + row * max_len + start + 1 + j, said, mask=real & (j <= right))
    tl.store(host_output + i * (2 * K + 2), right)
    tl.store(picked + i, i * (K + 1) + right)
    for j in tl.static_range(K):
        tl.store(draft_steps + j * size + i, start + 2 + right + j - prompt)
    for j in tl.static_range(1, K):
        place = (j - 1) * size + i
        position = tl.where(real, start + 1 + right + j - base, -1)
        tl.store(chain_rows + place, small_row)
        tl.store(chain_at + place, position)
        tl.store(chain_contexts + place, (position + 1).to(tl.int32))
    tl.store(next_at + row, start + 1 + right, mask=real)


@triton.jit
def next_inputs_kernel(
    drafts, names, at, rows, given, tokens, next_at, host_output, small_tokens, newest,
    max_len, small_len, size,
    K: tl.constexpr, D: tl.constexpr, NAMED: tl.constexpr,
):  # fmt: skip
    """Draft number `D` goes to the model's row, to be verified, and to the drafter's, to be gone on from."""
    i = tl.program_id(0)
    real = tl.load(at + i) >= 0
    row = tl.load(rows + i)
    small_row = tl.load(given + size + i)
    base = tl.load(given + 2 * size + i)
    place = tl.load(next_at + row) + 1 + D
    draft = tl.load(drafts + i)
    if NAMED:
        draft = tl.load(names + draft)
    tl.store(newest + i, draft)
    tl.store(host_output + i * (2 * K + 2) + K + 2 + D, draft)
    tl.store(tokens + row * max_len + place, draft, mask=real)
    tl.store(small_tokens + small_row * small_len + place - base, draft, mask=real)


@triton.jit
def side_by_side_kernel(
    out, first, second, weights, ids, eps, PARTS: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    INDEXED: tl.constexpr, NORM_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token and part of its row."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, SIZE_PAD)
    mask = i < SIZE
    weight = tl.load(weights + part * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if part == PARTS - 1:
        x = tl.load(second + token * SIZE + i, mask=mask, other=0.0)
    else:
        row = tl.load(ids + token) if INDEXED else token
        x = tl.load(first + (row * (PARTS - 1) + part) * SIZE + i, mask=mask, other=0.0)
    if NORM_LAST or part < PARTS - 1:
        full = x.to(tl.float32)
        x = (full * tl.rsqrt(tl.sum(full * full, axis=0) / SIZE + eps) * weight).to(x.dtype)
    tl.store(out + (token * PARTS + part) * SIZE + i, x, mask=mask)


@triton.jit
def look_up_kernel(
    at, rows, tokens, next_at, host_output, max_len,
    K: tl.constexpr, AT_ONCE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program per request: the longest of the last four, three and two tokens that stood here before."""
    i = tl.program_id(0)
    real = tl.load(at + i) >= 0
    row = tl.load(rows + i)
    text = tokens + row * max_len
    newest = tl.where(real, tl.load(next_at + row), 0)
    end = tl.load(text + newest)
    second = tl.load(text + newest - 1, mask=newest >= 1, other=-1)
    third = tl.load(text + newest - 2, mask=newest >= 2, other=-1)
    fourth = tl.load(text + newest - 3, mask=newest >= 3, other=-1)
    best = tl.full([AT_ONCE], -1, tl.int32)
    for first in range(tl.maximum(newest - MOST, 0), newest, AT_ONCE):
        place = first + tl.arange(0, AT_ONCE)
        here = place < newest
        same = tl.load(text + place, mask=here, other=-2) == end
        two = same & (tl.load(text + place - 1, mask=here & (place >= 1), other=-2) == second)
        three = two & (tl.load(text + place - 2, mask=here & (place >= 2), other=-2) == third)
        four = three & (
            tl.load(text + place - 3, mask=here & (place >= 3), other=-2) == fourth
        )
        agree = two.to(tl.int32) + three.to(tl.int32) + four.to(tl.int32)
        # More tokens agree, and of as many the last: the larger number.
        best = tl.maximum(best, tl.where(two, agree * 0x1000000 + place, -1).to(tl.int32))
    found = tl.max(best, axis=0)
    # Where nothing is found, the newest token again is as good a draft as any.
    follows = tl.where(found >= 0, (found & 0xFFFFFF) + 1, newest)
    period = newest + 1 - follows
    for j in tl.static_range(K):
        draft = tl.load(text + follows + j % period)
        tl.store(text + newest + 1 + j, draft, mask=real)
        tl.store(host_output + i * (2 * K + 2) + K + 2 + j, tl.where(found >= 0, draft, -1))


class StepPositions(NamedTuple):
    """Positions of everything in a step; one number a request, or `[B * (K + 1)]` for all its places.

    The order is `positions_kernel`'s. at, token_at and small_at: positions, -1 for padding.
    """

    at: Tensor  # [B] int64
    rows: Tensor  # [B] int64
    token_rows: Tensor
    token_at: Tensor
    steps: Tensor
    contexts: Tensor  # [B] int32
    small_rows: Tensor  # [B] int64; the drafter's, and so the next three
    small_token_rows: Tensor
    small_at: Tensor
    small_contexts: Tensor  # [B] int32


class Chain(NamedTuple):
    """Sources of the drafts; the last three are for all drafts but the first: `[(K - 1) * B]`."""

    picked: Tensor  # [B] int64, where among the places the last right one is
    draft_steps: Tensor  # [K, B] int64, the step number of each draft
    rows: Tensor  # int64
    at: Tensor  # int64, where the drafter computes the draft before it; -1: padding
    contexts: Tensor  # int32


class Step(NamedTuple):
    """Tensors of a step of `B` requests with `drafts` drafts each.

    told: how many drafts were right, all that was sampled, the drafts made since.
    """

    given: Tensor
    tokens: Tensor  # [R, max_len] int64
    next_at: Tensor  # [R] int64, the position of the newest token of each row
    host_output: Tensor  # [B, 2 * K + 2] int64
    places: StepPositions
    chain: Chain
    drafts: int

    def find_positions(self) -> None:
        """Fill in the places."""
        size = self.given.shape[1]
        positions_kernel[(size,)](
            self.given, self.next_at, *self.places, size, K=self.drafts, num_warps=1
        )

    def accept(self, sampled: Tensor, ids: Tensor) -> None:
        """Write the tokens that are kept behind the newest, move `next_at` on, and fill in the chain.

        sampled, ids: `[B * (K + 1)]` int64; ids are the newest token of each request and its drafts.
        """
        places, size = self.places, len(self.places.at)
        accept_kernel[(size,)](
            sampled, ids, places.at, places.rows, self.given, self.tokens, self.next_at,
            self.host_output,
            *self.chain, self.tokens.shape[1], size, K=self.drafts, num_warps=1,
        )  # fmt: skip

    def hand_on(
        self,
        made: Tensor,
        number: int,
        names: Tensor | None,
        small_tokens: Tensor,
        newest: Tensor,
    ) -> None:
        """Write one draft of each request where it will be read.

        made: `[B]` int64, drafts number `number` from 0, or where they stand in `names [N]`, token ids.
        small_tokens: `[R, max_len]` int64, the drafter's. newest: `[B]` int64, the drafts' token ids.
        """
        next_inputs_kernel[(len(made),)](
            made, made if names is None else names, self.places.at, self.places.rows,
            self.given, self.tokens,
            self.next_at, self.host_output, small_tokens, newest, self.tokens.shape[1],
            small_tokens.shape[1],
            len(made), K=self.drafts, D=number, NAMED=names is not None, num_warps=1,
        )  # fmt: skip

    def look_up(self) -> None:
        """Write drafts behind each request's newest token, by the rule of `ngram.NGramIndex`.

        Only the last `MOST_TOKENS` tokens are searched, or a long text would take longer than the step. Where
        no n-gram is found, the newest token is repeated there, and `host_output` says -1. Positions
        are below 2^24.
        """
        look_up_kernel[(len(self.places.at),)](
            self.places.at, self.places.rows, self.tokens, self.next_at, self.host_output,
            self.tokens.shape[1], K=self.drafts, AT_ONCE=AT_ONCE, MOST=MOST_TOKENS,
            num_warps=8,
        )  # fmt: skip


def side_by_side(
    first: Tensor,  # [rows, (parts - 1) * h]
    second: Tensor,  # [T, h]
    weights: Tensor,  # [parts, h]
    eps: float,
    *,
    ids: Tensor | None = None,  # [T] int64
    norm_last: bool = False,
) -> Tensor:
    """A row of `first` (`ids` says which; by default the rows in turn) and one of `second`, each part's
    RMSNorm applied, the last one's with `norm_last` only: `[T, parts * h]`.
    """
    (tokens, size), parts = second.shape, len(weights)
    out = torch.empty(tokens, parts * size, dtype=second.dtype, device=second.device)
    early, padded = dependent_launch(second.device), triton.next_power_of_2(size)
    side_by_side_kernel[(tokens, parts)](
        out, first, second.contiguous(), weights, out if ids is None else ids, eps,
        PARTS=parts, SIZE=size, SIZE_PAD=padded, INDEXED=ids is not None, NORM_LAST=norm_last,
        PDL=early,
        num_warps=min(8, max(1, padded // 256)), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out

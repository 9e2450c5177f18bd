"""N-grams looked up on the device, which has the whole text of each request in its row: no index is needed.

A host keeps an index because it reads one token after the other. A thousand threads read a thousand places
at once, so that all of a text is searched in the time of a small kernel, and no host has to hear of the
newest token first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from speculative.ngram import MOST_TOKENS

AT_ONCE = 1024
"""Places that are compared at once."""


@triton.jit
def look_up_kernel(
    at, rows, tokens, next_at, told, max_len, K: tl.constexpr, AT_ONCE: tl.constexpr, MOST: tl.constexpr,
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
        four = three & (tl.load(text + place - 3, mask=here & (place >= 3), other=-2) == fourth)
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
        tl.store(told + i * (2 * K + 2) + K + 2 + j, tl.where(found >= 0, draft, -1))


def look_up(
    at: Tensor,  # [B] int64, -1: padding
    rows: Tensor,  # [B] int64
    tokens: Tensor,  # [R, max_len] int64
    next_at: Tensor,  # [R] int64, the position of the newest token of each row
    told: Tensor,  # [B, 2 * K + 2] int64, see `kernels.accept`
    drafts: int,
) -> None:
    """Write drafts behind each request's newest token, by the rule of `ngram.NGramIndex`.

    Only the last `MOST_TOKENS` tokens are searched, or a long text would take longer than the step. Where no
    n-gram is found, the newest token is repeated there, and `told` says -1.
    """
    if tokens.shape[1] >= 1 << 24:
        raise ValueError(f"rows have {tokens.shape[1]:,} tokens, but places must fit into 24 bits")
    look_up_kernel[(len(at),)](
        at, rows, tokens, next_at, told, tokens.shape[1], K=drafts, AT_ONCE=AT_ONCE, MOST=MOST_TOKENS,
        num_warps=8,
    )  # fmt: skip

"""What a step that verifies and drafts does between its layers, one small kernel each and one program per
request. In torch these would be thirty kernels, a tenth of a small model's step.

Every step has `K` drafts a request, the newest token before them: `K + 1` places. `given [4, B]` int64 has
each request's row (-1: padding), its row at the drafter, by how much its positions there are smaller, and the
length of its prompt.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def places_kernel(
    given, next_at, at, rows, token_rows, token_at, steps, contexts,
    small_rows, small_token_rows, small_at, small_contexts, size, K: tl.constexpr,
):  # fmt: skip
    """Where each request stands, and what follows from it for the model's inputs and the drafter's."""
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
    sampled, ids, at, rows, given, tokens, next_at, told, picked, draft_steps, max_len, size, K: tl.constexpr
):  # fmt: skip
    """Compare drafts with what was sampled in their places, keep what agrees, and move on behind it."""
    i = tl.program_id(0)
    start, row, prompt = tl.load(at + i), tl.load(rows + i), tl.load(given + 3 * size + i)
    real = start >= 0
    right = 0
    same = 1
    for j in tl.static_range(K):
        said = tl.load(sampled + i * (K + 1) + j)
        same = same * (said == tl.load(ids + i * (K + 1) + j + 1)).to(tl.int32)
        right += same
    for j in tl.static_range(K + 1):
        said = tl.load(sampled + i * (K + 1) + j)
        tl.store(told + i * (2 * K + 2) + 1 + j, said)
        tl.store(tokens + row * max_len + start + 1 + j, said, mask=real & (j <= right))
    tl.store(told + i * (2 * K + 2), right)
    tl.store(picked + i, i * (K + 1) + right)
    tl.store(draft_steps + i, start + 2 + right - prompt)
    tl.store(next_at + row, start + 1 + right, mask=real)


@triton.jit
def hand_on_kernel(
    drafts, at, rows, given, tokens, next_at, told, small_tokens, chain, max_len, small_len, size,
    K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Draft number `D` goes to the model's row, to be verified, and to the drafter's, to be gone on from.

    chain `[3, B]`: what the drafter's next step reads, see `DecodeGraph`.
    """
    i = tl.program_id(0)
    real = tl.load(at + i) >= 0
    row, small_row = tl.load(rows + i), tl.load(given + size + i)
    base, prompt = tl.load(given + 2 * size + i), tl.load(given + 3 * size + i)
    place = tl.load(next_at + row) + 1 + D
    draft = tl.load(drafts + i)
    tl.store(told + i * (2 * K + 2) + K + 2 + D, draft)
    tl.store(tokens + row * max_len + place, draft, mask=real)
    tl.store(small_tokens + small_row * small_len + place - base, draft, mask=real)
    tl.store(chain + i, small_row)
    tl.store(chain + size + i, tl.where(real, place - base, -1))
    tl.store(chain + 2 * size + i, place + 1 - prompt)


def find_places(
    given: Tensor,  # [4, B] int64
    next_at: Tensor,  # [R] int64, the position of each row's newest token
    *,
    at: Tensor,  # [B] int64, -1: padding
    rows: Tensor,  # [B] int64
    token_rows: Tensor,  # [B * (K + 1)] int64, and so the next two
    token_at: Tensor,
    steps: Tensor,
    contexts: Tensor,  # [B] int32
    small_rows: Tensor,  # [B] int64
    small_token_rows: Tensor,  # [B * (K + 1)] int64
    small_at: Tensor,
    small_contexts: Tensor,  # [B] int32
    drafts: int,
) -> None:
    """Fill in all others from `given` and `next_at`."""
    size = given.shape[1]
    places_kernel[(size,)](
        given, next_at, at, rows, token_rows, token_at, steps, contexts,
        small_rows, small_token_rows, small_at, small_contexts, size, K=drafts, num_warps=1,
    )  # fmt: skip


def accept(
    sampled: Tensor,  # [B * (K + 1)] int64
    ids: Tensor,  # [B * (K + 1)] int64, the newest token of each request and its drafts
    *,
    at: Tensor,
    rows: Tensor,
    given: Tensor,
    tokens: Tensor,  # [R, max_len] int64
    next_at: Tensor,
    told: Tensor,  # [B, 2 * K + 2] int64: how many were right, all that was sampled, the drafts made since
    picked: Tensor,  # [B] int64, where among the places the last right one is
    draft_steps: Tensor,  # [B] int64, the step number of the first draft
    drafts: int,
) -> None:
    """Write the tokens that are kept behind the newest, and move `next_at` on."""
    accept_kernel[(len(at),)](
        sampled, ids, at, rows, given, tokens, next_at, told, picked, draft_steps,
        tokens.shape[1], len(at), K=drafts, num_warps=1,
    )  # fmt: skip


def hand_on(
    made: Tensor,  # [B] int64, the drafts
    number: int,  # of these drafts, from 0
    *,
    at: Tensor,
    rows: Tensor,
    given: Tensor,
    tokens: Tensor,
    next_at: Tensor,
    told: Tensor,
    small_tokens: Tensor,  # [R, max_len] int64, the drafter's
    chain: Tensor,  # [3, B] int64
    drafts: int,
) -> None:
    """Write one draft of each request where it will be read."""
    hand_on_kernel[(len(at),)](
        made, at, rows, given, tokens, next_at, told, small_tokens, chain,
        tokens.shape[1], small_tokens.shape[1], len(at), K=drafts, D=number, num_warps=1,
    )  # fmt: skip

"""The two ends of a captured step, one small kernel each: rows and positions in, sampled tokens out.

In torch these would be a dozen kernels of a microsecond each, which at batch 1 is a fiftieth of the step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paged_cache import PagedBatch


@triton.jit
def gather_kernel(
    ids, positions, slots, contexts, batch_tables, rows, at, tokens, tables, drafts,
    max_len, width, P: tl.constexpr, TABLES: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token's inputs of a step, given its row and position. One program per token.

    rows: `[T]` int64, the token's row in `tokens` and `tables`. at: `[T]` int64, its position (-1:
        padding). tokens: `[R, max_len]`, token ids. tables: `[R, width]`, block tables.
    drafts: `[T]`, ids of draft tokens that `tokens` does not have yet, -1: no draft; read if DRAFTS. P:
        tokens of a block.
    ids, positions, slots: outputs `[T]`; a slot is block times P plus index in the block, -1 for padding.
    contexts, batch_tables: outputs if TABLES: `[T]` int32, context lengths, and `[T, width]`, the rows'
        block tables.
    """
    i = tl.program_id(0)
    row, position = tl.load(rows + i), tl.load(at + i)
    real = position >= 0
    place = tl.maximum(position, 0)
    block = tl.load(tables + row * width + place // P).to(tl.int64)
    token = tl.load(tokens + row * max_len + place)
    if DRAFTS:
        draft = tl.load(drafts + i)
        token = tl.where(draft >= 0, draft, token)
    tl.store(ids + i, token)
    tl.store(positions + i, place)
    tl.store(slots + i, tl.where(real, block * P + place % P, -1))
    if TABLES:
        tl.store(contexts + i, (position + 1).to(tl.int32))
        used = tl.where(real, place // P + 1, 0)
        for first in range(0, used, BLOCK):
            column = first + tl.arange(0, BLOCK)
            entry = tl.load(tables + row * width + column, mask=column < used)
            tl.store(batch_tables + i.to(tl.int64) * width + column, entry, mask=column < used)


def gather_inputs(
    rows: Tensor,  # [T] int64
    at: Tensor,  # [T] int64 positions; -1: padding
    tokens: Tensor,  # [R, max_len] int64
    tables: Tensor,  # [R, max_blocks] int32
    block_size: int,
    batch: PagedBatch,
    *,
    decodes: bool = False,
    drafts: Tensor | None = None,  # [T] int64
) -> None:
    """Fill in `batch` on the device, in place, from each token's row and position.

    rows, at: `[T]` int64, row and position; -1: padding, which reads as token 0 of its row at position 0,
        is stored nowhere (slot -1) and has no context.
    tokens: `[R, max_len]`, tables: `[R, max_blocks]`, token ids and block tables of all requests, a row
        each.
    block_size: tokens in a block. decodes: every token is a request of its own, so context lengths and
        block tables of the batch are filled in, too.
    drafts: `[T]`, ids of draft tokens that `tokens` does not have yet; -1: take the id from `tokens`; None:
        no drafts.
    """
    ids = batch.input_ids
    gather_kernel[(len(rows),)](
        ids, batch.positions, batch.slots, batch.context_lens, batch.block_tables,
        rows, at, tokens, tables, drafts, tokens.shape[1],
        tables.shape[1],
        P=block_size, TABLES=decodes, DRAFTS=drafts is not None, BLOCK=128, num_warps=1,
    )  # fmt: skip


@triton.jit
def scatter_kernel(tokens, rows, at, sampled, max_len):
    """Write one request's sampled token to its row of `tokens`, after the token it was computed from.

    One program per request. tokens: `[R, max_len]`, token ids. rows, at: `[B]`, row, and position of the
    token it was computed from (-1: padding, nothing is written). sampled: `[B]`.
    """
    i = tl.program_id(0)
    row, position = tl.load(rows + i), tl.load(at + i)
    tl.store(tokens + row * max_len + position + 1, tl.load(sampled + i), mask=position >= 0)


def scatter_tokens(
    rows: Tensor,  # [B] int64
    at: Tensor,  # [B] int64, -1: padding
    sampled: Tensor,  # [B] int64
    tokens: Tensor,  # [R, max_len] int64
) -> None:
    """Write each request's sampled token to its row of `tokens`, after the token it was computed from.

    rows: `[B]` int64. at: `[B]` int64, position of the token it was computed from; -1: padding, nothing is
        written. sampled: `[B]` int64. tokens: `[R, max_len]` int64.
    """
    scatter_kernel[(len(rows),)](tokens, rows, at, sampled, tokens.shape[1], num_warps=1)

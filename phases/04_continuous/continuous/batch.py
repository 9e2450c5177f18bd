"""One step's inputs as a ragged batch: the tokens of all requests end to end, with no padding between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous.work import Work

if TYPE_CHECKING:
    from continuous.rows import RequestRows

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HostBatch:
    """A step's layout on the host, so that no code has to ask the device (`.item()` waits for it).

    A batch has `B` works (a work: the tokens of one request), `T` tokens and `S` samples; work `i`'s
    tokens are `query_starts[i] .. query_starts[i + 1] - 1`. A work with `k` drafts is sampled at its last
    `k + 1` tokens, any other one at its last token, once for each of its sampled requests.

    rows: `[B]`, each work's row.
    query_lens: `[B]`, tokens computed now.
    query_starts: `[B + 1]`, running sum of `query_lens`.
    context_lens: `[B]`, every key that a request has after this step, the new ones included.
    token_rows, positions: `[T]`, each token's row and its index in its sequence.
    sample_at: `[S]`, the tokens (indices into `T`) whose hidden state is sampled.
    sample_rows: `[S]`, the rows that take the samples.
    sample_positions: `[S]`, where in its row each sampled token goes.
    sample_steps: `[S]`, how many tokens that row had generated before.
    """

    rows: Ints
    query_lens: Ints
    query_starts: Ints
    context_lens: Ints
    token_rows: Ints
    positions: Ints
    sample_at: Ints
    sample_rows: Ints
    sample_positions: Ints
    sample_steps: Ints

    @classmethod
    def of(cls, works: Sequence[Work], prompt_lens: Ints) -> HostBatch:
        """Return the layout of a step, given its works (each the tokens of one request) in batch order.

        prompt_lens: `[R]`, prompt tokens of the request in each row. Samples are in the order of works, then
            of sampled requests, then of tokens.
        """
        _, row, start, count, drafts, sampled_requests, _ = zip(*works, strict=True)
        rows, starts, lens = np.array((row, start, count), np.int64)
        ends = np.cumsum(lens)
        query_starts = np.concatenate(([0], ends))
        contexts = starts + lens
        tokens = int(ends[-1])
        if tokens == len(works):  # decodes only
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lens)
            positions = np.arange(tokens) + np.repeat(starts - query_starts[:-1], lens)
        counts = np.array([*map(len, sampled_requests)], np.int64)  # [B]
        sample_at = ends - 1
        sample_rows = rows
        sample_positions = contexts
        if (counts != 1).any():  # parts of prompts, which are not sampled, or several requests
            sample_at, sample_positions = np.repeat((sample_at, contexts), counts, axis=1)
            sample_rows = np.array(
                [request.row for taking in sampled_requests for request in taking], np.int64
            )
        if any(drafts):  # such a work has one sampled request, and a sample after each draft
            behind = np.repeat([len(some) for some in drafts], counts)
            back = np.concatenate([np.arange(k, -1, -1) for k in behind])
            sample_at = np.repeat(sample_at, behind + 1) - back
            sample_rows = np.repeat(sample_rows, behind + 1)
            sample_positions = np.repeat(sample_positions, behind + 1) - back
        sample_steps = sample_positions - prompt_lens[sample_rows]
        return cls(
            rows, lens, query_starts, contexts, token_rows, positions,
            sample_at, sample_rows, sample_positions, sample_steps,
        )  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """A step's inputs on the device; `host` is the same layout on the host.

    input_ids, positions, token_rows: `[T]` int64.
    query_starts: `[B + 1]` int32; context_lens: `[B]` int32.
    rows: `[B]` int64.
    sample_at, sample_rows, sample_positions, sample_steps: `[S]` int64.
    """

    host: HostBatch
    input_ids: Tensor
    positions: Tensor
    token_rows: Tensor
    query_starts: Tensor
    context_lens: Tensor
    rows: Tensor
    sample_at: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    sample_steps: Tensor

    @classmethod
    def of(cls, host: HostBatch, rows: RequestRows, **more: NDArray[np.integer[Any]]) -> Self:
        """Return a batch on the device: its layout is copied in one transfer, its tokens read from the rows.

        rows: token ids of all running requests. more: fields of a subclass that are on the host as well.
        """
        arrays = {**vars(host), **more}
        del arrays["query_lens"]  # the device needs none
        for name in ("query_starts", "context_lens"):
            arrays[name] = arrays[name].astype(np.int32)
        moved = upload(rows.tokens.device, arrays)
        return cls(
            host=host, input_ids=rows.tokens[moved["token_rows"], moved["positions"]], **moved
        )


ALIGNED = 16
TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def upload(
    device: torch.device, arrays: Mapping[str, NDArray[np.integer[Any]]]
) -> dict[str, Tensor]:
    """Copy arrays of int64 and int32, of any shapes, to the device in one transfer; return them by name.

    Each transfer costs some microseconds, however small it is. So all arrays are packed into one buffer of
    bytes, and those returned are views of the buffer's copy on the device. Each view begins at a multiple
    of 16 bytes: a kernel that was compiled for such an address would be compiled again for any other.
    """
    slices: dict[str, slice] = {}
    end = 0
    for name, array in arrays.items():
        slices[name] = slice(end, end + array.nbytes)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    flat = np.zeros(max(end, ALIGNED), np.uint8)  # not none at all, of which there is no view
    for name, array in arrays.items():
        flat[slices[name]].view(array.dtype)[:] = array.ravel()
    packed = torch.from_numpy(flat)
    if device.type == "cuda":  # only from pinned memory does the copy not wait
        packed = packed.pin_memory()
    packed = packed.to(device, non_blocking=True)
    return {
        name: packed[slices[name]].view(TYPES[array.dtype]).view(array.shape)
        for name, array in arrays.items()
    }

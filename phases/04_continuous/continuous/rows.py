"""Rows: each running request has one row in the engine's arrays, which live as long as the engine.

A step's inputs are read from these arrays by index, for all requests at once. The alternative, to build
them from every request's lists at every step, costs the host more than the GPU needs for the step itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.request import NO_ROW, Request
from continuous.batch import upload


class RequestRows:
    """The slots of running requests: `R = count` rows, each with room for the tokens of one request.

    tokens: `[R, max_len]` int64 on the device. A sampled token is written here by the device, so the next
        step can read it before the host has seen it.
    prompt_lens: `[R]` int64 on the host, prompt tokens of each row's request.
    fresh: requests, by row, whose tokens are not on the device yet.
    """

    def __init__(self, count: int, max_len: int, device: torch.device | str = "cpu") -> None:
        self.count, self.max_len = count, max_len
        self.tokens = torch.zeros(count, max_len, dtype=torch.int64, device=device)
        self.prompt_lens = np.zeros(count, np.int64)
        # A heap: the lowest row first keeps running requests adjacent.
        self._free = list(range(count))
        self.fresh: dict[int, Request] = {}

    @property
    def free(self) -> int:
        """Return the number of free rows."""
        return len(self._free)

    def acquire(self, request: Request) -> None:
        """Give `request` the lowest free row (`request.row`); its tokens are not on the device yet."""
        request.row = heapq.heappop(self._free)
        self.prompt_lens[request.row] = request.prompt_len
        self.fresh[request.row] = request

    def release(self, request: Request) -> None:
        """Free the row of `request`."""
        heapq.heappush(self._free, request.row)
        self.fresh.pop(request.row, None)
        request.row = NO_ROW

    def upload(self) -> list[Request]:
        """Copy the tokens of requests with a new row to the device; return these requests."""
        fresh = list(self.fresh.values())
        if fresh:
            write(self.tokens, [(one.row, 0, one.ids(0, len(one.tokens))) for one in fresh])
            self.fresh.clear()
        return fresh


def write(
    rows: Tensor, lines: Sequence[tuple[int, int, Sequence[int] | NDArray[np.int64]]]
) -> None:
    """Write pieces of token ids into `rows [R, max_len]` on the device, all in one transfer.

    lines: for each piece its row, the position of its first token, and the tokens.
    """
    of, first, tokens = zip(*lines, strict=True)
    counts = list(map(len, tokens))
    ends = np.cumsum(counts)
    columns = {
        "rows": np.repeat(of, counts),
        "positions": np.arange(ends[-1]) + np.repeat(first - ends + counts, counts),
        "tokens": np.concatenate(tokens),
    }
    moved = upload(rows.device, columns)
    rows[moved["rows"], moved["positions"]] = moved["tokens"]

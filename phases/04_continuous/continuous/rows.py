"""Rows: the place of each running request in arrays that live as long as the engine.

A step's inputs are read from these arrays by index, for all requests at once. The alternative, to build them
from every request's lists at every step, costs the host more than the GPU needs for the step itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import torch

from common.request import NO_ROW, Request


class Rows:
    """`count` rows, each with room for the tokens of one request.

    tokens: `[R, max_len]` int64 on the device. A sampled token is written here by the device, so the next
        step can read it before the host has seen it.
    prompt_lens: `[R]` int64 on the host.
    fresh: by row, requests of which the device knows nothing yet.
    """

    def __init__(self, count: int, max_len: int, device: torch.device | str = "cpu") -> None:
        self.count, self.max_len = count, max_len
        self.tokens = torch.zeros(count, max_len, dtype=torch.int64, device=device)  # [R, max_len]
        self.prompt_lens = np.zeros(count, np.int64)  # [R]
        self._free = list(range(count))  # a heap: the lowest row first keeps running requests adjacent
        self.fresh: dict[int, Request] = {}

    @property
    def free(self) -> int:
        """The number of free rows."""
        return len(self._free)

    def acquire(self, request: Request) -> None:
        """Give `request` the lowest free row."""
        request.row = heapq.heappop(self._free)
        self.prompt_lens[request.row] = request.prompt_len
        self.fresh[request.row] = request

    def release(self, request: Request) -> None:
        """Take the row of `request` back."""
        heapq.heappush(self._free, request.row)
        self.fresh.pop(request.row, None)
        request.row = NO_ROW

    def upload(self) -> Iterator[Request]:
        """Copy the tokens of requests that got a row since the last call to the device; yields each.

        One counts as handed over when the next is asked for. So what its user raises concerns it alone.
        """
        for first, group in self._neighbours():
            widest = max(len(request.tokens) for request in group)
            # From pinned memory, or the copy would wait for the device.
            known = torch.zeros(len(group), widest, dtype=torch.int64, pin_memory=self.tokens.is_cuda)
            for line, request in zip(known.numpy(), group, strict=True):
                line[: len(request.tokens)] = request.ids(0, len(request.tokens))
            self.tokens[first : first + len(group), :widest].copy_(known, non_blocking=True)
        while self.fresh:
            row, request = next(iter(self.fresh.items()))
            yield request
            del self.fresh[row]

    def _neighbours(self) -> list[tuple[int, list[Request]]]:
        """Fresh requests in rows side by side, which one copy takes along, and the first one's row.

        It copies a rectangle: a request begins another where half of that would be unused.
        """
        groups: list[tuple[int, list[Request]]] = []
        total = widest = 0
        for row, request in sorted(self.fresh.items()):
            length = len(request.tokens)
            total, widest = total + length, max(widest, length)
            if groups and row == groups[-1][0] + len(groups[-1][1]):
                group = groups[-1][1]
                if 2 * total >= widest * (len(group) + 1):
                    group.append(request)
                    continue
            groups.append((row, [request]))
            total = widest = length
        return groups

"""A step's few numbers on their way to the tensors that a graph reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

AHEAD = 4
"""Buffers on the host. The host is at most two steps ahead of the device, and must not write into a buffer
whose copy still waits in the queue."""


class Staging:
    """`size` int64 numbers at a fixed address on the device, filled by one copy a step.

    device: `[size]` int64.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        pinned = device.type == "cuda"  # or the copy would wait for the device
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(AHEAD)]
        self._views: list[NDArray[np.int64]] = [host.numpy() for host in self._host]
        self._turn = 0

    @contextmanager
    def fill(self, size: int) -> Iterator[NDArray[np.int64]]:
        """The next buffer's first `size` numbers, sent to the device when the block ends."""
        turn, self._turn = self._turn, (self._turn + 1) % AHEAD
        yield self._views[turn][:size]
        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)

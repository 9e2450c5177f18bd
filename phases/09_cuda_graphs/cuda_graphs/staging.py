"""Copies the inputs of a step from pinned memory to the tensors that a graph reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

BUFFERS = 4
"""On the host. One would do, but then the host would wait for the device at every step."""


class Staging:
    """A fixed int64 tensor on the device, the inputs of CUDA graphs, which one copy fills before a step.

    The copy waits in the device's queue behind the steps before, however many the host has launched (chunks
    in the middle of a prompt have no results to wait for). Until the copy has run, its buffer on the host
    must not be written again, so an event follows each copy.

    device: `[size]` int64, the tensor.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        cuda = (
            device.type == "cuda"
        )  # only from pinned memory the copy does not make the host wait
        self._host = [
            torch.zeros(size, dtype=torch.int64, pin_memory=cuda) for _ in range(BUFFERS)
        ]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._views: list[NDArray[np.int64]] = [host.numpy() for host in self._host]
        self._turn = 0

    @contextmanager
    def fill(self, size: int) -> Iterator[NDArray[np.int64]]:
        """Return a context that gives a host array `[size]` int64 to write, copied to `device` at its end.

        The context waits until the array's last copy has run.
        """
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        yield self._views[turn][:size]
        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)
        if copied is not None:
            copied.record()

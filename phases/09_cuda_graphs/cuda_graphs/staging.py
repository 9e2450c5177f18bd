"""A step's few numbers on their way to the tensors that a graph reads."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUFFERS = 4
"""On the host. One would do, but then the host would wait for the device at every step."""


class Staging:
    """`size` int64 numbers at a fixed address on the device, filled by one copy a step.

    The copy waits in the device's queue behind the steps before, however many the host has launched (chunks
    in the middle of a prompt have no results to wait for). Until it has run, its buffer on the host must not
    be written again, so an event follows each copy.

    device: `[size]` int64.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int64, device=device)
        cuda = device.type == "cuda"  # only from pinned memory the copy does not make the host wait
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=cuda) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() if cuda else None for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self._turn = -1
        self._slices: dict[int, tuple[Tensor, list[Tensor], list[NDArray[np.int64]]]] = {}

    def fill(self, size: int) -> Self:
        """A block for the next buffer's first `size` numbers, which are sent to the device when it ends."""
        slices = self._slices.get(size)
        if slices is None:  # once: to make them takes as long as to fill them
            hosts = [host[:size] for host in self._host]
            slices = self.device[:size], hosts, [host.numpy() for host in hosts]
            self._slices[size] = slices
        self._target, self._sources, self._views = slices
        return self

    def __enter__(self) -> NDArray[np.int64]:
        """The numbers, as soon as the copy that last had this buffer is done."""
        self._turn = (self._turn + 1) % BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._views[self._turn]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send them, if nothing went wrong."""
        if error is not None:
            return
        copied = self._copied[self._turn]
        self._target.copy_(self._sources[self._turn], non_blocking=True)
        if copied is not None:
            copied.record()

"""Masks on their way to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.sampling.sampler import Allowed
from structured.matcher import Words


class MaskStaging:
    """Masks on their way to the device, through one buffer on each side, by one copy.

    One is enough: a step's masks are made when the tokens of the step before are known, and then its masks
    have been read. On a GPU the copy has a stream of its own, beside the forward pass that is running.

    A buffer holds the words of `M` masks and behind them their places.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device = width, device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._view: Words = np.zeros(0, np.int32)  # of the host's: tensors take longer to cut

    def host(self, count: int) -> Words:
        """`[count, W]`: the next masks, to be written over; they hold older ones."""
        size = self._places(count) + 2 * count
        if self._buffers is None or len(self._buffers[0]) < size:
            room = 1 << (size - 1).bit_length()
            cuda = self._stream is not None
            host = torch.zeros(room, dtype=torch.int32, pin_memory=cuda)
            self._buffers = host, host.to(self.device) if cuda else host
            self._view = host.numpy()
        if self._stream is not None:
            self._stream.synchronize()  # after a step that failed its copy may still be on its way
        return self._view[: count * self.width].reshape(count, self.width)

    def send(self, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Allowed:
        """The masks that were written last, for these places of the batch."""
        assert self._buffers is not None
        count = len(places)
        begin, end = self._places(count), self._places(count) + 2 * count
        host, device = self._buffers
        self._view[begin:end].view(np.int64)[:] = places
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            with torch.cuda.stream(self._stream):
                device[:end].copy_(host[:end], non_blocking=True)
            current.wait_stream(self._stream)
        words = device[: count * self.width].view(count, self.width)
        return Allowed(words, device[begin:end].view(torch.int64))

    def _places(self, count: int) -> int:
        """Return where the places begin: behind the masks, at a multiple of 8 bytes."""
        return count * self.width + count * self.width % 2

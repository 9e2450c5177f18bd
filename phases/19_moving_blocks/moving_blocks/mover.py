"""The worker's half of the connector: copies between the pool's blocks and slots of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moving_blocks.connector import ConnectorWorker, Transfer
from paged_cache import BlockPool


class CopyWorker(ConnectorWorker):
    """Copies blocks at once, one after the other: for a pool that is in the host's memory itself.

    pool: its tensor is `[L, 2, N, P, KH, D]`.
    host: `[slots, bytes of a block]` uint8.
    """

    def __init__(self, pool: BlockPool, host: Tensor) -> None:
        self.pool, self.host = views(pool, host)

    def start_load(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """See `ConnectorWorker.start_load`: copy slots into blocks at once; the returned copy is done."""
        for block, slot in zip(blocks, slots, strict=True):
            self.pool[:, block] = self.host[slot]
        return Transfer()

    def start_save(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """See `ConnectorWorker.start_save`: copy blocks into slots at once; the returned copy is done."""
        for block, slot in zip(blocks, slots, strict=True):
            self.host[slot] = self.pool[:, block]
        return Transfer()


@dataclass
class StreamTransfer(Transfer):
    """A copy on a CUDA stream of its own, and the event after it."""

    event: torch.cuda.Event

    def done(self) -> bool:
        """Return True if the GPU has passed the event, so that the copy is done. Never waits."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class StreamWorker(ConnectorWorker):
    """Copies on two streams beside the steps, one launch for all layers and blocks.

    The *compute stream* is the one that steps run on: the current stream of the caller.

    Args:
        pool: on a CUDA device.
        host: `[slots, bytes of a block]` uint8, pinned.
    """

    def __init__(self, pool: BlockPool, host: Tensor) -> None:
        self.device = pool.data.device
        self.pool, self.host = views(pool, host)
        self.load_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.save_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def start_load(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start to copy slots into blocks; return the copy.

        It runs after the compute stream, whose last steps may read the blocks, and after all saves, which
        may read them as well, or write the slots.
        """
        self.load_stream.wait_stream(torch.cuda.current_stream(self.device))
        self.load_stream.wait_stream(self.save_stream)
        return self._launch(self.load_stream, blocks, slots, to_host=False)

    def start_save(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start to copy blocks into slots; return the copy.

        It runs after the compute stream, a kernel of which may still be writing the blocks.
        """
        self.save_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._launch(self.save_stream, blocks, slots, to_host=True)

    def wait_for_load(self, transfer: Transfer) -> None:
        """Let the compute stream wait for the copy `transfer`; the host does not wait."""
        assert isinstance(transfer, StreamTransfer)
        torch.cuda.current_stream(self.device).wait_event(transfer.event)

    def wait_for_saves(self) -> None:
        """Let the compute stream wait for all saves so far; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_stream(self.save_stream)

    def _launch(
        self,
        stream: torch.cuda.Stream,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
    ) -> StreamTransfer:
        from moving_blocks.kernels import move  # Triton comes with it

        with torch.cuda.stream(stream):
            index = torch.tensor([list(blocks), list(slots)]).pin_memory()
            index = index.to(self.device, non_blocking=True)
            move(self.pool, self.host, index, to_host=to_host)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return StreamTransfer(event)


def views(pool: BlockPool, host: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the pool, `[layers * 2, N, numbers]`, and of the host's memory, `[slots, layers * 2,
    numbers]`.

    A block's keys and values of each layer lie apart in the pool, and side by side in the host's memory.
    """
    blocks = pool.data.flatten(0, 1).flatten(2)
    return blocks, host.view(blocks.dtype).view(len(host), blocks.shape[0], blocks.shape[2])

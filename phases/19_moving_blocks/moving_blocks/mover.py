"""The connector's worker: copies between the pool's KV blocks and slots of host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moving_blocks.connector import ConnectorWorker, Transfer
from paged_cache import BlockPool


class CopyWorker(ConnectorWorker):
    """A worker that copies blocks on the CPU and waits for each copy: for a pool in host memory.

    pool: its tensor is `[L, 2, N, P, KH, D]`: layers, keys and values, `N` blocks of `P` tokens, heads.
    host: `[slots, bytes of a block]` uint8.
    """

    def __init__(self, pool: BlockPool, host: Tensor) -> None:
        self.pool, self.host = views(pool, host)

    def start_copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
        after: Sequence[Transfer] = (),
        gently: bool = False,
    ) -> Transfer:
        """Copy each of `blocks` to its slot, or back (not `to_host`); return a finished copy.

        after, gently: not used.
        """
        for block, slot in zip(blocks, slots, strict=True):
            here, there = self.pool[:, block], self.host[slot]
            if to_host:
                there.copy_(here)
            else:
                here.copy_(there)
        return Transfer()


@dataclass
class StreamTransfer(Transfer):
    """A copy on a CUDA stream of its own.

    event: recorded after the copy.
    """

    event: torch.cuda.Event

    def done(self) -> bool:
        """Return True if the GPU has reached the event after the copy: the copy is done. Never waits."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class StreamWorker(ConnectorWorker):
    """A worker that copies blocks on two CUDA streams (loads, saves) beside the steps, in one launch each.

    The *compute stream* is the one that steps run on: the current stream of the caller.

    Args:
        pool: on a CUDA device.
        host: `[slots, bytes of a block]` uint8, page-locked.
    """

    def __init__(self, pool: BlockPool, host: Tensor) -> None:
        self.device = pool.data.device
        self.pool, self.host = views(pool, host)
        self.load_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.save_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def start_copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
        after: Sequence[Transfer] = (),
        gently: bool = False,
    ) -> Transfer:
        """Start to copy blocks to slots of host memory, or back (not `to_host`), on a CUDA stream.

        Saves and loads have a stream each. The copy first waits for the compute stream (which steps run on)
        and for the copies `after`.
        gently: at `gentle_rate` bytes a second.

        Returns:
            The copy, to ask whether it is done.
        """
        from moving_blocks.kernels import move  # Triton comes with it

        stream = self.save_stream if to_host else self.load_stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for copy in after:
                self.wait_for(copy)
            index = torch.tensor([list(blocks), list(slots)]).pin_memory()
            index = index.to(self.device, non_blocking=True)
            rate = self.gentle_rate if gently else math.inf
            move(self.pool, self.host, index, to_host=to_host, rate=rate)
            return StreamTransfer(stream.record_event())

    def wait_for(self, transfer: Transfer) -> None:
        """Let the current CUDA stream wait for the copy `transfer`; the host does not wait."""
        assert isinstance(transfer, StreamTransfer)
        torch.cuda.current_stream(self.device).wait_event(transfer.event)


def views(pool: BlockPool, host: Tensor) -> tuple[Tensor, Tensor]:
    """Return pool (`N` blocks) and host as `[layers * 2, N, numbers]` and `[slots, layers * 2, numbers]`.

    Both are views. host: `[slots, bytes of a block]` uint8. numbers: keys or values of one block and layer.
    A block's keys and values of each layer lie apart in the pool, and side by side in host memory.
    """
    blocks = pool.data.flatten(0, 1).flatten(2)
    return blocks, host.view(blocks.dtype).view(len(host), blocks.shape[0], blocks.shape[2])

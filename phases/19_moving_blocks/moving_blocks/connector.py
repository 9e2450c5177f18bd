"""The KV connector: the interface by which an engine saves KV blocks elsewhere and loads them again.

It has two halves. The scheduler's half knows names: which tokens can be loaded, which blocks to save, and
which may be reused only later. The worker's half moves bytes beside the engine's steps, without making them
wait. vLLM's `KVConnectorBase_V1` has the same two halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from moving_blocks.names import BlockName


class Transfer:
    """A copy of blocks that has been started; in this base class it is already done.

    Subclasses are copies that go on in the background.
    """

    def done(self) -> bool:
        """Return True if the last byte of the copy has arrived, else False. Never waits."""
        return True


class ConnectorWorker(Protocol):
    """Interface of a worker that copies blocks between the pool and slots of host memory.

    gentle_rate: bytes a second of copies that run beside requests' steps, a part of what the bus gives: on a
        full bus the small copies of each step wait.
    The worker does not guard slots: `ConnectorScheduler` gives a slot to no other block until its copy is
    done.
    """

    gentle_rate: float = math.inf

    def start_copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
        after: Sequence[Transfer] = (),
        gently: bool = False,
    ) -> Transfer:
        """Start to copy each of `blocks` to its slot of host memory, or back (not `to_host`).

        blocks, slots: numbers, of the same length. gently: at `gentle_rate`, because requests' steps run
            beside it.
        The copy begins after all kernels launched so far, which may write or read these blocks, and after the
        copies `after`.

        Returns:
            The copy, to ask whether it is done.
        """

    def wait_for(self, transfer: Transfer) -> None:
        """Let every later step wait, on the device, until a copy is done; the host does not wait."""
        return None


class ConnectorScheduler:
    """Interface of what saves and loads KV blocks, called by the cache and before a request is queued.

    This base class does nothing.
    """

    @property
    def busy(self) -> bool:
        """Return True while copies are unfinished or saves not started, so that `poll` must be called."""
        return False

    def ready(self, request: Request) -> bool:
        """Return True if a request may enter the waiting line.

        False: its blocks are being loaded, or it needs more free blocks. Ask again at the next step.
        """
        return True

    def save_blocks(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Record computed full blocks, by name and number: they may be saved from now on."""

    def blocks_evicted(self, blocks: Sequence[int]) -> None:
        """Save the evicted blocks with these numbers before a later step writes to them."""

    def blocks_allocated(self, blocks: Sequence[int]) -> None:
        """Record blocks (numbers) that the next step may write to: it waits for copies that read them."""

    def before_step(self) -> None:
        """Start the saves that must come before the next step, which may write to their blocks."""

    def request_finished(self, names: Sequence[BlockName]) -> None:
        """Record that the blocks with these names were used just now, for least-recently-used eviction.

        names: of a request's blocks in order; its last block is evicted first.
        """

    def held_blocks(self) -> list[int]:
        """Return the numbers of blocks that unfinished loads use, once for each use."""
        return []

    def poll(self) -> None:
        """Process the copies that have finished. Called at the end of each step."""


NO_CONNECTOR = ConnectorScheduler()

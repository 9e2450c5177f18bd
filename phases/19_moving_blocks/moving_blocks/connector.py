"""The KV connector: the interface by which an engine uses blocks that are somewhere else.

It has two halves. The scheduler's half knows names: which tokens can be loaded, which blocks to save, and
which may be reused only later. The worker's half moves bytes, and never waits where a step would wait with
it. vLLM's `KVConnectorBase_V1` has the same two halves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from moving_blocks.names import BlockName


class Transfer:
    """A copy of blocks that has been started; in this base class it is already done."""

    def done(self) -> bool:
        """Return True when the last byte of the copy has arrived. Never waits."""
        return True


class ConnectorWorker(Protocol):
    """Interface of a worker that copies blocks between the pool and slots of host memory.

    `blocks` and `slots` are numbers, of the same length. A slot that a copy reads or writes stays its own
    until the copy is done; the `ConnectorScheduler` sees to that. to_host: into slots. gently: at
    `gentle_rate`, since steps of other requests run beside the copy.

    gentle_rate: bytes a second, a part of what the bus gives: on a full bus the small copies of each step
        wait.
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
        """Start to copy blocks into slots, or back, after all kernels launched so far, which may write or
        read these blocks, and after the copies `after`.

        Returns: the copy, to ask whether it is done.
        """

    def wait_for(self, transfer: Transfer) -> None:
        """Let every later step wait, on the device, until a copy is done; the host does not wait."""
        return None


class ConnectorScheduler:
    """Interface that saves and loads blocks, called by the cache and the admission of requests. This base
    class does nothing.

    busy: True while copies are on their way, or saves have not been started.
    """

    @property
    def busy(self) -> bool:
        """Return True while copies or saves are unfinished, so that `poll` must be called."""
        return False

    def ready(self, request: Request) -> bool:
        """Return True if a request may enter the waiting line.

        False: its blocks are on their way, or it needs more free blocks. Ask again at the next step.
        """
        return True

    def save_blocks(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Record full blocks, by name and number, whose tokens have been computed. They may be saved from now
        on.
        """

    def blocks_evicted(self, blocks: Sequence[int]) -> None:
        """Save blocks (numbers) that leave the cache, before a later step writes to them."""

    def blocks_allocated(self, blocks: Sequence[int]) -> None:
        """Record that the next step may write to these blocks (numbers): it then waits for copies that read
        them.
        """

    def before_step(self) -> None:
        """Start the saves that must come before the next step, which may write to their blocks."""

    def request_finished(self, names: Sequence[BlockName]) -> None:
        """Record that the blocks of a request, by name, were used just now, the last one first."""

    def held_blocks(self) -> list[int]:
        """Return the numbers of blocks that loads write to or need, once for each use; they are freed
        later.
        """
        return []

    def poll(self) -> None:
        """Process the copies that have finished. Called once a step, at its end."""


NO_CONNECTOR = ConnectorScheduler()

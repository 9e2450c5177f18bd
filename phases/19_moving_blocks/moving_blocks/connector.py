"""The KV connector: the interface by which an engine uses blocks that are somewhere else.

It has two halves. The scheduler's half knows names: which tokens can be loaded, which blocks to save, and
which may be reused only later. The worker's half moves bytes, and never waits where a step would wait with
it. vLLM's `KVConnectorBase_V1` has the same two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.request import Request
from moving_blocks.names import BlockName


class Transfer:
    """A copy of blocks that has been started; this one was finished at once."""

    def done(self) -> bool:
        """Return True when the last byte has arrived. Never waits."""
        return True


class ConnectorWorker(Protocol):
    """The worker's half: copies between blocks of the pool and slots of host memory.

    `blocks` and `slots` have the same length. A slot that a copy reads or writes stays its own until the copy
    is done; the scheduler's half sees to that.
    """

    def start_load(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start to copy slots into blocks, behind all that was launched before and may read these blocks."""

    def start_save(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Start to copy blocks into slots, behind the kernels that write these blocks."""

    def wait_for_load(self, transfer: Transfer) -> None:
        """Let every later step wait for a load; the host does not wait."""
        return None

    def wait_for_saves(self) -> None:
        """Let every later step wait for all saves so far, since it writes to blocks that they read."""
        return None


class ConnectorScheduler:
    """The scheduler's half, which the cache and the admission of requests call. This one has no other tier.

    busy: True while copies are on their way, or saves have not been started.
    """

    @property
    def busy(self) -> bool:
        """Return True while `poll` has to be called."""
        return False

    def get_num_new_matched_tokens(self, request: Request) -> int:
        """Return how many tokens behind those in the cache could be loaded for a waiting request."""
        return 0

    def ready(self, request: Request) -> bool:
        """Return True if a request may enter the waiting line.

        False: its blocks are on their way, or another request waits for room. Ask again at the next step.
        """
        return True

    def save_blocks(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Take note of full blocks whose tokens have been computed. They may be saved from now on."""

    def blocks_evicted(self, blocks: Sequence[int]) -> None:
        """Save blocks that leave the cache, before a later step writes to them."""

    def blocks_allocated(self, blocks: Sequence[int]) -> None:
        """Take note that the next step may write to these blocks: it waits for copies that read them."""

    def before_step(self) -> None:
        """Start the saves that the next step must not overtake."""

    def request_finished(self, names: Sequence[BlockName]) -> None:
        """Count the blocks of a request as used just now, the last one first."""

    def held_blocks(self) -> list[int]:
        """Return blocks that may be freed only later, for each use: a load writes to them or needs them."""
        return []

    def poll(self) -> None:
        """Take in what has finished. Called once a step, at its end."""


NO_CONNECTOR = ConnectorScheduler()

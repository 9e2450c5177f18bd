"""Prefill and decode apart: the half of the engine that decodes.

One engine process computes prompts, another one decodes, and both have one folder of blocks, best in shared
memory. `phases.commands.served_split` sends a request to the first for one token, and then to the second.
There it is like one that was preempted: it has its prompt, a token and its seed, but no blocks. An engine
knows how to go on with those. Only its blocks are not computed again: they come as files.
"""

from __future__ import annotations

from common.request import Request
from moving_blocks.names import chain
from moving_blocks.tiers import TieredConnector, WaitingRequest


class ExpectedBlocks(WaitingRequest):
    """A request that waits for the file of its last full block. `deadline`: when it stops waiting."""


class HandoverConnector(TieredConnector):
    """A `TieredConnector` by which a request can wait for files that another process is about to write."""

    def expect(self, request: Request) -> None:
        """Let a request wait until its last full block is in a file, if loading is faster than computing.

        It waits no longer than computing takes. Call this before the engine's next step takes the request up.
        """
        names = [*chain(self.cache.namespace, request.salt, self.cache.keys_of(request))]
        start = self._num_cached(request) * self.cache.block_size
        seconds = self.rule.compute_seconds(start, len(request.tokens))
        if names and self.rule.load_seconds(len(names), len(names)) < seconds:
            wait = ExpectedBlocks(request, names[-1:], deadline=self.clock() + seconds)
            self.waiting[request] = wait

    def ready(self, request: Request) -> bool:
        """See `ConnectorScheduler.ready`; the time to compute a prompt covers both waits, for files and for
        their blocks.
        """
        expected = self.waiting.get(request)
        if isinstance(expected, ExpectedBlocks):
            if self.clock() < expected.deadline and not self._is_on_disk(expected.names[0]):
                return False
            wait = self._begin(request)
            wait.deadline = min(wait.deadline, expected.deadline)
        return super().ready(request)

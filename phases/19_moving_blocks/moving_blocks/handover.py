"""What the engine that decodes does for a completion whose prompt another engine has computed.

Such a request is like one that was preempted: it has a prompt, a first token and a seed, but no blocks. The
engine goes on with it as it goes on with those. Only its blocks are not computed again: they come as files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.request import Request
from moving_blocks.names import BlockName, chain
from moving_blocks.tiers import TieredConnector
from paged_cache import PagedEngine
from serving.messages import AddRequest, Command
from serving.worker import Observer

HANDOVER = "handover:"
"""Begins what the command wants that hands a completion over; its first token follows."""


@dataclass(eq=False)
class HandoverConnector(TieredConnector):
    """A `TieredConnector` by which a request can wait for files that another process is about to write.

    expected: of each request that waits, its last full block, and when it began to wait.
    """

    expected: dict[Request, tuple[BlockName, float]] = field(default_factory=dict)

    def expect(self, request: Request) -> None:
        """Let a request wait until its last full block is in a file, if loading is faster than computing.

        It waits no longer than computing takes. Call this before the engine's next step takes the request up.
        """
        names = [*chain(self.cache.namespace, request.salt, self.cache.keys_of(request))]
        size, found = self.cache.block_size, self._num_cached(request)
        start, loaded, count = found * size, len(names) * size, len(names) - found
        if self.rule.should_load(start, loaded, len(request.tokens), count, count):
            self.expected[request] = names[-1], self.clock()

    def ready(self, request: Request) -> bool:
        """See `ConnectorScheduler.ready`: the time for which files were expected counts as waiting."""
        if request not in self.expected:
            return super().ready(request)
        name, since = self.expected[request]
        start = self._num_cached(request) * self.cache.block_size
        waited = self.clock() - since
        late = waited >= self.rule.compute_seconds(start, len(request.tokens))
        if not late and not self._is_on_disk(name):
            return False
        del self.expected[request]
        wait = self._begin(request)
        wait.budget -= waited
        wait.deadline -= waited
        return super().ready(request)

    def poll(self) -> None:
        """See `ConnectorScheduler.poll`: also forget expected blocks of requests that were aborted."""
        super().poll()
        for request in [each for each in self.expected if each.finish_reason is not None]:
            del self.expected[request]


class HandoverObserver(Observer):
    """Lets the requests that another engine hands over go on after their first token.

    engine: the one that decodes; its connector is a `HandoverConnector`.
    """

    def __init__(self, engine: PagedEngine) -> None:
        self.engine = engine

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer.hear`: give a request that was handed over its first token, and let it wait for its
        blocks.
        """
        super().hear(command, requests)
        for wanted in command.wanted if isinstance(command, AddRequest) else ():
            if wanted.startswith(HANDOVER):
                requests[0].tokens.append(int(wanted.removeprefix(HANDOVER)))
                connector = self.engine.cache.connector
                assert isinstance(connector, HandoverConnector)
                connector.expect(requests[0])

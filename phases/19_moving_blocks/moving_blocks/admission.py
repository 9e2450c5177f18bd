"""The engine's calls of the KV connector (what saves and loads KV blocks).

It is called before a request enters the waiting line, and after each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.sampler import TokenBitmask
from continuous.engine import Engine
from continuous.seams import GrammarManager, Loop
from continuous.work import Work
from moving_blocks.connector import NO_CONNECTOR, ConnectorScheduler

WAIT = 2e-4
"""Seconds that a step sleeps if nothing is left but copies."""


@dataclass(eq=False)
class AdmissionGate(GrammarManager):
    """A `GrammarManager` by which a request waits, before it enters the waiting line, for its grammar and its
    cached blocks.

    inner: the real grammar manager, which gets all calls about grammars.
    connector: saves and loads KV blocks; asked whether a request's blocks have come. `NO_CONNECTOR` (nothing
        is loaded) until one is set.
    """

    inner: GrammarManager
    connector: ConnectorScheduler = NO_CONNECTOR
    active = True

    def ready(self, request: Request) -> bool:
        """Return True if a request has its grammar and its blocks, or need not wait for them.

        Of a prompt's samples only the first waits for blocks; the others come with it and share its blocks.
        """
        return self.inner.ready(request) and (
            request.sample > 0 or self.connector.ready(request)
        )

    def check(self, grammar: Grammar) -> None:
        """Check a request's grammar; `inner`, the real grammar manager, begins to compile it."""
        self.inner.check(grammar)

    def wait_until_compiled(self, grammar: Grammar) -> None:
        """Wait until `inner`, the real grammar manager, has compiled a grammar."""
        self.inner.wait_until_compiled(grammar)

    def begin(self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]) -> bool:
        """Let the real grammar manager begin a step's token masks; return True if they will need no waiting.

        sampled: for each request, its newest tokens, which are not appended to it yet.
        """
        return self.inner.begin(works, sampled)

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return a step's token masks from the real grammar manager; None: no request has a grammar."""
        return self.inner.fill_bitmask(works)

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return the requests whose grammar `inner` could not compile, with their errors."""
        return self.inner.pop_failed_requests()


@dataclass(eq=False)
class ConnectorLoop(Loop):
    """A `Loop` that polls the connector (what saves and loads KV blocks) after each step of `inner`.

    inner: the loop that runs the engine's steps. gate: has the connector.
    While copies are unfinished this loop is not idle, so the engine goes on stepping, and every block that a
    copy holds is released.
    """

    inner: Loop
    gate: AdmissionGate

    @property
    def idle(self) -> bool:
        """Return True if the inner loop is idle and no copy of blocks is unfinished."""
        return self.inner.idle and not self.gate.connector.busy

    def advance(self, engine: Engine) -> None:
        """Run a step of the inner loop, then let the connector process finished copies.

        If only copies are left, sleep for a moment.
        """
        self.inner.advance(engine)
        self.gate.connector.poll()
        if engine.scheduler.idle and self.inner.idle and not self.idle:
            time.sleep(WAIT)

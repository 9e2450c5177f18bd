"""The engine's calls of the connector: before a request enters the waiting line, and after each step."""

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

    inner: the manager to which all that is about grammars goes.
    connector: asked whether a request's blocks have come; `NO_CONNECTOR` until one is set.
    """

    inner: GrammarManager
    connector: ConnectorScheduler = NO_CONNECTOR
    active = True

    def ready(self, request: Request) -> bool:
        """Return True if a request has its grammar and its blocks, or need not wait for them.

        The samples of a prompt come together, and the blocks of the first are those of all.
        """
        return self.inner.ready(request) and (
            request.sample > 0 or self.connector.ready(request)
        )

    def check(self, grammar: Grammar) -> None:
        """Check a request; `inner`, the real grammar manager, begins to compile its grammar."""
        self.inner.check(grammar)

    def wait_until_compiled(self, grammar: Grammar) -> None:
        """Wait until `inner` has compiled the request's grammar."""
        self.inner.wait_until_compiled(grammar)

    def begin(self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]) -> bool:
        """Let `inner` begin to make the masks of a step (see `GrammarManager.begin`)."""
        return self.inner.begin(works, sampled)

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the token masks of `inner` for the step; None: no request of the step has a
        grammar.
        """
        return self.inner.fill_bitmask(works)

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return the requests whose grammar `inner` could not compile, with their errors."""
        return self.inner.pop_failed_requests()


@dataclass(eq=False)
class ConnectorLoop(Loop):
    """A `Loop` that polls the connector after each step of another loop, `inner`.

    While copies are on their way it is not idle: the engine goes on stepping, and no block is held for ever.

    gate: its `connector` is polled.
    """

    inner: Loop
    gate: AdmissionGate

    @property
    def idle(self) -> bool:
        """Return True if no step and no copy is on its way."""
        return self.inner.idle and not self.gate.connector.busy

    def advance(self, engine: Engine) -> None:
        """Advance the inner loop by a step, then let the connector process the copies that have finished."""
        self.inner.advance(engine)
        self.gate.connector.poll()
        if engine.scheduler.idle and self.inner.idle and not self.idle:
            time.sleep(WAIT)

"""Overlap: the host schedules step n + 1 while the device computes step n.

A step needs the tokens of the one before, but the host need not know them: they are on the device, where the
next step reads them. So the host runs one step ahead and learns what a token was one step late. (The
"zero-overhead scheduler" of SGLang v0.4, 2024, and vLLM's asynchronous scheduling do the same.)
"""

from __future__ import annotations

from continuous.engine import Engine
from continuous.runner import Pending


class OverlappedLoop:
    """A `Loop` that launches a step before it reads the results of the last one.

    What changes for a request: nothing but time. It is scheduled on a *placeholder* for the token that is on
    its way. If that token ends it, the step that was scheduled meanwhile computes one token too many, which
    `collect` drops; its row and blocks may have a new owner by then, whose first write comes later in the
    device's queue than that last stray one.

    flying: the newest step, of which the host knows nothing yet.
    """

    in_flight_step: Pending | None = None

    @property
    def idle(self) -> bool:
        """True if no step is on its way."""
        return self.in_flight_step is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step, then wait for the one before."""
        landing, self.in_flight_step = self.in_flight_step, engine.launch(engine.schedule())
        if landing is not None:
            engine.collect(landing)

    def finish_steps(self, engine: Engine) -> None:
        """Wait for the step that is on its way."""
        landing, self.in_flight_step = self.in_flight_step, None
        if landing is not None:
            engine.collect(landing)

"""What a step is: when its halves are launched, and when its results are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from continuous.engine import Engine


class Loop(Protocol):
    """Advances an engine, step by step; it keeps what is under way."""

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        ...

    def advance(self, engine: Engine) -> None:
        """Launch the next step, and collect what is due."""
        ...

    def land(self, engine: Engine) -> None:
        """Collect all that is under way."""
        ...


class InTurn:
    """A `Loop` that waits for each step before it schedules the next."""

    idle = True

    def advance(self, engine: Engine) -> None:
        """Launch a step, and collect it."""
        pending = engine.launch(engine.schedule())
        if pending is not None:
            engine.collect(pending)

    def land(self, engine: Engine) -> None:
        """Nothing is under way."""

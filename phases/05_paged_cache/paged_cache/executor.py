"""The interface by which later phases run some kinds of steps faster than one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from continuous.runner import Forwarded
from continuous.work import Work


class StepExecutor(Protocol):
    """Runs the forward pass of certain steps faster, such as a CUDA graph for steps of decodes.

    order: executors of a smaller number are asked first whether they support a step.
    """

    order: ClassVar[int]

    def supports(self, works: Sequence[Work], masked: bool) -> Any | None:
        """Return what `run` needs for a step, such as a CUDA graph; None: this executor does not run it.

        works: the step's requests and tokens. masked: True if its samples get bit masks of allowed tokens.
        """

    def run(self, works: Sequence[Work], ticket: Any) -> Forwarded:
        """Upload new requests (`Runner.refresh`), run a step's forward pass, and return its hidden states.

        works: the step's requests and tokens. ticket: what `supports` returned.
        """

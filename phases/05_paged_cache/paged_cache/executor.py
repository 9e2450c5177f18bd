"""A seam: the interface by which later phases run some kinds of steps faster than one operation at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from continuous.runner import Forwarded
from continuous.work import Work


class StepExecutor(Protocol):
    """Runs some kinds of steps faster, such as a CUDA graph for steps of decodes.

    order: executors of a smaller number are asked first.
    """

    order: ClassVar[int]

    def supports(self, works: Sequence[Work], masked: bool) -> Any | None:
        """Return a value for `run`, such as a graph, or None to leave the step to the next executor.

        works: the step's requests and tokens. masked: True if its samples get bit masks.
        """

    def run(self, works: Sequence[Work], ticket: Any) -> Forwarded:
        """Upload new requests (`Runner.refresh`), run the first half of a step, and return its hidden states.

        works: the step's requests and tokens. ticket: what `supports` returned.
        """

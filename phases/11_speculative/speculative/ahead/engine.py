"""An engine whose speculating steps overlap, as phase 09's decodes do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cuda_graphs.engine import OverlapEngine

if TYPE_CHECKING:
    from speculative.ahead.steps import Ahead, Flight


class AheadEngine(OverlapEngine):
    """While all that runs is decodes, the next step is launched before the host knows how far the last one
    came: the device knows, and that is enough. Whatever else there is to do (a request waits, a prompt is not
    done, somebody wants log-probabilities) is done by ordinary steps, as soon as that last one has landed.

    ahead: launches such steps; None: there are none.
    """

    ahead: Ahead | None = None
    _flight: Flight | None = None

    @property
    def idle(self) -> bool:
        """Also: no step is on its way that drafts."""
        return super().idle and self._flight is None

    def advance(self) -> None:
        """Launch the next step that drafts and wait for the one before; or an ordinary step."""
        if self.ahead is None:
            return super().advance()
        if self.scheduler.drafter.waits:
            self._finish_half()
            if self._flying is not None:
                landed, self._flying = self._flying, None
                self.collect(landed)
        if self._flying is None and self._half is None:
            before, self._flight = self._flight, None
            started = time.perf_counter()
            self._flight = self.ahead.launch(before)
            if self._flight is not None:
                self._flight.started = started
            elif before is not None:
                self.ahead.speculator.came_back()
            if before is not None:
                self.ahead.landing = before
                self.collect(before)
            if self._flight is not None or (before is not None and self.scheduler.idle):
                return None
        return super().advance()

"""What drafts add to a step, learned while the engine serves."""

from __future__ import annotations

BELIEF = 0.1
"""How many measured steps it counts for, what is believed before any was measured."""
MEMORY = 0.9
"""What each step leaves of the weight of those before it."""


class Price:
    """Seconds that drafts add to a step: a line through what was measured, by least squares.

    It need not begin at 0. A step with any drafts at all may run other kernels, and a model that drafts has
    to catch up first. Steps that all have as many drafts do not tell these two apart: the line is drawn from
    no cost, drafts look dear, a few less are tried, and what those take tells.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xy = self._xx = 0.0

    def saw(self, drafts: int, seconds: float) -> None:
        """A step with so many drafts took so much longer than one without."""
        self.forget(1 - MEMORY)
        self._weight, self._x, self._y = self._weight + 1, self._x + drafts, self._y + seconds
        self._xy, self._xx = self._xy + drafts * seconds, self._xx + drafts * drafts

    def forget(self, share: float) -> None:
        """What was measured counts less, and what is believed counts more."""
        keep = 1 - share
        self._weight, self._x, self._y = keep * self._weight, keep * self._x, keep * self._y
        self._xy, self._xx = keep * self._xy, keep * self._xx

    def line(self, rows: int, first: float) -> tuple[float, float]:
        """Seconds for having drafts, and for each.

        That none cost nothing, and one for each of the `rows` requests `first` each, is believed from the
        beginning: as if each had been measured, for a tenth of a step.
        """
        weight, x, y = self._weight + 2 * BELIEF, self._x + BELIEF * rows, self._y + BELIEF * rows * first
        xy, xx = self._xy + BELIEF * rows * rows * first, self._xx + BELIEF * rows * rows
        x, y = x / weight, y / weight  # where the middle is
        each = (xy - weight * x * y) / (xx - weight * x * x)
        each = max(first / 100, min(each, y / x))
        return max(0.0, y - each * x), each

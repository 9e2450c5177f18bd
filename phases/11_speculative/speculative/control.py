"""How many tokens to guess: as many as pay, by what was accepted and by what a token more costs here.

Whether a draft pays depends on the batch. Alone, a request's step reads all weights whatever it computes,
and tokens more are nearly free. With hundreds of requests the device is busy with arithmetic, and each wrong
draft takes the place of work that somebody waits for. So times are measured, for each batch size apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.request import Request

BUDGET = 0.02
"""The share of the time that guessing may lose, against steps without."""
LEAST_BUDGET = 0.005
"""What is left of it where guessing has failed again and again."""
SAMPLES = 4
"""Steps without drafts that must be timed before anybody guesses."""
CREDIT = 10.0
"""What guessing has gained it may lose again, up to so many steps."""
FIRST_CREDIT = 4.0
"""So many it may lose before it has gained any, if it cannot come back at once: a few wrong drafts at the
beginning say little."""
GRACE = 4
"""Steps with drafts at a batch size that are not charged: the first replay of each length is slow, and
where a step takes half a millisecond a few such would be held against guessing for a thousand steps."""
REFRESH = 128
"""Every so many steps with drafts one without: contexts grow, and with them all steps."""
REST = 4
"""So many of these with guessing off: what waits for nothing is faster. Where a source has to see every step
it is off for the second request: the steps that were timed in the first one had to wait for each other."""
FIRST_RATE = 0.7
"""The chance that a draft is right, as long as nothing is known."""
FIRST_SLOPE = 0.1
"""The cost of a draft in decodes of the same batch, as long as nothing is known."""
MEMORY = 0.9
"""What each verified step leaves of the weight of those before it."""


@dataclass
class Cost:
    """What steps take at one batch size, and the account of what guessing has gained and lost there.

    plain: seconds of a step without drafts. slope: seconds more for each draft in it.
    seconds: time spent at this size. lost: of that, what guessing has cost; negative where it has gained.
    tried: steps with drafts. unsure: so many more steps have to be timed that do not wait for each other;
    barred: guessing is off until they have been.
    """

    plain: float = 0.0
    samples: int = 0
    seconds: float = 0.0
    lost: float = 0.0
    budget: float = BUDGET
    on: bool = False
    since: int = 0
    tried: int = 0
    unsure: int = 0
    barred: bool = False
    _xy: float = 0.0
    _xx: float = 0.0

    def slope(self, rows: int) -> float:
        """Seconds that a draft adds to a step: least squares through what was measured."""
        first = FIRST_SLOPE * self.plain / max(1, rows)
        return max(first / 100, self._xy / self._xx) if self._xx else first

    def saw_plain(self, seconds: float, *, waited: bool = False) -> None:
        """A step without drafts. One that took much longer was interrupted; the very first are slow.

        waited: it could not begin before the one before it had ended, which costs something by itself.
        """
        if self.samples:
            seconds = min(seconds, 1.5 * self.plain)
        self.samples += 1
        if self.samples <= SAMPLES or self.unsure:
            self.plain = min(self.plain or seconds, seconds)
        else:
            self.plain += (seconds - self.plain) / min(self.samples, 8)
        if waited or self.unsure:
            self.lost = -FIRST_CREDIT * self.plain
        self.unsure = REST - 1 if waited else max(0, self.unsure - 1)
        self.barred = self.barred and self.unsure > 0
        self.seconds += seconds

    def saw_drafts(self, seconds: float, rows: int, drafts: int, tokens: int) -> None:
        """A step with guessing on: `drafts` in all, after which `tokens` had come for `rows` requests."""
        self.seconds += seconds
        self.tried += drafts > 0
        if drafts and self.tried <= GRACE:
            return
        if drafts:
            self._xy = MEMORY * self._xy + (seconds - self.plain) * drafts
            self._xx = MEMORY * self._xx + drafts * drafts
        self.lost += seconds - self.plain * tokens / rows
        self.lost = max(self.lost, -CREDIT * self.plain)
        if self.lost < 0:
            self.budget = min(BUDGET, 2 * self.budget)

    def decide(self) -> bool:
        """Whether to guess in the next step: while the account is not overdrawn."""
        allowed = self.budget * self.seconds
        if self.on and self.lost > allowed:
            self.on, self.budget = False, max(LEAST_BUDGET, self.budget / 2)
        elif not self.on and self.samples >= SAMPLES and self.lost <= allowed / 2:
            self.on = True
        return self.on


class Rate:
    """How often a request's drafts were right lately: the chance of each, given those before it."""

    def __init__(self, first: float) -> None:
        self.first, self.right, self.tried = first, 0.0, 0.0

    @property
    def value(self) -> float:
        """Between 0 and 1; what was seen, and a little of what was expected."""
        return (self.right + self.first) / (self.tried + 1.0)

    def saw(self, drafts: int, accepted: int) -> None:
        """`accepted` of `drafts` were right; the first wrong one was tried too, those behind it were not."""
        self.right = MEMORY * self.right + accepted
        self.tried = MEMORY * self.tried + min(drafts, accepted + 1)

    def forget(self) -> None:
        """A step without drafts: what is known grows old, so that sometimes it is tried again."""
        self.right, self.tried = 0.97 * self.right, 0.97 * self.tried


class Control:
    """Decides for each step whether there is guessing at all, and for each request how far.

    Args:
        most: drafts of a request in a step.
        adaptive: False: always the most.

    fresh: a request has ended since the last decision, and another may come.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self.most, self.adaptive = most, adaptive
        self.costs: dict[int, Cost] = {}
        self.rates: dict[Request, Rate] = {}
        self.overall = Rate(FIRST_RATE)
        self.fresh = True

    def cost(self, rows: int) -> Cost:
        """The account of batches of about so many requests: a power of two."""
        return self.costs.setdefault(1 << max(0, rows - 1).bit_length(), Cost())

    def decide(self, rows: int) -> bool:
        """Whether to guess in a step of so many requests."""
        self.fresh = False
        if not self.adaptive:
            return True
        cost = self.cost(rows)
        on = not cost.barred and cost.decide()
        cost.since = cost.since + 1 if on else 0
        return on

    def length(self, request: Request, rows: int) -> int:
        """How many drafts of this request pay: the last one is worth its chance times a token's time."""
        if not self.adaptive:
            return self.most
        cost = self.cost(rows)
        if self.refreshing(rows):
            return 0
        rate = self.rates.setdefault(request, Rate(self.overall.value))
        worth = cost.plain / max(1, rows)  # of a token
        chance = min(0.99, rate.value)
        price = cost.slope(rows) / worth if worth else 0.0
        pays = self.most if price <= 0 else math.floor(math.log(min(1.0, price)) / math.log(chance))
        if pays == 0:
            rate.forget()
        return min(self.most, pays)

    def saw(self, request: Request, drafts: int, accepted: int) -> None:
        """What became of a request's drafts."""
        self.rates.setdefault(request, Rate(self.overall.value)).saw(drafts, accepted)
        self.overall.saw(drafts, accepted)

    def refreshing(self, rows: int) -> bool:
        """Whether the newest decision was for a step without drafts, to see what such a step takes now."""
        return self.cost(rows).since % REFRESH == REFRESH - 1

    def resting(self, rows: int) -> bool:
        """Whether guessing should be off for a moment, to see what steps take that wait for nothing."""
        return self.adaptive and self.cost(rows).since % REFRESH >= REFRESH - REST

    def leave(self, request: Request) -> None:
        """Nothing more is asked about a request."""
        self.rates.pop(request, None)
        self.fresh = True
        for cost in self.costs.values():
            if cost.unsure:
                cost.on, cost.barred = False, True

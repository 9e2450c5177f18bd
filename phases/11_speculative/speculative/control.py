"""How many tokens to guess: as many as pay, by what was accepted and by what a token more costs here.

Whether a draft pays depends on the batch. Alone, a request's step reads all weights whatever it computes,
and tokens more are nearly free. With hundreds of requests each wrong draft takes the place of work that
somebody waits for. So times are measured, for each batch size apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.request import Request
from speculative.price import MEMORY, Price

BUDGET = 0.02
"""The share of the time that guessing may lose, against steps without."""
LEAST_BUDGET = 0.005
"""What is left of it where guessing has failed again and again."""
SAMPLES = 4
"""Steps without drafts that must be timed before anybody guesses."""
CREDIT = 10.0
"""What guessing has gained it may lose again, up to so many steps."""
FIRST_CREDIT = 4.0
"""So many before it has gained any, if it cannot come back at once: a few wrong drafts say little."""
GRACE = 4
"""Steps at a batch size, of 1, 2, 4 and 8 drafts a request, that are not charged: first replays are slow."""
REFRESH = 128
"""Every so many steps with drafts one without: contexts grow, and with them all steps."""
REST = 4
"""So many of these with guessing off: what waits for nothing is faster. Where a source has to see every step
it is off for the second request: the steps that were timed in the first one had to wait for each other."""
FIRST_RATE = 0.7
"""The chance that a draft is right, as long as nothing is known."""
FIRST_SLOPE = 0.1
"""The cost of a draft in tokens of the same batch, as long as nothing is known."""
LONGER = 0.95
"""What each step leaves of the weight of those before it, where it is counted how many drafts are right."""
OLD = 0.03
"""The share of what is known that a step without drafts makes forget, so that sometimes it is tried again."""
LONGEST = 1 - 1 / 4000
"""The same in the account: who has lost may try again, however long the engine has served before."""


@dataclass
class Cost:
    """What steps take at one batch size, and the account of what guessing has gained and lost there.

    plain: seconds of a step without drafts. price: seconds more for those in it. idle: seconds more where
    guessing is on, and there are none: such a step waits for the one before it.
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
    idle: float = 0.0
    price: Price = field(default_factory=Price)

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
            self.price.saw(drafts, seconds - self.plain)
        else:
            self.idle += (1 - MEMORY) * (seconds - self.plain - self.idle)
        self.lost += seconds - self.plain * tokens / rows
        self.lost = max(self.lost, -CREDIT * self.plain)
        if self.lost < 0:
            self.budget = min(BUDGET, 2 * self.budget)

    def longest(self, rows: int, drafts: int) -> float:
        """Seconds, twice what is expected, beyond which a step with guessing on was interrupted."""
        fixed, each = self.price.line(rows, FIRST_SLOPE * self.plain / rows)
        return 2 * (self.plain + (fixed + each * drafts if drafts else self.idle))

    def decide(self) -> bool:
        """Whether to guess in the next step: while the account is not overdrawn."""
        self.seconds, self.lost = LONGEST * self.seconds, LONGEST * self.lost
        allowed = self.budget * self.seconds
        if self.on and self.lost > allowed:
            self.on, self.budget = False, max(LEAST_BUDGET, self.budget / 2)
        elif not self.on and self.samples >= SAMPLES and self.lost <= allowed / 2:
            self.on = True
        return self.on


class Rate:
    """How often drafts were right lately: the chance of each, given those before it."""

    def __init__(self, first: float) -> None:
        self.first, self.right, self.tried = first, 0.0, 0.0

    @property
    def value(self) -> float:
        """Between 0 and 1; what was seen, and a little of what was expected."""
        return (self.right + self.first) / (self.tried + 1.0)

    def saw(self, drafts: int, accepted: int) -> None:
        """`accepted` of `drafts` were right; the first wrong one was tried too, those behind it were not."""
        self.right = LONGER * self.right + accepted
        self.tried = LONGER * self.tried + min(drafts, accepted + 1)

    def forget(self, share: float, expected: float) -> None:
        """What was seen counts less, and what others say counts more."""
        self.right, self.tried = (1 - share) * self.right, (1 - share) * self.tried
        self.first += share * (expected - self.first)


class Control:
    """Decides for each step whether there is guessing at all, and for each request how far.

    most: drafts of a request in a step. adaptive: False: always the most.
    fresh: a request has ended since the last decision, and another may come.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self.most, self.adaptive = most, adaptive
        self.costs: dict[int, Cost] = {}
        self.overall = Rate(FIRST_RATE)
        self.rates = defaultdict[Request, Rate](lambda: Rate(self.overall.value))
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
        before, on = cost.on, not cost.barred and cost.decide()
        if on and not before and cost.lost > 0:  # another try, or what went wrong would go wrong for ever
            self.rates.clear()
            self.overall = Rate(FIRST_RATE)
        cost.since = cost.since + 1 if on else 0
        return on

    def lengths(self, requests: Sequence[Request], rows: int) -> list[int]:
        """How many drafts of each of these requests pay in a step of so many.

        A request's last draft has to be worth what it adds: its chance times a token's time. And all its
        drafts have to be worth its share of what it costs to have any.
        """
        if not self.adaptive or self.refreshing(rows):
            return [0 if self.adaptive else self.most] * len(requests)
        cost = self.cost(rows)
        worth = cost.plain / rows or 1.0  # of a token; a clock may stand still
        fixed, each = cost.price.line(rows, FIRST_SLOPE * worth)
        having = max(0.0, fixed - cost.idle) / rows
        price = math.log(min(1.0, each / worth))
        most = self.most if cost.tried >= GRACE else min(self.most, 1 << cost.tried)
        found = []
        for request in requests:
            rate = self.rates[request]
            chance = min(0.99, rate.value)
            count = min(most, math.floor(price / math.log(chance)))
            gain = worth * chance * (1 - chance**count) / (1 - chance)
            pays = count > 0 and gain >= each * count + having
            if not pays:
                rate.forget(OLD, self.overall.value)
                self.overall.forget(OLD / rows, FIRST_RATE)
                cost.price.forget(OLD / rows)
            found.append(count if pays else 0)
        return found

    def saw(self, request: Request, drafts: int, accepted: int) -> None:
        """What became of a request's drafts."""
        self.rates[request].saw(drafts, accepted)
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

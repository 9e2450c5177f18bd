"""When to guess, and how far: a table by batch size, a rate for each request, and an account.

A draft is nearly free where a step only reads weights, and costs a token's time where it computes. So steps
are timed while the engine serves, for each batch size apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from common.request import Request

BUDGET = 0.015
"""Share of the time that guessing may lose: a user who gains nothing shall not notice it."""
CREDIT = 2.5
"""Plain steps that a try may lose: a few wrong drafts say little. Of its gains guessing may lose as many, and
twice the budget: a few interrupted steps say little, too."""
SWITCH = 0.3
"""Plain steps that it costs to begin and to stop: such a step overlaps with one of its neighbours only."""
HORIZON = 4000
"""Steps that the account looks back: an engine that has served for days tries again as soon as a new one."""
SAMPLES = 4
"""Steps without drafts that are timed first. The shortest counts: first replays of graphs are slow."""
REFRESH, REST = 128, 4
"""The last four of 128 steps are without drafts: contexts grow, and with them the time of all steps."""
FIRST_RATE, FIRST_PRICE = 0.7, 0.1
"""Believed at first: seven of ten drafts are right, and each costs a tenth of a token's time."""
MEMORY = 0.9
"""What a measurement leaves of an average: ten steps are seen, and an interrupted one is forgotten."""
FORGET = 0.01
"""Step toward what was believed at first, in each step without drafts: what did not pay is tried again."""


def expected_tokens(rate: float, drafts: int) -> float:
    """Return how many tokens a step with so many drafts gives on average: 1 + rate + ... + rate^drafts.

    One token is there in any case, and the k-th draft counts if it and all before it are right.

    rate: the chance that a draft is right, below 1.
    """
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def worthwhile(rate: float, having: float, each: float, most: int) -> int:
    """Return how many drafts of a request pay, or 0 if none do.

    The k-th draft is right with chance rate^k. It is made while that is at least `each`, and never if a draft
    costs a token or more. All of them together have to gain more tokens than they cost; else there are none.

    Args:
        rate: the chance that a draft is right, between 0 and 1.
        having: what having any drafts costs, in tokens.
        each: what each draft costs besides, in tokens, above 0.
        most: drafts that are allowed.
    """
    count = min(most, math.floor(math.log(min(1.0, each)) / math.log(rate)))
    return count if expected_tokens(rate, count) - 1 > having + each * count else 0


@dataclass
class Cost:
    """Seconds that steps take at one batch size.

    plain: of a step without drafts. waited: it was timed while each step waited for the one before.
    having: what a step with any drafts takes more, and each: what each draft of every request adds, both in
    plain steps. most: drafts of a request, twice as many as were tried.
    seconds: spent. lost: of these, what steps without drafts would have saved; negative: guessing has gained.
    """

    plain: float = 0.0
    samples: int = 0
    waited: bool = False
    having: float = 0.0
    each: float = FIRST_PRICE
    most: int = 1
    seconds: float = 0.0
    lost: float = 0.0
    on: bool = False
    since: int = 0

    def saw_plain(self, seconds: float, *, waited: bool = False) -> None:
        """Learn from a step without drafts; one that waits is only a makeshift for those that do not."""
        if waited and self.samples >= SAMPLES:
            return
        if self.waited > waited:
            self.samples = 0
        self.waited, self.samples = waited, self.samples + 1
        if self.samples > SAMPLES:
            self.plain += (1 - MEMORY) * (min(seconds, 1.5 * self.plain) - self.plain)
        else:
            self.plain = min(self.plain, seconds) if self.samples > 1 else seconds
            self.lost = -CREDIT * self.plain
        self.seconds += self.plain

    def saw_drafts(self, seconds: float, rows: int, drafts: int, tokens: int) -> None:
        """Learn from a step with `drafts` in all, after which `rows` requests had `tokens`; charge it."""
        if not self.plain:
            return
        x = drafts / rows
        expected = self.having + self.each * x if drafts else 0.0
        more = min(
            seconds / self.plain - 1, 1 + 2 * expected
        )  # beyond that it was interrupted
        if drafts:
            step = (more - expected) * (1 - MEMORY) / (1 + x * x)
            self.having = max(0.0, self.having + step)
            self.each = max(0.001, self.each + step * x)
            self.most = min(2 * self.most, 1 << 10)
        seconds = self.plain * (1 + more)
        self.seconds += seconds
        most = CREDIT * self.plain + 2 * BUDGET * self.seconds
        self.lost = max(-most, self.lost + seconds - self.plain * tokens / rows)


class DraftController:
    """Decides for each step whether there is guessing at all, and for each request how far.

    most: drafts of a request in a step. adaptive: False: always the most.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self.most, self.adaptive = most, adaptive
        self.costs: dict[int, Cost] = defaultdict(Cost)
        self.overall = FIRST_RATE
        self.rates = defaultdict[Request, float](lambda: self.overall)

    def cost(self, rows: int) -> Cost:
        """Return the account of batches of about so many requests: a power of two."""
        return self.costs[1 << max(0, rows - 1).bit_length()]

    def decide(self, rows: int) -> bool:
        """Return True if the next step may have drafts: the account is not overdrawn."""
        if not self.adaptive:
            return True
        cost = self.cost(rows)
        cost.seconds *= 1 - 1 / HORIZON
        cost.lost *= 1 - 1 / HORIZON
        allowed, most = BUDGET * cost.seconds, CREDIT * cost.plain
        if cost.on and cost.lost > allowed:
            cost.on = False
        elif not cost.on and cost.samples >= SAMPLES and cost.lost <= allowed - most:
            if cost.lost > 0:  # another try; what went wrong would go wrong again
                self.overall = FIRST_RATE
                cost.having = 0.0
                cost.each = FIRST_PRICE
                cost.most = 1
                self.rates.clear()
            cost.on = True
            cost.lost = max(cost.lost, allowed - most) + SWITCH * cost.plain
        cost.since += cost.on
        return cost.on

    def times_plain(self, rows: int, *, refresh: bool = True) -> bool:
        """Return True for a step without drafts, to see what it takes: at first, and with `refresh` again."""
        cost = self.cost(rows)
        due = cost.samples < SAMPLES or (refresh and cost.since % REFRESH >= REFRESH - REST)
        return self.adaptive and due

    def lengths(self, requests: Sequence[Request], rows: int) -> list[int]:
        """Return how many drafts of each request pay in a step of so many."""
        if not self.adaptive:
            return [self.most] * len(requests)
        cost, found = self.cost(rows), list[int]()
        for request in requests:
            rate = min(0.99, max(0.01, self.rates[request]))
            found.append(worthwhile(rate, cost.having, cost.each, min(self.most, cost.most)))
            if not found[-1]:
                self.rates[request] += FORGET * (FIRST_RATE - rate)
        if not any(found):
            self.overall += FORGET * (FIRST_RATE - self.overall)
            cost.having -= FORGET * cost.having
            cost.each += FORGET * (FIRST_PRICE - cost.each)
        return found

    def saw(self, request: Request, drafts: int, accepted: int) -> None:
        """Learn what became of a request's drafts; those behind the first wrong one were not tried."""
        tried = min(drafts, accepted + 1)
        keep, right = MEMORY**tried, accepted / tried
        self.rates[request] = keep * self.rates[request] + (1 - keep) * right
        self.overall = keep * self.overall + (1 - keep) * right

    def leave(self, request: Request) -> None:
        """Forget a request."""
        self.rates.pop(request, None)

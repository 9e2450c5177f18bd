"""When to draft, and how many tokens: acceptance rates of requests, and step times by batch size.

Accepted drafts gain tokens. But a step with drafts computes more tokens, and cannot overlap with the step
before it. That costs every request of the batch time. So the batch drafts only while the tokens that its
requests gain together exceed the tokens that all of them lose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.request import Request
from continuous.engine import Engine
from continuous.work import Work

SAMPLES = 4
"""Steps without drafts that are timed first. The shortest counts: first replays of graphs are slow."""
REFRESH, REST = 128, 4
"""The last four of 128 steps are without drafts: contexts grow, and with them the time of all steps."""
DECIDED = 32
"""Most requests that decisions of a batch without drafts look at in a step, on average."""
RETRY = 600
"""Steps without drafts after which the first estimates are believed again: texts change."""
LOWEST_RATE = 0.01
FIRST_RATE = 0.7
"""First estimate of the acceptance rate, of a drafter that cannot be rehearsed."""
FIRST_FIXED, FIRST_EACH = 0.25, 0.1
"""First estimates of what any drafts cost a step, in plain steps, and of what each draft costs, in tokens."""
SWITCH = 0.2
"""What a batch without drafts has to gain besides, in plain steps: beginning and ending costs time, too."""
PRIOR = 6
"""Tries that the rate of all requests counts for in the rate of one."""
FIRST_TRIES = 12
"""Tries that the first rate of all requests counts for."""
MEMORY, LONG_MEMORY = 0.9, 0.99
"""What a measurement leaves of the weight of those before it: of one request, and of all of them."""


def expected_tokens(rate: float, drafts: int) -> float:
    """Return the mean tokens of a step with `drafts` drafts: 1 + rate + ... + rate^drafts.

    One token is there in any case, and the k-th draft counts if it and all before it are accepted.

    rate: the chance that a draft is accepted, below 1.
    """
    return (1 - rate ** (drafts + 1)) / (1 - rate)


def draft_length(rate: float, each: float, most: int) -> int:
    """Return how many drafts gain a request the most tokens in a step, less what they cost; at most `most`.

    The k-th draft is accepted with chance rate^k. It is made if this chance is at least its cost, `each`.

    Args:
        rate: the chance that a draft is accepted, above 0 and below 1.
        each: what each draft costs, in tokens, above 0. No draft is made if that is a token or more.
        most: drafts that are allowed.
    """
    return min(most, math.floor(math.log(min(1.0, each)) / math.log(rate)))


def gain(rate: float, each: float, drafts: int) -> float:
    """Return the tokens that a request gains by `drafts` drafts, less what they cost: `each` tokens a draft.

    rate: the chance that a draft is accepted.
    """
    return expected_tokens(rate, drafts) - 1 - each * drafts


def choose_lengths(
    rates: Sequence[float], fixed: float, each: float, most: int
) -> list[int] | None:
    """Return the number of drafts of each request in the next step, or None if the batch would lose.

    A batch of `len(rates)` requests makes as many tokens in a plain step. So a step that takes `fixed` plain
    steps longer costs `fixed * len(rates)` tokens, and all requests together have to gain more.

    Args:
        rates: each request's chance that a draft is accepted, above 0 and below 1.
        fixed: what a step with any drafts takes longer, in plain steps.
        each: what each draft costs besides, in tokens, above 0.
        most: drafts of a request that are allowed.
    """
    lengths = []
    gained = 0.0
    for rate in rates:
        length = draft_length(rate, each, most)
        lengths.append(length)
        gained += gain(rate, each, length)
    return lengths if gained > fixed * len(rates) else None


@dataclass
class Tries:
    """Weighted counts of verified drafts (`tried`) and of those that were accepted; the latest weigh most."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, tried: int, accepted: int, memory: float) -> None:
        """Add `tried` drafts of a step, of which each multiplies the weight of earlier ones by `memory`."""
        keep = memory**tried
        self.tried = self.tried * keep + tried
        self.accepted = self.accepted * keep + accepted


UNTRIED = Tries()


@dataclass
class StepCost:
    """Measured times of steps at one batch size, with and without drafts.

    plain: seconds of a step without drafts, measured `samples` times.
    fixed: what a step with any drafts takes longer, in plain steps.
    each: what each draft costs besides, in tokens: the plain steps that one draft of every request adds.
    most: drafts of a request; each timed step doubles it.
    drafting: number of steps with drafts, pauses included.
    tried_at: number of the last step with drafts.
    """

    tried_at: int
    plain: float = 0.0
    samples: int = 0
    fixed: float = FIRST_FIXED
    each: float = FIRST_EACH
    tries: int = 0
    most: int = 1
    drafting: int = 0

    def add_plain(self, seconds: float) -> None:
        """Update `plain`, the estimated seconds of a step without drafts, by a measured time in seconds."""
        self.samples += 1
        if self.samples > SAMPLES:
            self.plain += (1 - MEMORY) * (min(seconds, 1.5 * self.plain) - self.plain)
        else:
            self.plain = min(self.plain, seconds) if self.samples > 1 else seconds

    def add_drafts(self, seconds: float, drafts: float) -> None:
        """Update the estimates from the seconds of a step with drafts; drafts: per request, on average."""
        if not (self.plain and drafts):
            return
        expected = self.fixed + self.each * drafts
        longest = 1 + 2 * expected  # beyond that the step was interrupted
        error = min(seconds / self.plain - 1, longest) - expected
        self.tries += 1
        step = error * max(1 - MEMORY, 1 / (1 + self.tries)) / (1 + drafts * drafts)
        self.fixed = max(0.0, self.fixed + step)
        self.each = max(0.001, self.each + step * drafts)
        self.most = min(2 * self.most, 1 << 10)

    def forget_drafts(self) -> None:
        """Reset `fixed` and `each`, what drafts cost, to their first estimates."""
        self.fixed, self.each = FIRST_FIXED, FIRST_EACH
        self.tries, self.most = 0, 1


def is_drafted(request: Request) -> bool:
    """Return True if a request may have drafts in the next step.

    Its prompt must be computed, it must be allowed at least two more tokens, no other sample of its prompt
    may wait for it, and it must have no penalties (for these, each token changes the next logits).
    """
    more = len(request.tokens) + 1 < request.limit
    return more and not (request.prefilling or request.siblings or request.params.penalized)


class DraftController:
    """Decides before each step whether there are drafts, and how many for each request.

    Args:
        most: drafts of a request in a step.
        adaptive: False: always the most.
        watches: the drafter must see every step of a request, so it is switched on only between requests.
        rehearses: the drafter costs the device nothing, so its drafts are first compared with tokens that
            were sampled without them, before any step verifies drafts.
        clock: in seconds; replaced by tests.

    on: steps may have drafts or are watched, so every token must be known before a step is scheduled.
    """

    def __init__(
        self,
        most: int,
        *,
        adaptive: bool = True,
        watches: bool = False,
        rehearses: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.most, self.adaptive = most, adaptive
        self.watches = watches
        self.first_rate = 0.0 if rehearses else FIRST_RATE
        self.clock = clock
        self.on = watches or not adaptive
        self.steps = 0
        self.costs: dict[int, StepCost] = {}
        self._forget_rates()
        self._newcomer = False  # a request may begin that can be watched
        self._engine: Engine | None = None
        self._began: float | None = None
        self._counted = (0, 0)  # the engine's steps, and its steps of decodes alone
        self._finished: list[Work] = []

    def attach(self, engine: Engine) -> None:
        """Store the engine whose steps are counted and timed."""
        self._engine = engine

    def cost(self, rows: int) -> StepCost:
        """Return the estimated times of steps at the batch size `rows`, rounded up to a power of two."""
        size = 1 << max(0, rows - 1).bit_length()
        return self.costs.setdefault(size, StepCost(self.steps))

    def rate(self, request: Request) -> float:
        """Return the estimated chance that a request's draft is accepted, from its drafts and all others."""
        if not is_drafted(request):
            return LOWEST_RATE
        overall = self._overall.accepted / self._overall.tried
        own = self._rates.get(request, UNTRIED)
        rate = (own.accepted + PRIOR * overall) / (own.tried + PRIOR)
        return min(0.99, max(LOWEST_RATE, rate))

    def decide(self, running: Sequence[Request]) -> list[int] | None:
        """Return a list of the number of drafts of each running request in the next step; None: no drafts.

        Called once a step, before it is scheduled; the time since the last call is taken as that of a step.
        """
        if not self.adaptive:
            return [self.most] * len(running)
        self.steps += 1
        self._measure(len(running))
        lengths = self._choose(running)
        on = lengths is not None
        if on != self.on or not running:  # the next step overlaps with only one neighbour
            self._began = None  # so do not time it
        self.on = on
        return lengths

    def is_gain(self, drafts: Mapping[Request, Sequence[int]], rows: int) -> bool:
        """Return True if a step of `rows` requests should gain by these drafts (token ids by request)."""
        cost = self.cost(rows)
        gained = sum(gain(self.rate(one), cost.each, len(its)) for one, its in drafts.items())
        return not self.adaptive or gained > cost.fixed * rows

    def add_tries(self, request: Request, drafts: int, accepted: int) -> None:
        """Count a request's drafts of a step that were tried, up to the first wrong one, and the accepted.

        No draft at all counts as a wrong one: a drafter that finds nothing gains nothing.
        """
        tried = max(1, min(drafts, accepted + 1))
        self._rates.setdefault(request, Tries()).add(tried, accepted, MEMORY)
        self._overall.add(tried, accepted, LONG_MEMORY)

    def add_work(self, work: Work) -> None:
        """Count the tokens and drafts of one request (`work`) in a finished step, if steps are timed."""
        if self.adaptive:  # otherwise nothing would ever remove it
            self._finished.append(work)

    def leave(self, request: Request) -> None:
        """Drop the draft counts of a request that has ended or is preempted."""
        self._rates.pop(request, None)
        self._newcomer = True

    def _forget_rates(self) -> None:
        self._rates: dict[Request, Tries] = {}
        self._overall = Tries(FIRST_TRIES * self.first_rate, FIRST_TRIES)

    def _choose(self, running: Sequence[Request]) -> list[int] | None:
        rows = len(running)
        cost = self.cost(rows)
        newcomer = self._newcomer
        self._newcomer = newcomer and not running
        known = cost.samples >= SAMPLES
        if self.watches:
            ready = known if newcomer else self.on
        else:
            rests = cost.drafting % REFRESH >= REFRESH - REST
            cost.drafting += known and (self.on or rests)
            waits = not self.on and self.steps % (1 + rows // DECIDED)
            ready = known and not (rests or waits)
        if not ready:
            return None
        if self.on:
            cost.tried_at = self.steps
        elif self.steps - cost.tried_at > RETRY:
            cost.forget_drafts()
            cost.tried_at = self.steps
            self._forget_rates()
        rates = list(map(self.rate, running)) or [max(LOWEST_RATE, self.first_rate)]
        fixed = cost.fixed if self.on else cost.fixed + SWITCH
        lengths = choose_lengths(rates, fixed, cost.each, min(self.most, cost.most))
        return None if lengths is None else lengths[:rows]

    def _measure(self, rows: int) -> None:
        """Update a step's estimated cost by the time since the last call, if that step had no prompt tokens.

        Estimates are kept by batch size, with and without drafts. rows: requests in the step that begins.
        """
        began, self._began = self._began, self.clock()
        works, self._finished = self._finished, []
        if self._engine is None:
            return
        before, stats = self._counted, self._engine.stats
        self._counted = stats.steps, stats.decode_steps
        if began is None or stats.steps != before[0] + 1:
            return
        seconds = self._began - began
        if not self.on and stats.decode_steps == before[1] + 1:
            self.cost(rows).add_plain(seconds)
        elif works and all(map(is_decode, works)):
            drafts = sum(len(work.drafts) for work in works)
            self.cost(len(works)).add_drafts(seconds, drafts / len(works))


def is_decode(work: Work) -> bool:
    """Return True if a work (one request's tokens in a step) is the newest token and drafts, no others."""
    return work.count == 1 + len(work.drafts) and len(work.sampled_requests) == 1

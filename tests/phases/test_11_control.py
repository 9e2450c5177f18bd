"""When phase 11 guesses: in vain it costs next to nothing, and where guesses are right it pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

import speculative
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.work import Work
from forward.model import Model
from paged_cache import PagedEngine
from speculative.control import RETRY, SAMPLES, DraftController
from speculative.proposer import Proposer
from speculative.speculation import SpeculativeRunner, Verifier

SMALL = {
    "max_rows": 6,
    "max_len": 96,
    "block_size": 4,
    "cache_bytes": 1 << 20,
    "step_tokens": 64,
}


@dataclass
class Steps:
    """The counters of an engine that the controller reads."""

    steps: int = 0
    decode_steps: int = 0


@dataclass
class Counted:
    """As much of an engine as the controller reads."""

    stats: Steps


class Machine:
    """Steps of known cost, in plain steps, and drafts of which a known share is right.

    each: what a draft adds to a step. fixed: what any drafts add. found: how often there is a guess at all.
    rehearses: without drafts, one request a step learns whether a draft would have been right.
    """

    def __init__(
        self,
        rows: int = 1,
        *,
        each: float = 0.02,
        fixed: float = 0.1,
        most: int = 8,
        rehearses: bool = True,
        found: float = 1.0,
    ) -> None:
        self.rows = rows
        self.each, self.fixed = each, fixed
        self.rehearses, self.found = rehearses, found
        self.control = DraftController(most, rehearses=rehearses, clock=lambda: self.seconds)
        self.engine = Counted(Steps())
        self.control.attach(self.engine)  # type: ignore[arg-type]
        self.requests = [Request(n, [1], 1, 10**9, SamplingParams()) for n in range(rows)]
        for request in self.requests:
            request.num_computed_tokens = 1  # its prompt
        self.rng = random.Random(0)
        self.plain = 1.0
        self.seconds = 0.0
        self.tokens = 0
        self.drafts = list[int]()  # in each step
        self.lost = 0.0  # interruptions, which are nobody's fault

    def step(self, rate: float, *, right: int | None = None, interrupted: float = 0.0) -> None:
        """Advance by a step; drafts of all requests, or of the first `right`, are right so often."""
        control, rows = self.control, self.rows
        before = control.on
        lengths = control.decide(self.requests)
        drafts = dict[Request, int]()
        for request, length in zip(self.requests, lengths or (), strict=False):
            if length and self.rng.random() < self.found:
                drafts[request] = length
            elif length:
                control.add_tries(request, 0, 0)
        if lengths is None and self.rehearses:
            number = control.steps % min(rows, 8)
            control.add_tries(self.requests[number], 1, self._accepted(number, 1, rate, right))
        if not control.is_gain({one: [0] * count for one, count in drafts.items()}, rows):
            drafts.clear()
        for number, request in enumerate(self.requests):
            length = drafts.get(request, 0)
            accepted = self._accepted(number, length, rate, right)
            if length:
                control.add_tries(request, length, accepted)
            if control.on:
                control.add_work(Work(request, 0, 0, length + 1, (0,) * length, (request,)))
            self.tokens += accepted + 1
        count = sum(drafts.values())
        took = 1 + (self.fixed + self.each * count if count else 0.0)
        took += 0.3 * (control.on != before)  # it overlaps with one of its neighbours only
        self.seconds += self.plain * took + interrupted
        self.lost += interrupted
        self.engine.stats.steps += 1
        self.engine.stats.decode_steps += not count
        self.drafts.append(count)

    def _accepted(self, number: int, drafts: int, rate: float, right: int | None) -> int:
        accepted = 0
        rate = rate if right is None or number < right else 0.0
        while accepted < drafts and self.rng.random() < rate:
            accepted += 1
        return accepted

    def run(self, rate: float, steps: int, *, right: int | None = None) -> float:
        """Seconds a token over those without guessing."""
        before, tokens = self.seconds - self.lost, self.tokens
        for _ in range(steps):
            self.step(rate, right=right)
        seconds = self.seconds - self.lost - before
        return seconds / (self.tokens - tokens) / (self.plain / self.rows)


EITHER = pytest.mark.parametrize("rehearses", [True, False], ids=["ngrams", "a model"])


def share(rows: int) -> float:
    """What a draft adds to a step of so many requests, in plain steps: little while weights are read."""
    return (0.05 + 0.9 * rows / 256) / rows


@EITHER
@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.4])
def test_drafts_that_are_wrong_cost_at_most_one_percent(
    rows: int, fixed: float, rehearses: bool
) -> None:
    machine = Machine(rows, each=share(rows), fixed=fixed, rehearses=rehearses)
    assert machine.run(0.0, 4000 if rows < 64 else 600) < 1.01


@EITHER
def test_a_batch_does_not_wait_for_the_drafts_of_some(rehearses: bool) -> None:
    """Of 256 requests five repeat themselves: what they gain, 251 others pay."""
    machine = Machine(256, each=share(256), fixed=0.4, rehearses=rehearses)
    assert machine.run(0.9, 600, right=5) < 1.01


@pytest.mark.parametrize(
    ("drafts", "accepted", "rate"), [(4, 2, 2 / 3), (4, 0, 0.0), (3, 3, 1.0), (0, 0, 0.0)]
)
def test_the_first_wrong_draft_is_a_try_and_those_behind_it_are_none(
    drafts: int, accepted: int, rate: float
) -> None:
    control = DraftController(8)
    request = Request(0, [1], 1, 10**9, SamplingParams(), num_computed_tokens=1)
    for _ in range(500):
        control.add_tries(request, drafts, accepted)
    found = control.rate(request)
    assert found == pytest.approx(min(max(rate, 0.01), 0.99), abs=0.01), (
        f"request 0: of {drafts} drafts {accepted} are accepted in each step, a rate of {found:.2f}"
    )


def test_ngrams_make_no_draft_before_they_have_been_right() -> None:
    machine = Machine(256, each=share(256))
    machine.run(0.1, 600)
    assert sum(machine.drafts) == 0


@EITHER
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_no_hundred_steps_of_wrong_drafts_stand_out(rows: int, rehearses: bool) -> None:
    machine = Machine(rows, each=share(rows), fixed=0.2, most=3, rehearses=rehearses)
    found = [machine.run(0.0, 128) for _ in range(8)]
    assert max(found) < 1.04, f"128 steps of {rows} requests cost {max(found) - 1:.1%} more"


def test_a_drafter_that_finds_nothing_is_not_waited_for() -> None:
    machine = Machine(rehearses=False, found=0.0)
    machine.run(0.0, 40)
    assert not machine.control.on


def test_some_slow_moments_do_not_end_what_gains() -> None:
    """Steps take three times as long for a while, as where another program runs: plain ones would, too."""
    for count in (8, 30):
        machine = Machine(each=0.1, fixed=0.3, most=3)
        machine.run(0.7, 400)
        for _ in range(count):
            machine.step(0.7, interrupted=2.0)
        machine.run(0.7, RETRY)
        assert machine.run(0.7, 100) < 0.8, f"off {RETRY} steps after {count} that were slow"


@EITHER
def test_right_drafts_gain(rehearses: bool) -> None:
    given: dict[str, Any] = {"rehearses": rehearses}
    assert Machine(**given).run(0.95, 4000) < 0.2
    assert Machine(4, **given).run(0.8, 2000) < 0.5
    assert Machine(each=0.05, fixed=0.3, **given).run(0.5, 4000) < 0.95, "0.77 is the best"
    assert Machine(each=0.02, fixed=0.6, **given).run(0.7, 4000) < 0.65, (
        "any drafts cost much, and eight are worth it"
    )
    for rows in (1, 2, 4, 8, 16):
        machine = Machine(rows, each=share(rows), fixed=0.3, **given)
        assert machine.run(0.8, 500) < 0.53, f"{rows} requests gain less"


@EITHER
def test_drafts_that_cost_as_much_as_a_token_are_not_made(rehearses: bool) -> None:
    assert Machine(each=1.0, fixed=0.0, rehearses=rehearses).run(0.7, 4000) < 1.03


def test_a_request_that_is_wrong_does_not_stop_the_others() -> None:
    machine = Machine(2)
    right, wrong = machine.requests
    for _ in range(SAMPLES):
        machine.step(0.0)
    for _ in range(40):
        machine.step(0.9)
    for _ in range(30):
        machine.control.add_tries(wrong, 4, 0)
        machine.control.add_tries(right, 4, 4)
    lengths = machine.control.decide(machine.requests)
    assert lengths is not None and lengths[0] == 8 and lengths[1] <= 3


def test_steps_grow_with_their_contexts() -> None:
    """Plain steps become four times as long; against those of the beginning, drafts would only lose."""
    machine = Machine(each=0.02, fixed=0.2)
    for _ in range(3000):
        machine.plain *= 4 ** (1 / 3000)
        machine.step(0.7)
    assert machine.control.cost(1).plain == pytest.approx(4.0, rel=0.2)
    assert sum(count > 0 for count in machine.drafts[-128:]) > 110, "off, though drafts gain"


@EITHER
def test_what_was_wrong_is_tried_again(rehearses: bool) -> None:
    """For 200 or 4,000 steps every draft is wrong, then nine of ten are right."""
    for wrong in (200, 4000):
        machine = Machine(each=0.1, fixed=0.0, most=4, rehearses=rehearses)
        machine.run(0.0, wrong)
        machine.run(0.9, RETRY + 100)
        assert machine.run(0.9, 500) < 0.6, f"still off after {wrong} wrong steps"


# With real engines, whose clock is a test's.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stubborn(Proposer):
    """Guesses the same token again and again, which is wrong, or nothing."""

    def __init__(self, count: int, watches: bool = False) -> None:
        self.count, self.watches = count, watches
        self.rehearses = not watches

    def guess(self, requests: Any, lengths: Any) -> list[list[int]]:
        return [[256] * min(self.count, length) for length in lengths]


def clocked(
    model: Model, source: Proposer, took: Callable[[Any], float]
) -> tuple[PagedEngine, SpeculativeRunner, Clock]:
    """An engine that overlaps, whose steps take as many seconds as `took` says of each when it lands."""
    clock = Clock()
    engine = speculative.load(model, drafter="none", **SMALL)
    speculator = engine.scheduler.drafter = SpeculativeRunner(source, 4, clock=clock)
    engine.runner.verifier = Verifier(engine.scheduler.rows.tokens)
    speculator.attach(engine)
    collect = engine.collect

    def timed(pending: Any) -> None:
        clock.now += took(pending)
        collect(pending)

    engine.collect = timed  # type: ignore[method-assign]
    return engine, speculator, clock


def test_a_loop_waits_for_the_drafter_that_the_engine_has_now(model: Model) -> None:
    engine = speculative.load(model, drafter="ngram", **SMALL)
    speculator = SpeculativeRunner(Stubborn(2), 4, adaptive=False)
    engine.scheduler.drafter = speculator
    speculator.attach(engine)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert speculator.stats.steps > 15, (
        "a drafter that took the place of another one is never asked"
    )
    assert not speculator.control._rates, (
        "request 0 has ended, but its drafter has not been told"
    )
    assert len(speculator.control._finished) <= 2, (
        "works of steps long past are kept, and their requests with them"
    )


def test_a_drafter_with_nothing_to_say_does_not_make_steps_wait(model: Model) -> None:
    """The first steps are slow, so that steps that wait for the one before look fast."""
    waited = steps = 0

    def took(pending: Any) -> float:
        nonlocal waited, steps
        steps += 1
        waited += speculator.needs_finished_step and steps > 300
        return (
            3.0 if steps < 3 else 1.5 if speculator.needs_finished_step or steps < 8 else 1.0
        )

    engine, speculator, _clock = clocked(model, Stubborn(0), took)
    for _ in range(10):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=90, ignore_eos=True))
    assert waited < 60, (
        f"{waited} of the last 600 steps waited for the one before, with no drafts"
    )


@pytest.mark.parametrize("count", [0, 9], ids=["nothing", "always wrong"])
def test_a_source_that_watches_is_judged_by_steps_that_do_not_wait(
    model: Model, count: int
) -> None:
    """A head sees its first request from the prompt on, so that all steps of it wait, and are slow."""
    steps = list[bool]()

    def took(pending: Any) -> float:
        steps.append(speculator.needs_finished_step)
        return (1.5 if speculator.needs_finished_step else 1.0) + 0.1 * sum(
            len(work.drafts) for work in pending.works
        )

    engine, speculator, clock = clocked(model, Stubborn(count, watches=True), took)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    assert all(steps[:3]), "request 0: its first steps were not watched"
    engine.generate([[1, 2, 3]], params)
    assert speculator.control.costs[1].plain == pytest.approx(1.0), (
        "it is compared with steps that wait"
    )
    for _ in range(4):
        engine.generate([[1, 2, 3]], params)
    before = clock.now
    for number in range(5):
        steps.clear()
        engine.generate([[1, 2, 3]], params)
        turned_on = sum(after and not before for before, after in pairwise(steps))
        assert not turned_on, f"request {6 + number}: guessing has begun in the middle of it"
    assert clock.now - before < 1.03 * 5 * 41, "guessing in vain has cost more than it may"

"""When phase 11 guesses: in vain it costs next to nothing, and where guesses are right it pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import speculative
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.seams import Drafter
from forward.model import Model
from paged_cache import PagedEngine
from speculative.control import SAMPLES, Cost, DraftController
from speculative.loops import HostDrafter, draft_loop_around
from speculative.speculation import Proposer, SpeculativeRunner, verify

SMALL = {
    "max_rows": 6,
    "max_len": 96,
    "block_size": 4,
    "cache_bytes": 1 << 20,
    "step_tokens": 64,
}


class Machine:
    """Steps of known cost, in plain steps, and drafts of which a known share is right."""

    def __init__(
        self, rows: int = 1, *, each: float = 0.02, fixed: float = 0.1, most: int = 8
    ) -> None:
        self.control = DraftController(most)
        self.rows = rows
        self.each = each
        self.fixed = fixed
        self.requests = [Request(n, [1], 1, 10**9, SamplingParams()) for n in range(rows)]
        self.rng = random.Random(0)
        self.plain = 1.0
        self.seconds = 0.0
        self.tokens = 0
        self.drafts = list[int]()  # in each step
        self.was = False  # guessing

    def step(self, rate: float, *, interrupted: float = 0.0) -> None:
        control, rows = self.control, self.rows
        on = control.decide(rows) and not control.times_plain(rows)
        lengths = control.lengths(self.requests, rows) if on else [0] * rows
        came = 0
        for request, length in zip(self.requests, lengths, strict=True):
            accepted = 0
            while accepted < length and self.rng.random() < rate:
                accepted += 1
            came += accepted + 1
            if length:
                control.saw(request, length, accepted)
        drafts = sum(lengths)
        took = (
            self.plain * (1 + (self.fixed + self.each * drafts if drafts else 0.0))
            + interrupted
        )
        cost = control.cost(rows)
        if on == self.was:  # the step between is not timed
            cost.saw_drafts(took, rows, drafts, came) if on else cost.saw_plain(took)
        else:
            self.seconds += 0.3 * self.plain
        self.was = on
        self.seconds, self.tokens = self.seconds + took - interrupted, self.tokens + came
        self.drafts.append(drafts)

    def run(self, rate: float, steps: int) -> float:
        """Seconds a token over those without guessing."""
        before, tokens = self.seconds, self.tokens
        for _ in range(steps):
            self.step(rate)
        return (self.seconds - before) / (self.tokens - tokens) / (self.plain / self.rows)


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.4])
def test_guessing_in_vain_costs_at_most_three_percent(rows: int, fixed: float) -> None:
    machine = Machine(rows, each=(0.05 + 0.9 * rows / 256) / rows, fixed=fixed)
    assert machine.run(0.0, 4000 if rows < 64 else 600) < 1.03


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_no_hundred_steps_in_vain_stand_out(rows: int) -> None:
    machine = Machine(rows, each=(0.05 + 0.9 * rows / 256) / rows, fixed=0.2, most=3)
    found = [machine.run(0.0, 128) for _ in range(8)]
    assert max(found) < 1.04, f"128 steps of {rows} requests cost {max(found) - 1:.1%} more"
    assert sum(found) < 8 * 1.025, (
        f"all steps of {rows} requests cost {sum(found) / 8 - 1:.1%} more"
    )


def test_some_slow_moments_do_not_end_what_pays() -> None:
    """Steps take three times as long for a while, as where another program runs: plain ones would, too."""
    for count in (8, 30):
        machine = Machine(each=0.1, fixed=0.3, most=3)
        machine.run(0.7, 400)
        for _ in range(count):
            machine.step(0.7, interrupted=2.0)
        machine.run(0.7, 250)
        assert machine.run(0.7, 100) < 0.8, (
            f"guessing is off 250 steps after {count} that were slow"
        )


def test_guessing_pays_where_it_is_right() -> None:
    assert Machine().run(0.95, 4000) < 0.2
    assert Machine(4).run(0.8, 2000) < 0.5
    assert Machine(each=0.05, fixed=0.3).run(0.5, 4000) < 0.85, (
        "0.77 is the best that there is"
    )
    assert Machine(each=0.02, fixed=0.6).run(0.7, 4000) < 0.65, (
        "having any is dear, and eight are worth it"
    )


def test_where_a_draft_costs_as_much_as_a_token_nobody_guesses() -> None:
    assert Machine(each=1.0, fixed=0.0).run(0.7, 4000) < 1.03


def test_a_request_that_is_wrong_does_not_stop_the_others() -> None:
    machine = Machine(2)
    right, wrong = machine.requests
    for _ in range(SAMPLES):
        machine.step(0.0)
    for _ in range(40):
        machine.step(0.9)
    for _ in range(30):
        machine.control.saw(wrong, 4, 0)
        machine.control.saw(right, 4, 4)
    most, none = machine.control.lengths(machine.requests, 2)
    assert most == 8 and none == 0


def test_steps_grow_with_their_contexts() -> None:
    """Plain steps become four times as long; against those of the beginning, guessing would only lose."""
    machine = Machine(each=0.02, fixed=0.2)
    for _ in range(3000):
        machine.plain *= 4 ** (1 / 3000)
        machine.step(0.7)
    assert machine.control.cost(1).plain == pytest.approx(4.0, rel=0.2), (
        "plain steps are those of long ago"
    )
    assert sum(count > 0 for count in machine.drafts[-128:]) > 110, (
        "guessing is off though it pays"
    )


def test_what_was_wrong_is_tried_again() -> None:
    """For 200 or 4,000 steps every draft is wrong, then half of all steps accept everything."""
    for wrong in (200, 4000):
        machine = Machine(each=0.1, fixed=0.0, most=4)
        machine.run(0.0, wrong)
        machine.run(0.9, 3000)
        assert machine.run(0.9, 500) < 0.6, (
            f"after {wrong} wrong steps guessing has not begun again"
        )


def test_a_step_that_waits_does_not_count_beside_those_that_do_not() -> None:
    cost = Cost()
    for _ in range(SAMPLES):
        cost.saw_plain(1.0)
    cost.saw_plain(2.0, waited=True)
    assert not cost.waited, f"a step that waited has taken the place of {SAMPLES} that did not"
    assert (cost.plain, cost.samples) == (1.0, SAMPLES)


# With real engines, whose clock is a test's.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Stubborn(Proposer):
    """Guesses the same token again and again, which is wrong, or nothing."""

    def __init__(self, count: int, watches: bool = False) -> None:
        self.count, self.watches = count, watches

    def guess(self, requests: Any, lengths: Any) -> list[list[int]]:
        return [[256] * min(self.count, length) for length in lengths]


def clocked(
    model: Model, source: Proposer, took: Callable[[Any], float], in_turn: bool = False
) -> tuple[PagedEngine, SpeculativeRunner, Clock]:
    """An engine that overlaps, whose steps take as many seconds as `took` says of each when it lands."""
    clock = Clock()
    engine = speculative.load(model, drafter="none", **SMALL)
    speculator = engine.scheduler.drafter = SpeculativeRunner(
        source, DraftController(4), clock
    )
    engine.loop = draft_loop_around(engine)
    verify(engine)
    speculator.attach(engine)
    speculator.throttle.in_turn = in_turn
    collect = engine.collect

    def timed(pending: Any) -> None:
        clock.now += took(pending)
        collect(pending)

    engine.collect = timed  # type: ignore[method-assign]
    return engine, speculator, clock


class Around(HostDrafter):
    def __init__(self, inner: Drafter) -> None:
        self.inner = inner


@pytest.mark.parametrize("around", [False, True], ids=["alone", "another around it"])
def test_a_loop_waits_for_the_drafter_that_the_engine_has_now(
    model: Model, around: bool
) -> None:
    engine = speculative.load(model, drafter="ngram", **SMALL)
    speculator = SpeculativeRunner(Stubborn(2), DraftController(4, adaptive=False))
    engine.scheduler.drafter = Around(speculator) if around else speculator
    speculator.attach(engine)
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert speculator.stats.steps > 15, (
        "a drafter that took the place of another one is never asked"
    )
    assert not speculator.control.rates, (
        "request 0 has ended, but its drafter has not been told"
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


def test_where_the_device_is_the_host_a_slow_moment_is_not_blamed_on_guessing(
    model: Model,
) -> None:
    """Steps overlap with nothing there, so one without drafts takes what it takes without guessing."""
    steps = 0

    def took(pending: Any) -> float:
        nonlocal steps
        steps += 1
        return 2.0 if 60 <= steps < 160 else 1.0

    engine, speculator, _clock = clocked(model, Stubborn(0, watches=True), took, in_turn=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for number in range(8):
        engine.generate([[1, 2, 3]], params)
        assert speculator.needs_finished_step, (
            f"request {number}: guessing has paid for what the machine did meanwhile"
        )
        if number in (2, 7):
            seen, now = speculator.control.costs[1].plain, 2.0 if number == 2 else 1.0
            assert seen == pytest.approx(now, rel=0.05), (
                f"request {number}: plain steps take {now} s now"
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
    assert all(steps), "request 0: a step was not watched"
    assert speculator.control.costs[1].plain == pytest.approx(1.5)
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

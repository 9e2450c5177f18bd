"""Phase 04's scheduler against a cache that writes down every call and insists on the protocol."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Sequence

import pytest

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.scheduler import Scheduler
from continuous.seams import Drafter
from continuous.work import Work
from tests.schedules import name_of

pytestmark = pytest.mark.timeout(20)

Call = tuple[str | int, ...]


class StrictCache:
    """A `CacheManager` that knows what every request holds.

    room: tokens that all requests together may hold.
    found: how many of any request's first tokens `lookup` finds.
    refuses: requests that get no more room, until they are taken out again.
    """

    def __init__(self, room: int = 1000, found: int = 0) -> None:
        self.room, self.found = room, found
        self.refuses: set[Request] = set()
        self.calls: list[Call] = []
        self.held: dict[Request, int] = {}
        self.computed: dict[Request, int] = {}  # by steps that the host has seen the end of
        self.committed: dict[Request, int] = {}
        self.promised: Request | None = None

    @property
    def free(self) -> int:
        return self.room - sum(self.held.values())

    def holds(self, tokens: int) -> bool:
        return tokens <= self.room

    def fits(self, request: Request) -> bool:
        self.calls.append(("fits", request.id))
        assert request.row < 0, (
            f"{name_of(request)}: asked whether it fits, but it is in already"
        )
        yes = len(request.tokens) <= self.free and request not in self.refuses
        self.promised = request if yes else None
        return yes

    def lookup(self, request: Request) -> int:
        self.calls.append(("lookup", request.id))
        return min(self.found, len(request.tokens) - 1)

    def reserve(self, request: Request, upto: int) -> bool:
        self.calls.append(("reserve", request.id, upto))
        name, held = name_of(request), self.held.get(request)
        assert request.row >= 0, f"{name}: room is reserved before it has a row"
        assert upto < request.limit, (
            f"{name}: room for {upto} tokens, but its limit is {request.limit}"
        )
        if held is None:
            assert self.promised is request, (
                f"{name} is let in, but fits was not asked for it just before"
            )
            found = min(self.found, len(request.tokens) - 1)
            assert request.num_computed_tokens == found, (
                f"{name}: {found} of its tokens are here, but {request.num_computed_tokens} count as computed"
            )
        elif upto > held and request in self.refuses:
            return False
        self.promised, more = None, max(0, upto - (held or 0))
        if more > self.free:
            return False
        self.held[request] = (held or 0) + more
        return True

    def commit(self, request: Request, upto: int) -> None:
        self.calls.append(("commit", request.id, upto))
        name = name_of(request)
        computed = self.computed.get(request, 0)
        known = len(request.tokens)
        assert request in self.held, f"{name}: commits {upto} tokens, but holds nothing"
        assert upto <= computed, (
            f"{name}: commits {upto} tokens, but {computed} are known to be computed"
        )
        assert upto <= known, f"{name}: commits {upto} tokens, but the host knows {known}"
        self.committed[request] = upto

    def release(self, request: Request) -> None:
        self.calls.append(("release", request.id))
        name = name_of(request)
        assert request in self.held, f"{name}: gives back what it does not hold"
        assert request.row >= 0, f"{name}: its row is taken away before its room"
        del self.held[request]
        self.computed.pop(request, None)
        self.committed.pop(request, None)

    def check(self) -> None:
        pass


class Steps:
    """Runs a scheduler without an engine, and looks at every step that it makes."""

    def __init__(self, scheduler: Scheduler, cache: StrictCache) -> None:
        self.scheduler, self.cache = scheduler, cache

    def schedule(self) -> list[Work]:
        scheduler, cache = self.scheduler, self.cache
        before, mark = list(scheduler.running), len(cache.calls)
        works = scheduler.schedule()
        entered = False
        for work in works:
            name = name_of(work.request)
            end = work.start + work.count
            held = cache.held.get(work.request, 0)
            assert end <= held, (
                f"{name}: token {end - 1} is scheduled, but room is reserved for {held}"
            )
            assert not (entered and work.request in before), (
                f"{name} runs, but a newcomer comes first"
            )
            entered = entered or work.request not in before
        spent = sum(work.count for work in works)
        assert spent <= scheduler.step_tokens, (
            f"{spent} tokens in a step of {scheduler.step_tokens}"
        )
        kinds = [str(call[0]) for call in cache.calls[mark:]]
        assert not {"commit"} & set(kinds), "a step that is only scheduled commits something"
        return works

    def finish_step(self, works: Sequence[Work], *, computed: bool = True) -> None:
        """The device has run these works, and every taker gets token 1."""
        for work in works:
            end = work.start + work.count
            requests = work.sampled_requests or (work.request,)
            for request in requests:
                if request.finish_reason is None:
                    request.tokens += [1] * bool(work.sampled_requests)
                if computed and request in self.cache.held:
                    self.cache.computed[request] = end
            self.scheduler.finish_step(work, computed=computed)
            for request in requests:
                if computed and request.row >= 0:
                    committed = self.cache.committed.get(request, 0)
                    assert committed == end, (
                        f"{name_of(request)}: {end} tokens are known and computed, but {committed} committed"
                    )
                if len(request.tokens) == request.limit and request.finish_reason is None:
                    request.finish_reason = "length"
                    self.scheduler.leave(request)

    def step(self) -> list[Work]:
        works = self.schedule()
        self.finish_step(works)
        return works


def setup(
    *,
    rows: int = 4,
    step_tokens: int = 32,
    room: int = 1000,
    found: int = 0,
    kind: type[Scheduler] = Scheduler,
) -> tuple[Steps, Scheduler, StrictCache]:
    cache = StrictCache(room, found)
    scheduler = kind(RequestRows(rows, 64), cache, step_tokens=step_tokens)
    return Steps(scheduler, cache), scheduler, cache


def ask(scheduler: Scheduler, number: int, length: int, more: int) -> Request:
    request = Request(
        number, [2] * length, length, length + more, SamplingParams(max_tokens=more)
    )
    scheduler.add([request])
    return request


def parts(works: Sequence[Work]) -> list[tuple[int, int, int]]:
    """(request, start, count) of each work."""
    return [(work.request.id, work.start, work.count) for work in works]


def test_the_life_of_one_request() -> None:
    steps, scheduler, cache = setup(found=2)
    request = ask(scheduler, 0, 5, 3)
    works = [parts(steps.step()) for _ in range(3)]
    assert works == [[(0, 2, 3)], [(0, 5, 1)], [(0, 6, 1)]], (
        "the two tokens found are not computed again"
    )
    assert request.cached_tokens == 2 and request.finish_reason == "length"
    assert cache.calls == [
        ("fits", 0), ("lookup", 0), ("reserve", 0, 5), ("commit", 0, 5),
        ("reserve", 0, 6), ("commit", 0, 6), ("reserve", 0, 7), ("commit", 0, 7), ("release", 0),
    ], "calls of the cache, the last of which gives request 0's room back"  # fmt: skip
    assert scheduler.idle, "request 0 has ended, but still runs"
    assert scheduler.rows.free == 4, "request 0 has ended, but keeps row 0"
    assert not cache.held


def test_those_that_run_come_before_newcomers() -> None:
    steps, scheduler, cache = setup(step_tokens=5)
    first, second = ask(scheduler, 0, 2, 9), ask(scheduler, 1, 3, 9)
    steps.step()
    ask(scheduler, 2, 4, 2)
    cache.calls.clear()
    works = steps.step()
    assert parts(works) == [(0, 2, 1), (1, 3, 1)], (
        "a newcomer took the tokens of those that run"
    )
    assert [call[:2] for call in cache.calls][:2] == [("reserve", 0), ("reserve", 1)]
    assert second.row >= 0 and first.row >= 0


def test_nobody_overtakes_the_first_in_line() -> None:
    steps, scheduler, cache = setup(room=20)
    ask(scheduler, 0, 8, 6)
    steps.step()
    large, small = ask(scheduler, 1, 16, 2), ask(scheduler, 2, 1, 2)
    works = steps.schedule()
    assert parts(works) == [(0, 8, 1)] and large.row < 0 and small.row < 0
    assert ("fits", 2) not in cache.calls, "the second in line is asked in before the first"
    assert ("lookup", 1) not in cache.calls and large.num_computed_tokens == 0


def test_who_gets_no_room_waits_and_nobody_new_takes_his_turn() -> None:
    steps, scheduler, cache = setup()
    first, _ = ask(scheduler, 0, 4, 5), ask(scheduler, 1, 4, 5)
    steps.step()
    newcomer = ask(scheduler, 2, 4, 5)
    cache.refuses.add(first)
    assert parts(steps.step()) == [(1, 4, 1)], "request 0 has no room, and request 1 has"
    assert newcomer.row < 0 and ("fits", 2) not in cache.calls, (
        "a newcomer enters where somebody lacks room"
    )
    assert first.num_computed_tokens == 4 and first.placeholders == first.in_flight == 0
    cache.refuses.clear()
    assert parts(steps.step()) == [(0, 4, 1), (1, 5, 1), (2, 0, 4)]


def test_a_failed_step_commits_nothing() -> None:
    steps, scheduler, cache = setup()
    request = ask(scheduler, 0, 4, 5)
    steps.finish_step(steps.schedule(), computed=False)
    assert not [call for call in cache.calls if call[0] == "commit"]
    assert request.in_flight == request.placeholders == 0
    scheduler.leave(request)
    scheduler.leave(request)  # holds nothing any more
    assert not cache.held and scheduler.rows.free == 4


def test_who_has_left_commits_nothing() -> None:
    steps, scheduler, cache = setup()
    request = ask(scheduler, 0, 4, 5)
    works = steps.schedule()
    request.finish_reason = "abort"
    scheduler.leave(request)
    steps.finish_step(works)
    assert cache.calls[-1] == ("release", 0) and request.in_flight == request.placeholders == 0


class Pieces(Scheduler):
    """Computes prompts two tokens at a time."""

    def num_new_tokens(self, request: Request, budget: int) -> int:
        return min(2, super().num_new_tokens(request, budget))


def test_a_piece_of_a_prompt_has_no_taker_and_no_drafts() -> None:
    steps, scheduler, cache = setup(kind=Pieces)
    request = ask(scheduler, 0, 5, 2)
    scheduler.drafter = Guess(1, 1)
    for work in [*steps.schedule(), *steps.schedule()]:
        assert work.sampled_requests == (), (
            f"request 0: a token is sampled at {work.start + work.count} of 5 tokens"
        )
        assert work.drafts == (), (
            f"request 0: drafts behind {work.start + work.count} of 5 tokens"
        )
        steps.finish_step([work])
    assert request.in_flight == 0 and cache.committed[request] == 4
    scheduler.drafter = Guess()
    assert [parts(steps.step()) for _ in range(2)] == [[(0, 4, 1)], [(0, 5, 1)]]
    assert scheduler.idle, "request 0 has its two tokens, but still runs"


class Forking(Scheduler):
    """Siblings run from the moment their prompt is computed, each with as much room as the first."""

    def fork(self, request: Request) -> tuple[Request, ...]:
        siblings, request.siblings = request.siblings, []
        for sibling in siblings:
            self.rows.acquire(sibling)
            assert isinstance(self.cache, StrictCache)
            self.cache.held[sibling] = sibling.num_computed_tokens = (
                request.num_computed_tokens
            )
            insort(self.running, sibling, key=lambda one: one.rank)
        return (request, *siblings)


def test_every_taker_lands_and_commits() -> None:
    steps, scheduler, cache = setup(kind=Forking)
    request = ask(scheduler, 0, 4, 3)
    siblings = [
        Request(n, [2] * 4, 4, 7, SamplingParams(max_tokens=3), rank=(n,)) for n in (1, 2)
    ]
    request.siblings = list(siblings)
    works = steps.schedule()
    assert [sampled_request.id for sampled_request in works[0].sampled_requests] == [0, 1, 2]
    for one in (request, *siblings):
        assert (one.in_flight, one.placeholders) == (1, 1), (
            f"{name_of(one)} does not wait for its token"
        )
    steps.finish_step(works)
    for one in (request, *siblings):
        assert (one.in_flight, one.placeholders) == (0, 0), (
            f"{name_of(one)}: its token has not landed"
        )
    assert [call for call in cache.calls if call[0] == "commit"] == [
        ("commit", n, 4) for n in range(3)
    ]
    assert parts(steps.step()) == [(0, 4, 1), (1, 4, 1), (2, 4, 1)]


class Guess(Drafter):
    """Drafts what comes behind the prompt. left: who has left, and the row that it had then."""

    def __init__(self, *coming: int, most: int = 9) -> None:
        self.coming, self.most = coming, most
        self.left: list[tuple[int, int]] = []

    def begin(self, running: Sequence[Request]) -> bool:
        return True

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done = len(request.output_ids)
        return self.coming[done : done + min(self.most, most)]

    def leave(self, request: Request) -> None:
        self.left.append((request.id, request.row))


def test_the_drafter_hears_of_a_leaver_while_it_has_its_row() -> None:
    steps, scheduler, _ = setup()
    request, row = ask(scheduler, 0, 5, 20), 0
    scheduler.drafter = drafter = Guess()
    steps.finish_step(steps.schedule())
    scheduler.leave(request)
    assert drafter.left == [(request.id, row)], (
        "request 0 leaves row 0: its drafter is told before that"
    )
    scheduler.leave(request)
    assert len(drafter.left) == 1, "request 0 has left already: its drafter is not told again"


def test_drafts_without_room_are_dropped() -> None:
    steps, scheduler, cache = setup(room=7)
    ask(scheduler, 0, 5, 20)
    steps.step()
    scheduler.drafter = Guess(1, 1, 1, 1)
    (work,) = steps.schedule()
    assert cache.calls[-2:] == [("reserve", 0, 6), ("reserve", 0, 9)], (
        "first without the drafts"
    )
    assert (work.start, work.count, work.drafts) == (5, 1, ())


def test_what_is_ahead_of_itself_waits_for_its_drafts() -> None:
    steps, scheduler, _ = setup()
    request, other = ask(scheduler, 0, 5, 20), ask(scheduler, 1, 5, 20)
    steps.step()
    scheduler.drafter = Guess(1, 1, 1, 1)
    first, _ = steps.schedule()
    assert (first.start, first.count, first.drafts) == (5, 4, (1, 1, 1))
    assert steps.schedule() == [], (
        "a request is scheduled on, though its drafts have not landed"
    )
    assert request.num_computed_tokens == other.num_computed_tokens == 9


def test_drafts_that_are_certain_count_as_tokens_on_their_way() -> None:
    steps, scheduler, cache = setup()
    request = ask(scheduler, 0, 5, 20)
    first = steps.schedule()
    scheduler.drafter = Guess(1, 1, 1, 1, most=2)
    (work,) = steps.schedule()
    assert work.drafts_forced and (work.start, work.count, work.drafts) == (5, 3, (1, 1))
    assert request.placeholders == 4, (
        "a token of the prompt's step, two drafts and the one behind them"
    )
    scheduler.drafter = Guess()
    last = steps.schedule()
    assert parts(last) == [(0, 8, 1)], (
        "the next step begins behind drafts that cannot be wrong"
    )
    steps.finish_step(first)
    request.tokens += [1, 1, 1]
    cache.computed[request] = 8
    scheduler.finish_step(work, accepted=2)
    assert request.placeholders == 1, (
        f"one token is on its way, but {request.placeholders} count as such"
    )
    steps.finish_step(last)
    assert request.num_computed_tokens == 9 and request.placeholders == request.in_flight == 0


def test_what_a_wrong_draft_left_behind_does_not_count() -> None:
    steps, scheduler, _ = setup()
    request = ask(scheduler, 0, 3, 17)
    steps.step()
    scheduler.drafter = Guess(1, 5, 6, 7, 8, most=3)
    (work,) = steps.schedule()
    assert (work.start, work.count, work.drafts) == (3, 4, (5, 6, 7))
    assert request.num_computed_tokens == 7 and request.placeholders == 1
    request.tokens += [
        5,
        9,
    ]  # the first was right, and 9 was sampled in the place of the second
    scheduler.cache.computed[request] = 7  # type: ignore[attr-defined]
    scheduler.finish_step(work, accepted=1)
    assert request.num_computed_tokens == 5 and request.placeholders == request.in_flight == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_drafts_fit_the_budget_and_the_limit(budget: int) -> None:
    steps, scheduler, _ = setup(rows=1, step_tokens=3)
    ask(scheduler, 0, 3, budget)
    steps.step()
    scheduler.drafter = Guess(*[4] * 9)
    works = steps.schedule()
    # One token is sampled in any case, so a request that may have `left` more is drafted one less.
    left = budget - 1
    assert [len(work.drafts) for work in works] == ([min(2, left - 1)] if left else [])


def test_nothing_is_computed_for_the_last_token() -> None:
    steps, scheduler, _ = setup()
    ask(scheduler, 0, 5, 1)
    works = steps.schedule()
    assert steps.schedule() == [], (
        "its last token is on its way; there is nothing to compute after it"
    )
    steps.finish_step(works)
    assert scheduler.idle


@pytest.mark.parametrize("late", [False, True], ids=["in turn", "ahead"])
def test_any_refusals(late: bool) -> None:
    for seed in range(60):
        try:
            refusals(random.Random(seed), late)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def send_back(scheduler: Scheduler, request: Request) -> None:
    """Preempt as a later phase does."""
    scheduler.leave(request)
    request.num_computed_tokens = 0
    scheduler.add([request])


def refusals(rng: random.Random, late: bool) -> None:
    """Random requests, and a cache that refuses now and then."""
    steps, scheduler, cache = setup(
        rows=rng.randrange(1, 4), step_tokens=12, found=rng.randrange(3)
    )
    requests = [ask(scheduler, n, rng.randrange(1, 10), rng.randrange(1, 6)) for n in range(6)]
    in_flight_step: list[Work] = []
    computed, sent = 0, False
    for turn in range(400):
        cache.refuses = {request for request in requests if turn < 300 and rng.random() < 0.2}
        works = steps.schedule()
        computed += sum(work.count for work in works)
        steps.finish_step(in_flight_step if late else works)
        in_flight_step = works if late else []
        if rng.random() < 0.05 and scheduler.running:
            send_back(scheduler, rng.choice(scheduler.running))
            sent = True
        if scheduler.idle and not in_flight_step:
            break
    for request in requests:
        assert request.finish_reason == "length", f"{name_of(request)} does not come to an end"
    assert not cache.held, (
        f"requests {[request.id for request in cache.held]} give nothing back"
    )
    assert scheduler.rows.free == scheduler.rows.count, "a row is lost"
    if not sent:
        needed = sum(r.limit - 1 - min(cache.found, r.prompt_len - 1) for r in requests)
        assert computed == needed, f"{computed} tokens were computed, but {needed} are needed"

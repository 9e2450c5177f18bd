"""Random schedules: what callers do, and what must hold after each step."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from continuous.scheduler import Scheduler
from continuous.seams import NO_DRAFTS
from tests.fakes import VOCAB, FakeDrafter, FakeRunner, HasBlocks, OneAhead, expected_tokens

MAX_LEN = 48
SCHEDULES = settings(
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


def greedy(count: int, **options: Any) -> SamplingParams:
    """Exactly so many tokens, without chance."""
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


def finish(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while not engine.idle:
        engine.step()


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str = ""


def random_ask(rng: random.Random) -> Ask:
    """A request whose prompt, of a small alphabet, begins like others: prefixes are shared often."""
    length = rng.randrange(1, 31)
    common = rng.randrange(length + 1)
    prompt = [1] * common + [rng.randrange(1, 4) for _ in range(length - common)]
    params = SamplingParams(
        max_tokens=rng.choice([0, 1, 2, 3, 8, 12, 18]),
        n=rng.choice([1, 1, 2, 3]),
        seed=rng.randrange(4),
        temperature=1.0,
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(rng.randrange(1, VOCAB),),
    )
    return Ask(tuple(prompt), params, rng.randrange(4), rng.choice(["", "", "b"]))


_ASKS = st.integers(0, 9999).map(lambda seed: random_ask(random.Random(seed)))


_ADD = st.tuples(st.just("add"), _ASKS)
_STEP = st.tuples(st.just("step"), st.integers(1, 4))
_ABORT = st.tuples(st.just("abort"), st.integers(0, 20))
_FAIL = st.tuples(st.sampled_from(["fail_run", "fail_get"]), st.none())
_BURST = st.tuples(st.just("burst"), st.lists(_ASKS, min_size=3, max_size=8))
operations = st.lists(
    st.one_of(_ADD, _BURST, _STEP, _ADD, _STEP, _ABORT, _FAIL), min_size=3, max_size=25
)


def random_script(rng: random.Random) -> list[tuple[str, Any]]:
    """The same from a plain generator: thousands take seconds, where hypothesis takes minutes."""

    def operation() -> tuple[str, Any]:
        kinds = ["add", "burst", "step", "abort", "fail_run", "fail_get"]
        (kind,) = rng.choices(kinds, [35, 15, 35, 10, 2, 3])
        values: dict[str, Callable[[], Any]] = {
            "add": lambda: random_ask(rng),
            "burst": lambda: [random_ask(rng) for _ in range(rng.randrange(2, 6))],
            "step": lambda: rng.randrange(1, 4),
            "abort": lambda: rng.randrange(20),
        }
        return kind, values[kind]() if kind in values else None

    return [operation() for _ in range(rng.randrange(2, 14))]


def play_seeds(
    seeds: Iterable[int], make: Callable[[random.Random], tuple[Engine, FakeRunner]]
) -> Iterator[tuple[Engine, FakeRunner]]:
    """Play one random script for each seed, with a drafter in every third; a failure names its seed."""
    for seed in seeds:
        rng = random.Random(seed)
        try:
            engine, runner = make(rng)
            if seed % 3 == 0 and isinstance(engine.scheduler.cache, HasBlocks):
                engine.scheduler.drafter = FakeDrafter(seed)
            play(engine, runner, random_script(rng))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"seed {seed}: {error or type(error).__name__}") from error
        yield engine, runner


@contextmanager
def failures_expected() -> Iterator[None]:
    """Without the engine's log: it tells of every step that fails, and here many do."""
    log = logging.getLogger("continuous.engine")
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = False


@failures_expected()
def play(engine: Engine, runner: FakeRunner, script: list[tuple[str, Any]]) -> list[Request]:
    """Run a script, then everything to its end, checking after every step; returns all requests."""
    known: list[tuple[Request, Ask]] = []
    told: dict[Request, list[int]] = {}
    ends: dict[Request, int] = {}

    def step() -> None:
        for request, token, reason, *_ in engine.step():
            assert request not in ends, (
                f"{name_of(request)}: an event after the one that ended it"
            )
            if token is not None:
                told.setdefault(request, []).append(token)
            if reason is not None:
                ends[request] = 1
        check(engine)

    def add(ask: Ask) -> None:
        requests = engine.add(ask.prompt, ask.params, priority=ask.priority, salt=ask.salt)
        known.extend((request, ask) for request in requests)

    for action, value in script:
        if action == "add":
            add(value)
        elif action == "burst":
            for ask in value:
                add(ask)
        elif action == "step":
            for _ in range(value):
                step()
        elif action == "abort" and known:
            engine.abort(known[value % len(known)][0])
            check(engine)
        elif action != "abort":
            setattr(runner, action, True)
    steps = 0
    while not engine.idle:
        step()
        steps += 1
        left = [request.id for request, _ in known if request.finish_reason is None]
        assert steps < 3000, f"requests {left} do not come to an end in {steps} steps"
    for request, ask in known:
        name, output = name_of(request), request.output_ids
        expected = expected_tokens(ask.prompt, ask.params, request.sample, engine.max_len)
        assert request in ends, f"{name}: no event ended it"
        assert told.get(request, []) == output, (
            f"{name}: told {told.get(request)} of its output {output}"
        )
        for place, (token, right) in enumerate(zip(output, expected, strict=False)):
            assert token == right, (
                f"{name}: token {place} of its output is {token}, but must be {right}"
            )
        assert len(output) <= len(expected), (
            f"{name}: {len(output)} tokens, but {len(expected)} end it"
        )
        if request.finish_reason in ("stop", "length"):
            assert len(output) == len(expected), (
                f"{name}: ended by {request.finish_reason} after {len(output)} tokens of {len(expected)}"
            )
    return [request for request, _ in known]


def check(engine: Engine) -> None:
    """What must hold between any two steps."""
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    running = scheduler.running
    rows: dict[int, Request] = {}
    for request in running:
        name = name_of(request)
        assert request.row >= 0, f"{name} runs without a row"
        assert request.row not in rows, (
            f"{name} and {name_of(rows[request.row])} are in one row"
        )
        rows[request.row] = request
        assert request.finish_reason is None, f"{name} still runs, though it has ended"
        computed, known = (
            request.num_computed_tokens,
            len(request.tokens) + request.placeholders,
        )
        drafts = (
            0 if scheduler.drafter is NO_DRAFTS or not request.in_flight else request.limit
        )
        assert 0 < computed <= known + drafts, (
            f"{name}: {computed} tokens are computed of {known} there are"
        )
        assert known <= request.limit, (
            f"{name}: {known} tokens, but its limit is {request.limit}"
        )
        if isinstance(cache, HasBlocks):
            held = len(cache.blocks_of(request.row)) * cache.block_size
            assert held >= computed, (
                f"{name}: {computed} tokens are computed, but its blocks hold {held}"
            )
    for one, other in pairwise(running):
        assert one.rank < other.rank, (
            f"{name_of(one)} runs before {name_of(other)}, but its rank is larger"
        )
    for request in scheduler.waiting:
        name, computed = name_of(request), request.num_computed_tokens
        assert request.row < 0, f"{name} waits in row {request.row}"
        assert computed == 0, f"{name} waits, but {computed} of its tokens count as computed"
    promised = sum(sibling.row >= 0 for request in running for sibling in request.siblings)
    free, count = scheduler.rows.free, scheduler.rows.count
    assert free + len(rows) + promised == count, (
        f"{free} of {count} rows are free, {len(rows)} run and {promised} wait for a fork: rows are lost"
    )
    cache.check()
    if scheduler.idle:
        assert free == count, f"nobody is left, but {count - free} rows are taken"
        if isinstance(cache, HasBlocks):
            blocks = cache.allocator.count
            assert cache.free == blocks, (
                f"nobody is left, but {blocks - cache.free} blocks are not free"
            )


def name_of(request: Request) -> str:
    """For messages."""
    return f"request {request.id} (row {request.row})"


def machine_of_rows(rng: random.Random) -> tuple[Engine, FakeRunner]:
    """An engine of phase 04 that just holds the longest request; half of them run ahead."""
    policy, overlap = POLICIES[rng.choice(list(POLICIES))], rng.random() < 0.5

    def make(table: RequestRows) -> Scheduler:
        return Scheduler(table, RowCache(), step_tokens=MAX_LEN, policy=policy)

    return fake_engine(make, rng.randrange(1, 7), overlap=overlap)


def fake_engine(
    make_scheduler: Callable[[RequestRows], Any],
    rows: int,
    *,
    overlap: bool,
    max_len: int = MAX_LEN,
) -> tuple[Engine, FakeRunner]:
    table = RequestRows(rows, max_len)
    scheduler = make_scheduler(table)
    runner = FakeRunner(table, scheduler.cache)
    engine = Engine(scheduler, runner)  # type: ignore[arg-type]
    if overlap:
        engine.loop = OneAhead()
    return engine, runner

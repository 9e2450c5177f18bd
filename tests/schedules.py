"""Random schedules for hypothesis: what callers do, and what must hold after each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from continuous.rows import Rows
from cuda_graphs.engine import RunAhead
from paged_cache.cache import PagedCache
from tests.fakes import VOCAB, FakeRunner, expected_tokens

MAX_LEN = 48
SCHEDULES = settings(
    max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
)


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams


@st.composite
def asks(draw: st.DrawFn, max_n: int = 3) -> Ask:
    # Prompts from a small alphabet that begin alike, so that prefixes are shared often.
    length = draw(st.integers(1, 30))
    common = draw(st.integers(0, length))
    tail = draw(st.lists(st.integers(1, 3), min_size=length - common, max_size=length - common))
    params = SamplingParams(
        max_tokens=draw(st.one_of(st.integers(0, 3), st.integers(8, 18))),
        n=draw(st.integers(1, max_n)),
        seed=draw(st.integers(0, 3)),
        temperature=1.0,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(1, 49), max_size=1))),
    )
    return Ask(tuple([1] * common + tail), params)


_ADD = st.tuples(st.just("add"), asks())
_STEP = st.tuples(st.just("step"), st.integers(1, 4))
_ABORT = st.tuples(st.just("abort"), st.integers(0, 20))
_FAIL = st.tuples(st.sampled_from(["fail_run", "fail_get"]), st.none())
_BURST = st.tuples(st.just("burst"), st.lists(asks(), min_size=3, max_size=8))
operations = st.lists(st.one_of(_ADD, _BURST, _STEP, _ADD, _STEP, _ABORT, _FAIL), min_size=3, max_size=25)


def random_script(rng: random.Random) -> list[tuple[str, Any]]:
    """The same from a plain generator: thousands take seconds, where hypothesis takes minutes."""

    def ask() -> Ask:
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
        return Ask(tuple(prompt), params)

    def operation() -> tuple[str, Any]:
        kinds = ["add", "burst", "step", "abort", "fail_run", "fail_get"]
        (kind,) = rng.choices(kinds, [35, 15, 35, 10, 2, 3])
        values: dict[str, Callable[[], Any]] = {
            "add": ask,
            "burst": lambda: [ask() for _ in range(rng.randrange(2, 6))],
            "step": lambda: rng.randrange(1, 4),
            "abort": lambda: rng.randrange(20),
        }
        return kind, values[kind]() if kind in values else None

    return [operation() for _ in range(rng.randrange(2, 14))]


def play(engine: Engine, runner: FakeRunner, script: list[tuple[str, Any]]) -> list[Request]:
    """Run a script, then everything to its end, checking after every step; returns all requests."""
    known: list[tuple[Request, Ask]] = []
    events: dict[Request, list[int]] = {}
    ends: dict[Request, int] = {}

    def step() -> None:
        for request, token, reason, *_ in engine.step():
            if token is not None:
                events.setdefault(request, []).append(token)
            ends[request] = ends.get(request, 0) + (reason is not None)
        check(engine)

    for name, value in script:
        if name == "add":
            known += [(request, value) for request in engine.add(value.prompt, value.params)]
        elif name == "burst":
            for ask in value:
                known += [(request, ask) for request in engine.add(ask.prompt, ask.params)]
        elif name == "step":
            for _ in range(value):
                step()
        elif name == "abort" and known:
            engine.abort(known[value % len(known)][0])
            check(engine)
        elif name != "abort":
            setattr(runner, name, True)
    steps = 0
    while not engine.idle:
        step()
        steps += 1
        assert steps < 3000, "the engine does not come to an end"
    for request, ask in known:
        expected = expected_tokens(ask.prompt, ask.params, request.sample, engine.max_len)
        output = request.output_ids
        assert events.get(request, []) == output
        assert ends[request] == 1, "not exactly one event ends a request"
        if request.finish_reason in ("stop", "length"):
            assert output == expected, "wrong tokens"
        else:
            assert output == expected[: len(output)]
    return [request for request, _ in known]


def check(engine: Engine) -> None:
    """What must hold between any two steps."""
    scheduler = engine.scheduler
    rows = [request.row for request in scheduler.running]
    assert len(set(rows)) == len(rows) and all(row >= 0 for row in rows)
    assert scheduler.running == sorted(scheduler.running, key=lambda request: request.rank)
    for request in scheduler.running:
        assert request.finish_reason is None
        assert 0 < request.num_computed_tokens <= request.num_tokens <= request.limit
        if isinstance(scheduler.cache, PagedCache):
            held = len(scheduler.cache.blocks_of(request.row)) * scheduler.cache.block_size
            assert held >= request.num_computed_tokens
    for request in scheduler.waiting:
        assert request.row < 0 and request.num_computed_tokens == 0
    reserved = sum(sibling.row >= 0 for request in scheduler.running for sibling in request.siblings)
    assert scheduler.rows.free + len(rows) + reserved == scheduler.rows.count
    scheduler.cache.check()
    if scheduler.idle:
        assert scheduler.rows.free == scheduler.rows.count
        if isinstance(scheduler.cache, PagedCache):
            assert scheduler.cache.free == scheduler.cache.allocator.count, "blocks have leaked"


def fake_engine(
    make_scheduler: Callable[[Rows], Any], rows: int, *, overlap: bool, max_len: int = MAX_LEN
) -> tuple[Engine, FakeRunner]:
    table = Rows(rows, max_len)
    scheduler = make_scheduler(table)
    runner = FakeRunner(table, scheduler.cache)
    kind = RunAhead if overlap else Engine
    return kind(scheduler, runner), runner  # type: ignore[arg-type]

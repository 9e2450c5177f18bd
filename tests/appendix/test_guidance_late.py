"""Outputs whose masks take long sit out steps, get the same tokens, and nobody waits with them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from forward.model import Model
from paged_cache import PagedEngine
from phases.appendix.guidance.drafter import GrammarDrafter
from phases.appendix.guidance.late import AT_ONCE, Late, let_late_ones_wait
from phases.appendix.guidance.masks import EarlyConstraint
from phases.appendix.guidance.matcher import FIRST, LONG_MASK, TRIAL, Job, Trial
from tests.guidance_kit import SCHEMAS, loaded
from tests.schedules import check
from tests.structured_kit import EOS

pytest.importorskip("llguidance")

from phases.appendix.guidance import backend as llguidance
from phases.appendix.guidance.backend import GuidanceMatcher

PROMPT = [5, 6, 7, 8]
LONG, SHORT = Grammar.regex("[a-z]{2,40}"), Grammar.json_schema(SCHEMAS["person"])


@pytest.fixture(autouse=True)
def few_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two outputs are moved together, as on a GPU's host, even if there is one thread alone."""
    monkeypatch.setattr(llguidance, "FEW_ALONE", 2)


@pytest.fixture
def engine(model: Model) -> Iterator[PagedEngine]:
    """An engine as on a GPU: steps overlap, and late ones wait."""
    made = engine_of(model)
    let_late_ones_wait(made)
    yield made
    check(made)


def engine_of(model: Model, **options: Any) -> PagedEngine:
    sizes: dict[str, Any] = {"max_rows": 8, "max_len": 64, "step_tokens": 64, "speculate": False}
    made = loaded(model, **(sizes | options))
    assert isinstance(made.scheduler.drafter, GrammarDrafter)
    made.scheduler.drafter.in_turn = False
    return made


def asked(grammar: Grammar | None, seed: int, tokens: int = 20) -> SamplingParams:
    return SamplingParams(
        max_tokens=tokens, temperature=1.0, seed=seed, grammar=grammar, ignore_eos=grammar is None
    )


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.tokens[request.prompt_len :] for request in requests]


def run(engine: PagedEngine, requests: list[Request]) -> list[list[int]]:
    deadline = time.monotonic() + 60
    while any(request.finish_reason is None for request in requests):
        engine.step()
        assert time.monotonic() < deadline, "outputs that do not end: " + str(
            [(r.id, r.params.grammar, len(r.tokens)) for r in requests if r.finish_reason is None]
        )
    return outputs(requests)


def trial_of(engine: PagedEngine, grammar: Grammar) -> Trial:
    compiled = engine.masks.pool.ask(grammar).wait()  # type: ignore[attr-defined]
    trial: Trial = compiled._trial
    return trial


def slow_masks(monkeypatch: pytest.MonkeyPatch, trial: Trial, wait: Callable[[], object]) -> None:
    """Masks of a grammar that are made ahead wait, and seem to take long."""
    prepare = GuidanceMatcher.prepare

    def prepared(self: GuidanceMatcher) -> None:
        prepare(self)
        if self.trial is trial:
            wait()
            trial.left = TRIAL

    monkeypatch.setattr(GuidanceMatcher, "prepare", prepared)


def test_nobody_waits_for_a_mask_that_takes_long(
    engine: PagedEngine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    slow_masks(monkeypatch, trial_of(engine, LONG), lambda: go.wait(30))
    trial_of(engine, SHORT).left = 0
    (late,) = engine.add(PROMPT, asked(LONG, 1))
    others = [engine.add(PROMPT, asked(grammar, 2))[0] for grammar in (None, SHORT)]
    begun = time.monotonic()
    run(engine, others)
    assert time.monotonic() - begun < 20, "others have waited for a mask that takes long"
    known = len(late.tokens) - late.prompt_len
    assert 1 <= known < 20 and late.finish_reason is None, (
        f"its output has {known} tokens while its mask is made"
    )
    go.set()
    together = run(engine, [late, *others])
    plain = engine_of(model)
    alone = run(plain, [plain.add(PROMPT, r.params)[0] for r in (late, *others)])
    assert together == alone, "who sits out steps gets other tokens, or others do"


def test_who_sits_out_takes_part_in_every_few_steps(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_masks(monkeypatch, trial_of(engine, LONG), lambda: None)
    (late,), (other,) = (engine.add(PROMPT, asked(grammar, 1, 48)) for grammar in (LONG, None))
    while other.finish_reason is None:
        engine.step()
        time.sleep(0.002)  # as long as a step on a GPU; else the thread has no time
    got = len(late.tokens) - late.prompt_len
    assert 8 <= got <= 26, f"an output whose masks were there at once got {got} tokens in 48 steps"
    run(engine, [late])


def test_an_output_that_is_alone_waits_for_no_thread(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is held up, so it takes part in every step, ahead of its tokens."""
    slow_masks(monkeypatch, trial_of(engine, LONG), lambda: None)
    (request,) = engine.add(PROMPT, asked(LONG, 1))
    run(engine, [request])
    tokens = len(request.tokens) - request.prompt_len
    assert engine.stats.steps <= tokens + 2, f"{engine.stats.steps} steps for {tokens} tokens"


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_are_the_same_whoever_sits_out(
    seed: int, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars of many kinds come and go, with a small cache, aborts, and masks of random lengths."""
    rng = random.Random(seed)
    monkeypatch.setattr(Trial, "timed", lambda self, _: setattr(self, "left", rng.choice((0, 1, TRIAL))))
    kinds = [
        None,
        LONG,
        Grammar.choice(["abc", "the inner", "an"]),
        *map(Grammar.json_schema, SCHEMAS.values()),
    ]
    asks = [asked(rng.choice(kinds), number, rng.randint(1, 30)) for number in range(24)]
    expected = [c.token_ids for c in engine_of(model).generate([PROMPT] * len(asks), asks)]
    engine = engine_of(model, cache_bytes=10 * 16 * model.config.kv_bytes_per_token(model.dtype))
    let_late_ones_wait(engine)
    requests, left = list[Request](), set[int]()
    while len(requests) < len(asks) or not engine.idle:
        if len(requests) < len(asks) and rng.random() < 0.5:
            requests += engine.add(PROMPT, asks[len(requests)])
        if requests and rng.random() < 0.03:
            left.add(number := rng.randrange(len(requests)))
            engine.abort(requests[number])
        engine.step()
    for number, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
        got = request.tokens[request.prompt_len :]
        said = f"request {number} ({asks[number].grammar}): {request.error}"
        assert got == tokens[: len(got)], (
            f"{said}: tokens differ from those of an engine where nobody sits out"
        )
        assert number in left or (len(got) == len(tokens) and request.finish_reason in ("stop", "length")), (
            said
        )
    check(engine)


def test_a_quick_grammar_is_trusted_and_a_slow_one_is_not() -> None:
    trial = Trial(1)
    assert trial.left == FIRST, "a new grammar is taken for quick"
    for _ in range(FIRST):
        trial.timed(LONG_MASK / 2)
    assert trial.left == 0, f"{FIRST} quick masks are not enough"
    trial.timed(2 * LONG_MASK)
    assert trial.left == TRIAL, "one long mask is forgiven"
    trial.timed(LONG_MASK / 2)
    assert trial.left == TRIAL - 1


def test_who_made_a_step_wait_is_looked_for(engine: PagedEngine) -> None:
    (request,) = engine.add(PROMPT, asked(LONG, 1, 40))
    while not isinstance(request.constraint, EarlyConstraint):
        engine.step()
    matcher = request.constraint.matcher
    assert isinstance(matcher, GuidanceMatcher)
    backend = engine.masks.pool.backend  # type: ignore[attr-defined]
    job = Job(matcher, 0, ())
    matcher.trial.left = 0
    for jobs, seconds, doubtful in (
        ([job], llguidance.LONG_WAIT / 2, False),
        ([job] * (llguidance.MOST_SUSPECTS + 1), 1.0, False),
        ([job], 2 * llguidance.LONG_WAIT, True),
    ):
        backend.waited(jobs, seconds)
        assert (matcher.trial.left > 0) == doubtful, (
            f"{len(jobs)} masks, {seconds} s: {matcher.trial.left} left"
        )
    matcher.trial.left = TRIAL
    backend.waited([job], 1.0)
    assert matcher.trial.left == TRIAL, "who is on trial anyway gets off lightly"
    run(engine, [request])


def test_one_grammar_has_few_masks_on_their_way(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as decide whether it is quick; the rest is not worth a thread's time."""
    go, making = threading.Event(), list[int]()
    slow_masks(monkeypatch, trial_of(engine, LONG), lambda: go.wait(30))
    late, submit = Late(), Late._make
    requests = []
    for number in range(AT_ONCE + 3):
        (request,) = engine.add(PROMPT, asked(LONG, number, 40))
        requests.append(request)

    def made(self: Late, *given: Any) -> None:
        making.append(1)
        submit(self, *given)

    monkeypatch.setattr(Late, "_make", made)
    for request in requests:
        while not isinstance(request.constraint, EarlyConstraint) and request.finish_reason is None:
            engine.masks.ready(request)
        request.num_computed_tokens = len(request.tokens) - 1  # as if it were about to decode
        assert late.has(request), "a doubtful output takes part before its mask is there"
    assert sum(late._making.values()) == AT_ONCE
    go.set()
    late._thread.shutdown()
    assert len(making) == AT_ONCE and not +late._making, f"still on their way: {late._making}"
    for request in requests:
        engine.abort(request)
    engine.step()


def test_a_mask_that_fails_ends_its_request_and_no_other(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: GuidanceMatcher) -> None:
        raise RuntimeError("no mask")

    monkeypatch.setattr(GuidanceMatcher, "prepare", fails)
    requests = [engine.add(PROMPT, asked(grammar, 3))[0] for grammar in (LONG, SHORT, None)]
    found = run(engine, requests)
    assert [request.error for request in requests] == [None] * 3, "the step could have made the mask"
    assert all(found)


def test_a_token_that_is_no_guess_is_sampled_where_steps_run_ahead(engine: PagedEngine) -> None:
    """Forced tokens are drafts in small batches only: a step of many with some has no graph on a GPU."""
    forced = Grammar.regex("(abcdefghijklmnopqrstuvwxyz){1,2}")
    late = engine.add(PROMPT, asked(forced, 1, 40))
    others = [engine.add(PROMPT, asked(None, seed, 40))[0] for seed in range(6)]
    run(engine, others)
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, GrammarDrafter) and drafter.most_ahead < len(others)
    assert drafter.forced == 0, f"{drafter.forced} tokens were drafted in steps of {len(others) + 1} requests"
    run(engine, late)
    assert EOS not in late[0].tokens[late[0].prompt_len : -1]

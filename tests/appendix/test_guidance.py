"""Grammars by llguidance: masks by threads, forced tokens, and what is refused before the library sees it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from forward.model import Model
from paged_cache import PagedEngine
from phases.appendix.guidance.backend import SMALL_BATCH, GuidanceBackend, took_long
from phases.appendix.guidance.drafter import GrammarDrafter
from speculative.ngram import NGrams
from speculative.speculation import SpeculativeRunner
from structured.matcher import Matcher
from tests.guidance_kit import GRAMMARS, SCHEMAS, engine_of, fill, loaded, vocabulary
from tests.hostile_grammars import hostile
from tests.phases.test_12_structured import (  # noqa: F401  the rules of the automata hold here, too
    HOSTILE,
    test_a_crowd_parses,
    test_a_grammar_that_fails_midway_ends_its_own_request,
    test_a_request_waits_for_its_grammar_and_nobody_else_does,
    test_greedy_and_sampled_outputs_obey,
    test_min_tokens_lengthens_as_far_as_the_grammar_goes,
    test_other_kinds,
    test_preemption_loses_no_place,
    test_rows_without_a_grammar_are_as_ever,
)
from tests.schedules import check
from tests.structured_kit import (
    EOS,
    PROMPT,
    SIZE,
    Guess,
    Make,
    bits,
    must_cut_guesses,
    must_end_its_own_step,
    must_harm_nobody,
    must_match,
    must_refuse,
    run,
)
from tests.structured_kit import equal_priority as equal_priority

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("llguidance")


@pytest.fixture(autouse=True)
def few_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four masks are left to other threads, as on a GPU's host, even if there is one alone."""
    monkeypatch.setattr("phases.appendix.guidance.backend.SINGLE_THREAD_BATCH", SMALL_BATCH)


@pytest.fixture
def make() -> Make:
    return engine_of


@pytest.fixture(scope="module")
def engine(model: Model) -> PagedEngine:
    return engine_of(model)


@pytest.fixture
def schemas() -> Mapping[str, Any]:
    return SCHEMAS


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.lark('start: "x" ("," NUM)*\nNUM: /[0-9]/'), "x(,[0-9])*"),
        (Grammar.lark('root ::= "a" [0-9]+ "z"'), "a[0-9]+z"),
    ],
    ids=["lark", "gbnf"],
)
def test_grammars_of_other_languages(
    engine: PagedEngine, grammar: Grammar, pattern: str
) -> None:
    must_match(engine, grammar, pattern)


WRONG = {
    "a regex": (
        Grammar.regex("a("),
        r"is refused: regex 'a\(', character 2: a group is not closed$",
    ),
    "a type": (Grammar.json_schema({"type": "wat"}), "Invalid type: wat"),
    "a keyword": (Grammar.json_schema({"unevaluatedProperties": False}), "Unimplemented keys"),
    "a reference": (Grammar.json_schema({"$ref": "#/$defs/none"}), "is refused"),
    "a grammar": (
        Grammar.lark("start: x\nx: nothing"),
        "is refused: line 2, character 4: unknown name",
    ),
    "a regex in a grammar": (
        Grammar.lark("start: /(/"),
        r"is refused: regex '\(', character 1: a group is not closed$",
    ),
    "a pattern": (
        Grammar.json_schema({"pattern": "[b", "type": "string"}),
        r"is refused: #/pattern '\[b', character 2: a class is not closed$",
    ),
    "an empty language": (Grammar.regex(r"a[^\s\S]"), "is refused: no output satisfies it$"),
    "a circle": (Grammar.json_schema({"$ref": "#"}), "is refused: no output satisfies it$"),
}


@pytest.mark.parametrize(("grammar", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_grammars(engine: PagedEngine, grammar: Grammar, says: str) -> None:
    must_refuse(engine, grammar, says)


def test_masks_that_cannot_be_made_end_their_own_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, speculate=False)
    must_end_its_own_step(engine, monkeypatch, type(engine.grammar_manager), "_follow")


@pytest.mark.parametrize(("allowed", "threads"), [(2.5, 1), (4.0, 3), (None, 16)])
def test_threads_are_fewer_than_a_container_may_use(
    monkeypatch: pytest.MonkeyPatch, allowed: float | None, threads: int
) -> None:
    module = "phases.appendix.guidance.backend"
    made: list[int] = []
    monkeypatch.setattr(f"{module}.quota", lambda: allowed)
    monkeypatch.setattr(f"{module}.processors", lambda: range(64))
    monkeypatch.setattr(f"{module}.ll.LLExecutor", made.append)
    GuidanceBackend(vocabulary())
    assert made == [threads], "threads outnumber the processors that they may use"


@pytest.mark.parametrize(
    "schema", [{"type": "string", "maxLength": 5}, {"enum": ["abc", "the"]}, True]
)
def test_masks_do_not_depend_on_the_lexer(schema: Any) -> None:
    known = vocabulary()
    backend, rng = GuidanceBackend(known), random.Random(3)
    compiled = [backend.compile(Grammar.json_schema(schema)) for _ in range(2)]
    rows: list[Matcher] = [each.matcher() for each in compiled for _ in range(3)]
    assert len(rows) > 4, "few are filled one by one"
    words = np.zeros((len(rows), -(-len(known.tokens) // 32)), np.int32)
    for step in range(8):
        words[:] = -1
        fill(backend, rows, words)
        for row in range(1, len(rows)):
            assert (words[row] == words[0]).all(), (
                f"token {step} of the output: mask {row} is another one"
            )
        assert len({tuple(matcher.forced()) for matcher in rows}) == 1, (
            f"token {step}: forced differs"
        )
        token = rng.choice(bits(words[0], SIZE))
        if token == EOS:
            break
        assert backend.advance([(matcher, (token,)) for matcher in rows]) == [1] * len(rows)


@pytest.mark.parametrize("count", [1, 4], ids=["alone", "several"])
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_forced_tokens_save_steps_and_change_nothing(
    model: Model, overlap: bool, count: int
) -> None:
    parts = {
        "thename": {"type": "boolean"},
        "average": {"type": "null"},
        "k": {"enum": ["anthering"]},
    }
    schema = Grammar.json_schema(
        {
            "type": "object",
            "properties": parts,
            "required": [*parts],
            "additionalProperties": False,
        }
    )
    params = [
        SamplingParams(max_tokens=60, temperature=1.0, seed=s, grammar=schema)
        for s in range(count)
    ]
    with_, without = (
        engine_of(model, overlap=overlap, speculate=False, jump_forward=jump)
        for jump in (True, False)
    )
    left, right = (engine.generate([PROMPT] * count, params) for engine in (with_, without))
    assert [c.token_ids for c in left] == [c.token_ids for c in right], (
        "jumping forward changes the text"
    )
    drafter = with_.scheduler.drafter
    assert isinstance(drafter, GrammarDrafter) and drafter.forced > 0, (
        "nothing that is forced was drafted"
    )
    assert sum(drafter.stats.drafted) == sum(drafter.stats.accepted) == drafter.forced, (
        "a forced draft was not counted, or not accepted"
    )
    assert with_.stats.steps < 0.9 * without.stats.steps, (
        with_.stats.steps,
        without.stats.steps,
    )
    check(with_)


def test_steps_take_turns_on_a_cpu_while_somebody_has_a_grammar(model: Model) -> None:
    engine = loaded(model, speculate=False)
    drafter = engine.scheduler.drafter
    (free,) = engine.add(
        PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    )
    engine.step()
    engine.step()
    assert not drafter.needs_finished_step and free.placeholders == 1, (
        "nobody has a grammar, but steps do not overlap"
    )
    (bound,) = engine.add(PROMPT, SamplingParams(max_tokens=20, grammar=GRAMMARS["person"]))
    while not bound.tokens[bound.prompt_len :]:
        engine.step()
    engine.step()
    assert drafter.needs_finished_step, (
        "a grammar may force tokens behind the newest one, which is not waited for"
    )
    run(engine)
    assert bound.finish_reason in ("stop", "length") and len(free.output_ids) == 40
    check(engine)


def test_a_certain_token_that_does_not_come_ends_its_own_request(model: Model) -> None:
    engine = engine_of(model, speculate=False, jump_forward=True)
    word = Grammar.choice(["anthering thename average"])
    (good,) = engine.add(PROMPT, SamplingParams(max_tokens=40, grammar=word))
    (bad,) = engine.add(PROMPT, SamplingParams(max_tokens=40, grammar=word))
    real = engine.runner.verifier.agree
    seen = []

    def disagree(sampled: Sequence[int], drafts: Sequence[int]) -> int:
        seen.append(drafts)
        return 0 if len(seen) == 2 else real(sampled, drafts)

    engine.runner.verifier.agree = disagree
    run(engine)
    ended = sorted([good.finish_reason, bad.finish_reason])
    assert len(seen) >= 2, "nothing was drafted"
    assert ended == ["error", "stop"], (
        f"one of two requests was given a wrong token, but they ended {ended}"
    )
    check(engine)


@pytest.mark.parametrize("text", ["abab", "ccc", "zzz", "abzz", "d"])
def test_guesses_of_another_drafter_are_cut_where_the_grammar_says(
    model: Model, text: str
) -> None:
    engine = engine_of(model, overlap=False)
    drafter = engine.scheduler.drafter = GrammarDrafter(Guess(text))
    must_cut_guesses(engine_of(model, overlap=False, jump_forward=False), engine)
    assert drafter.refused > 0


def test_an_output_whose_masks_are_slow_gets_no_drafts(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft needs a mask of its own, and other requests of the step wait for all of them."""
    monkeypatch.setattr("phases.appendix.guidance.matcher.SLOW", -1.0)  # any mask is slow
    engine = engine_of(model, overlap=False)
    drafter = engine.scheduler.drafter = GrammarDrafter(Guess("abab"))
    (request,) = engine.add(PROMPT, SamplingParams(max_tokens=40, grammar=GRAMMARS["person"]))
    run(engine)
    assert request.finish_reason in ("stop", "length"), request.error
    assert drafter.forced == sum(drafter.stats.drafted) == 0, (
        f"request 0: {drafter.forced} tokens were drafted behind slow masks"
    )
    check(engine)


def test_no_thread_of_the_library_waits_for_python() -> None:
    """Such a thread waits until the engine's thread lets go of Python's lock, and the step for all masks."""
    asked = set[str]()

    def encode(text: str) -> Sequence[int]:
        asked.add(threading.current_thread().name)
        return vocabulary().encode(text)

    backend = GuidanceBackend(replace(vocabulary(), encode=encode))
    compiled = backend.compile(Grammar.choice(["anthering thename average"]))
    matchers = [compiled.matcher() for _ in range(2 * SMALL_BATCH)]
    asked.clear()
    words = np.zeros((len(matchers), -(-SIZE // 32)), dtype=np.int32)
    fill(backend, matchers, words)
    assert asked == {"masks_0"}, f"the tokens of a forced text were asked for by {asked}"
    masks = [bits(row, SIZE) for row in words]
    assert masks == masks[:1] * len(masks) and len(masks[0]) == 1, (
        f"masks of one forced token: {masks}"
    )


def test_many_masks_take_longer_than_one() -> None:
    """A call for 256 outputs is not slow because it takes as long as a slow output would."""
    at = time.perf_counter() - 0.01
    assert took_long(at, 8), (
        "8 outputs in 10 ms: one of them may be slow, but none will be timed"
    )
    assert not took_long(at, 256), (
        "256 outputs in 10 ms are ordinary, but will be timed one by one"
    )


def test_a_slow_batch_is_charged_to_the_outputs_that_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = GuidanceBackend(vocabulary())
    compiled = backend.compile(GRAMMARS["person"])
    matchers = [compiled.matcher() for _ in range(2 * SMALL_BATCH)]
    words = np.zeros((len(matchers), -(-SIZE // 32)), dtype=np.int32)
    monkeypatch.setattr("phases.appendix.guidance.backend.took_long", lambda *_: True)
    fill(backend, matchers, words)
    token = bits(words[0], SIZE)[0]
    assert backend.advance([(one, [token]) for one in matchers]) == [1] * len(matchers)
    assert all(one.effort.watched for one in matchers), (
        "slow masks, but the next are not timed"
    )
    monkeypatch.setattr("phases.appendix.guidance.matcher.SLOW", -1.0)
    fill(backend, matchers, words)
    assert all(one.effort.slow for one in matchers), "slow masks that no output has paid for"


def test_a_grammar_whose_tokens_cannot_be_undone_gets_no_drafts(model: Model) -> None:
    """The library cannot take back tokens of rules with `stop=` or `max_tokens=`."""
    engine = engine_of(model, speculate=False, jump_forward=True)
    grammar = Grammar.lark('start: "anthering the" x\nx[stop="a"]: /[a-z ]*/')
    (request,) = engine.add(PROMPT, SamplingParams(max_tokens=30, grammar=grammar))
    run(engine)
    assert request.finish_reason in ("stop", "length"), request.error
    assert engine.scheduler.drafter.forced == 0
    check(engine)


def test_hostile_grammars_harm_nobody(model: Model) -> None:
    ambiguous = {name: hostile()[name]() for name in ("ambiguous", "left")}
    must_harm_nobody(engine_of(model, max_rows=16), HOSTILE | ambiguous)


def test_stats_reach_through_grammars() -> None:
    """`--stats` and the colours of tokens ask the scheduler's drafter, here one around that of phase 11."""
    speculator = SpeculativeRunner(NGrams(), 4)
    assert GrammarDrafter(speculator).stats is speculator.stats
    assert GrammarDrafter().stats.lines() == ["speculation: nothing was drafted"]

"""Grammars by llguidance: masks by threads, forced tokens, and what is refused before the library sees it."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import cuda_graphs
from common.errors import UserError
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.sampling.sampler import Allowed
from continuous.engine import Engine
from continuous.work import Work
from forward.model import Model
from paged_cache import PagedEngine
from phases.appendix.guidance.backend import FEW, OPTIONS, GuidanceBackend, source_of
from phases.appendix.guidance.drafter import FEW_IN_TURN, GrammarDrafter
from phases.appendix.guidance.feature import Guidance
from phases.appendix.guidance.loop import EarlyHalves
from phases.appendix.guidance.masks import Crowd, EarlyConstraint, ThreadedMasks
from phases.appendix.guidance.matcher import FastMatcher, Job
from speculative.control import Control
from speculative.ngram import NGrams
from speculative.speculation import Speculator
from structured.loop import NOBODYS, Landed
from structured.matcher import Matcher
from tests.fakes import OddOnly
from tests.guidance_kit import GRAMMARS, SCHEMAS, engine_of, loaded, must_obey, vocabulary
from tests.phases import test_12_structured as rules
from tests.schedules import check
from tests.structured_kit import (
    CROWD,
    EOS,
    PROMPT,
    SIZE,
    SMALL,
    Guess,
    Make,
    bits,
    blocks,
    computed_after_their_end,
    crowd,
    mask,
    must_end_its_own_step,
    must_harm_nobody,
    must_lose_no_place,
    must_refuse,
    run,
    text_of,
    tokenizer,
)

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("llguidance")

# The same rules as of the automata, with this backend.
test_a_request_waits_for_its_grammar_and_nobody_else_does = (
    rules.test_a_request_waits_for_its_grammar_and_nobody_else_does
)
test_min_tokens_lengthens_as_far_as_the_grammar_goes = (
    rules.test_min_tokens_lengthens_as_far_as_the_grammar_goes
)
test_rows_without_a_grammar_are_as_ever = rules.test_rows_without_a_grammar_are_as_ever


@pytest.fixture(autouse=True)
def few_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four masks are left to other threads, as on a GPU's host, even if there is one alone."""
    monkeypatch.setattr("phases.appendix.guidance.backend.FEW_ALONE", FEW)


@pytest.fixture
def make() -> Make:
    return engine_of


@pytest.fixture(scope="module")
def engine(model: Model) -> PagedEngine:
    return engine_of(model)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("(ab|c)+d"), "(ab|c)+d"),
        (Grammar.choice(["yes", "no", "maybe é"]), "yes|no|maybe é"),
        (Grammar.lark('start: "x" ("," NUM)*\nNUM: /[0-9]/'), "x(,[0-9])*"),
        (Grammar.lark('root ::= "a" [0-9]+ "z"'), "a[0-9]+z"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_other_kinds(engine: PagedEngine, grammar: Grammar, pattern: str) -> None:
    params = [SamplingParams(max_tokens=80, temperature=1.0, seed=s, grammar=grammar) for s in range(6)]
    done = engine.generate([PROMPT] * 6, params)
    assert any(completion.finish_reason == "stop" for completion in done)
    for completion in done:
        if completion.finish_reason == "stop":
            text = text_of(completion)
            assert re.fullmatch(pattern, text), f"{grammar}: {text!r}"


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_preemption_loses_no_place(model: Model, overlap: bool) -> None:
    tight = engine_of(model, overlap=overlap, cache_bytes=blocks(model, 26))
    must_lose_no_place(engine_of(model, overlap=overlap), tight, GRAMMARS)


WRONG = {
    "a regex": (Grammar.regex("a("), "is refused"),
    "a type": (Grammar.json_schema({"type": "wat"}), "Invalid type: wat"),
    "a keyword": (
        Grammar.json_schema({"type": "object", "unevaluatedProperties": False}),
        "Unimplemented keys",
    ),
    "a reference": (Grammar.json_schema({"$ref": "#/$defs/none"}), "is refused"),
    "a grammar": (Grammar.lark("start: nothing"), "is refused"),
    "an empty language": (Grammar.regex(r"a[^\s\S]"), "is refused: no output satisfies it$"),
    "a circle": (Grammar.json_schema({"$ref": "#"}), "is refused: no output satisfies it$"),
}


@pytest.mark.parametrize(("grammar", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_grammars(engine: PagedEngine, grammar: Grammar, says: str) -> None:
    must_refuse(engine, grammar, says)


def test_a_schema_reaches_the_library_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs in a process while it reads a large schema: an engine compiles one unread."""
    schema = Grammar.json_schema({"enum": ["x" * 20 + str(n) for n in range(100)]})

    def read_again(*given: Any, **options: Any) -> Any:
        raise AssertionError("a schema that was checked is read once more")

    monkeypatch.setattr("common.sampling.grammar.json.loads", read_again)
    assert schema.source[1:] in source_of(schema)
    with pytest.raises(AssertionError, match="once more"):
        Grammar.json_schema("{}")


@pytest.mark.parametrize(
    "schema",
    [
        "{}",
        " true ",
        '{"type": "object", "properties": {"b": {}, "a": {"const": "{x}"}}}\n',
        json.dumps({"enum": ["ä☃", "\u20ac"]}, ensure_ascii=False),
        json.dumps({"pattern": r"\d+"}),
        json.dumps({"x-guidance": {"whitespace_pattern": " "}}),
    ],
)
def test_a_schema_reaches_the_library_with_our_options(schema: str) -> None:
    given = json.loads(schema)
    given = {} if given is True else given
    (found,) = json.loads(source_of(Grammar.json_schema(schema)))["grammars"]
    assert found["json_schema"] == given | {"x-guidance": OPTIONS | given.get("x-guidance", {})}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_long_schema_means_what_a_short_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one reaches the library in another language, without Python's lock."""
    from phases.appendix.guidance import backend as llguidance

    backend, schema, rng = llguidance.GuidanceBackend(vocabulary()), SCHEMAS[name], random.Random(name)
    both = []
    for longest in (1 << 20, 1):
        monkeypatch.setattr(llguidance, "LONG", longest)
        source = source_of(Grammar.json_schema({"const": 1}))
        assert source.startswith("start: %json") == (longest == 1)
        if longest == 1:
            assert json.loads(source.removeprefix("start: %json")) == {"x-guidance": OPTIONS, "const": 1}
        both.append(backend.compile(Grammar.json_schema(schema)).matcher())
    for step in range(60):
        short, long = (mask(matcher) for matcher in both)
        assert short == long, f"{name}, token {step} of the output: the long schema has another mask"
        token = rng.choice(short)
        if token == EOS:
            break
        assert [matcher.advance((token,)) for matcher in both] == [1, 1]


@pytest.mark.parametrize(
    "schema", [{"type": "foo"}, {"not": {}, "minLength": 1}, {"if": True, "then": False}]
)
def test_a_long_schema_is_refused_in_the_same_words(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from phases.appendix.guidance import backend as llguidance

    said = []
    for longest in (1 << 20, 1):
        monkeypatch.setattr(llguidance, "LONG", longest)
        with pytest.raises(UserError) as refused:
            llguidance.GuidanceBackend(vocabulary()).compile(Grammar.json_schema(schema))
        said.append(str(refused.value))
    assert said[0] == said[1] and "refused: " in said[0]


@pytest.mark.parametrize(
    "options",
    [
        {"lenient": True},
        {"coerce_one_of": True},
        {"item_separator": ";"},
        {"whitespace_pattern": "X"},
        {"whitespace_pattern": "[^a]"},
        {"whitespace_pattern": r"\s+"},
        5,
    ],
    ids=str,
)
def test_no_option_makes_a_schema_less_than_it_says(engine: PagedEngine, options: Any) -> None:
    schema = {"x-guidance": options, "type": "array", "items": {"enum": [1, 2]}}
    with pytest.raises(UserError, match="x-guidance"):
        list(engine.stream([PROMPT], SamplingParams(grammar=Grammar.json_schema(schema))))
    named = {"properties": {"x-guidance": {"const": 1}}, "required": ["x-guidance"]}
    kept = source_of(Grammar.json_schema({"type": "object", "additionalProperties": False} | named))
    assert "const" in kept, "a property of that name is no option"


def test_a_grammar_that_fails_midway_ends_its_own_request(model: Model) -> None:
    for overlap in (True, False):
        engine = engine_of(model, overlap=overlap, speculate=False)
        late = computed_after_their_end(engine)
        (bad,) = engine.add(PROMPT, SamplingParams(max_tokens=20, min_tokens=15, grammar=Grammar.regex("a+")))
        # As many as it takes for their masks to be made by threads, while the next step is scheduled.
        letters = Grammar.regex("[bc]{9}")
        params = SamplingParams(max_tokens=20, temperature=1.0, n=FEW + 1, seed=2, grammar=letters)
        goods = engine.add(PROMPT, params)
        for _ in range(200):
            engine.step()
            if len(bad.output_ids) >= 3:
                break
        if overlap:  # the matcher has seen the last token already
            bad.constraint.moved = lambda new, count: "it is not in the grammar"  # type: ignore[union-attr]
        else:
            bad.tokens[-1] = tokenizer().encode("z")[0]  # as if the sampler had gone wrong
        run(engine)
        assert bad.finish_reason == "error" and "is not in the grammar" in str(bad.error), bad.error
        for good in goods:
            text = tokenizer().decode(good.output_ids[:-1])
            assert good.finish_reason == "stop" and re.fullmatch("[bc]{9}", text), f"{good.id}: {text!r}"
        assert not late, f"requests {late} are computed in rows that they have given back"
        check(engine)


def test_masks_that_cannot_be_made_end_their_own_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    must_end_its_own_step(engine_of(model, speculate=False), monkeypatch, "_follow")


@pytest.mark.parametrize("count", [2, 6])
def test_grammars_that_all_fail_at_once_end_each_output_once(
    model: Model, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in which nobody is left to make a mask for."""
    engine = engine_of(model, speculate=False)
    assert isinstance(engine.masks, ThreadedMasks)
    backend = engine.masks.pool.backend
    advance, calls = backend.advance, Counter[str]()

    def refuse(moves: Sequence[tuple[Matcher, Sequence[int]]]) -> list[int]:
        calls["moves"] += bool(moves)
        return [0] * len(moves) if calls["moves"] > 3 else advance(moves)

    monkeypatch.setattr(backend, "advance", refuse)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, grammar=Grammar.regex("[ab]{18}"))
    ends = Counter(
        event.index for event in engine.stream([PROMPT] * count, params) if event.finish_reason is not None
    )
    assert ends == dict.fromkeys(range(count), 1), f"ends by request: {dict(ends)}"
    assert calls["moves"] == 4, f"matchers were moved {calls['moves']} times, but four tokens had come"
    check(engine)


class Still(FastMatcher):
    """One that allows everything, and goes nowhere."""

    fill = advance = rollback = prepare = lambda self, *_: 0  # type: ignore[assignment]
    accepting = True  # type: ignore[assignment]


def apart(crowd: Crowd, landed: dict[Request, Sequence[int]], what: str) -> None:
    """Something has happened to the first of a crowd or its step, or nothing has."""
    first = crowd.owners[0]
    if what == "it was aborted":
        first.finish_reason = "abort"
    elif what == "this token is its last":
        first.limit = len(first.tokens) + 1
    elif what == "it ends the text":
        landed[first] = [EOS]
    elif what == "a draft has landed, too":
        landed[first] = [7, 8]
    elif what == "nothing has landed":
        landed.pop(first)
    elif what == "it was dealt out already":
        first.tokens += landed.pop(first)
    elif what == "a token was missed":
        first.tokens.append(6)


APART = ["it was aborted", "this token is its last", "it ends the text", "a draft has landed, too"]


APART += ["nothing has landed", "it was dealt out already", "a token was missed"]


@pytest.mark.parametrize(
    "what", ["nothing", *APART, "another comes", "one has drafts", "one has a stop token"]
)
def test_a_step_is_like_the_last_if_nothing_has_happened(what: str) -> None:
    """What is kept from the last step is right for this one, or is made anew."""
    stops = SamplingParams(stop_token_ids=(7,)) if what == "one has a stop token" else SamplingParams()
    drafts = (9, 9) if what == "one has drafts" else ()
    requests = [Request(number, [1, 2, 3], 3, 20, stops) for number in range(4)]
    for request in requests:
        request.constraint = EarlyConstraint(Still())
    shape = [((request,), drafts) for request in requests]
    places = range(0, 4 * (len(drafts) + 1), len(drafts) + 1)
    pairs = zip(places, requests[:3], strict=False)  # whoever waits for a grammar or ends is none of them
    crowd = Crowd(
        shape[:3], [(place, drafts, one, cast(EarlyConstraint, one.constraint), []) for place, one in pairs]
    )
    landed: dict[Request, Sequence[int]] = {request: [7] for request in requests}
    apart(crowd, landed, what)
    again = crowd.again([*shape[:2], shape[3 if what == "another comes" else 2]], landed, frozenset({EOS}))
    assert again == (what == "nothing"), (
        f"request 0: {what}, and the step is taken for one like the last: {again}"
    )
    if again:
        assert [new for _, new in crowd.moves] == [[7]] * 3, "request 0: its matcher is not given token 7"


def test_masks_are_begun_before_tokens_are_dealt_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing out 256 tokens takes a millisecond, in which threads make masks, but none of who has ended."""
    engine = engine_of(model, speculate=False)
    assert isinstance(engine.masks, ThreadedMasks)
    begin, fill = engine.masks.begin, engine.masks.fill
    early = 0
    expected: dict[Request, int] = {}

    def begun(works: Sequence[Work], landed: Landed = NOBODYS) -> bool:
        nonlocal early
        for request, tokens in landed.items():
            if request.finish_reason is None:
                expected[request] = len(request.tokens) + len(tokens)
                early += 1
        return begin(works, landed)

    def filled(works: Sequence[Work]) -> Allowed | None:
        made = engine.masks._filling  # type: ignore[attr-defined]
        for request in made.crowd.owners if made is not None else ():
            if request in expected:
                assert len(request.tokens) == expected.pop(request), (
                    f"request {request.id}: not dealt out yet"
                )
            assert request.finish_reason is None, f"request {request.id} has ended, and a mask is made for it"
            taken = request.constraint.taken  # type: ignore[attr-defined]
            assert taken == len(request.output_ids), f"request {request.id}: its matcher is {taken} tokens in"
        return fill(works)

    monkeypatch.setattr(engine.masks, "begin", begun)
    monkeypatch.setattr(engine.masks, "fill", filled)
    params = [
        SamplingParams(max_tokens=most, temperature=1.0, seed=most, grammar=Grammar.regex("[ab]{3,9}"))
        for most in range(4, 12)
    ]
    done = engine.generate([PROMPT] * len(params), params)
    assert early > 20, f"of {sum(len(c.token_ids) for c in done)} tokens, masks knew {early} early"
    assert {c.finish_reason for c in done} == {"stop", "length"}
    check(engine)


def test_a_thousand_grammars_are_forgotten(model: Model) -> None:
    engine = engine_of(model, grammar_cache_bytes=5_000_000)
    pool = engine.masks.pool  # type: ignore[attr-defined]
    for number in range(0, 200, 8):
        params = [
            SamplingParams(max_tokens=4, grammar=Grammar.regex(f"x{n}")) for n in range(number, number + 8)
        ]
        engine.generate([PROMPT] * 8, params)
        assert pool.bytes <= 5_000_000 and len(pool._known) <= 50
    assert pool.compiled == 200


def lexer_of(matcher: Any) -> int:
    """The number of the lexer that an output of llguidance shares with others."""
    number: int = matcher.group
    return number


def test_outputs_that_run_together_do_not_share_a_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is shared is locked while it works: threads would wait for each other. One that no thread can
    use beside the others learns again what they know."""
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr(llguidance, "MAKING", 60.0)
    for cores, most in ((1, 1), (2, 1), (3, 8), (16, 64), (64, 64)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        backend = llguidance.GuidanceBackend(vocabulary())
        assert backend.lexers == most, f"{cores} cores: {backend.lexers} lexers of a grammar"
        many = backend.compile(Grammar.regex("[a-z]+"))
        outputs = [many.matcher() for _ in range(70)]
        assert len(set(map(lexer_of, outputs))) == most, f"{cores} cores"
    compiled = backend.compile(Grammar.regex("[a-z]+"))
    together = [compiled.matcher() for _ in range(3)]
    lexers = list(map(lexer_of, together))
    assert lexers == [0, 1, 2], f"three outputs at a time have lexers {lexers}"
    del together[1]
    assert lexer_of(compiled.matcher()) == 1, "a lexer that nobody uses is not taken again"
    monkeypatch.setattr(llguidance, "MAKING", 0.0)
    compiled = llguidance.GuidanceBackend(vocabulary()).compile(Grammar.regex("[a-z]+"))
    together = [compiled.matcher() for _ in range(3)]
    assert {lexer_of(one) for one in together} == {0}, "a lexer that takes long is made again"


def test_who_must_not_wait_does_not_wait_for_a_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that made lexers for the requests that came with it held everybody else up for 75 ms."""
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    backend = llguidance.GuidanceBackend(vocabulary())
    compiled = backend.compile(Grammar.regex("[a-z]+"))
    go, make = threading.Event(), compiled._make  # type: ignore[attr-defined]

    def slowly() -> Any:
        assert go.wait(30), "nobody lets it go on"
        return make()

    compiled._make = slowly  # type: ignore[attr-defined]
    outputs = [compiled.soon() for _ in range(llguidance.FEW + 2)]
    got = [output is not None for output in outputs]
    assert got == [True] * llguidance.FEW + [False] * 2, f"with one lexer these got an output at once: {got}"
    go.set()
    deadline = time.monotonic() + 30
    while sum(output is not None for output in outputs) < 32 * llguidance.FEW and time.monotonic() < deadline:
        outputs.append(compiled.soon())
        time.sleep(0.001)
    counts = Counter(lexer_of(output) for output in outputs if output is not None)
    assert len(counts) == 32, f"8 threads, but lexers {sorted(counts)}"
    assert max(counts.values()) - min(counts.values()) <= 1, f"outputs of each lexer: {dict(counts)}"


def test_no_step_makes_a_lexer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    made: list[str] = []
    parser = llguidance.GuidanceBackend._parser

    def noted(self: Any, source: str) -> Any:
        made.append(threading.current_thread().name)
        return parser(self, source)

    monkeypatch.setattr(llguidance.GuidanceBackend, "_parser", noted)
    engine = engine_of(model)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, n=8, grammar=Grammar.regex("[a-z]{3}"))
    requests = engine.add(PROMPT, params)
    run(engine)
    assert [request.finish_reason for request in requests] == ["stop"] * 8
    makers = {name.partition("_")[0] for name in made}
    assert makers == {"grammar", "lexers"}, f"threads that have made lexers of one grammar: {sorted(makers)}"


def test_a_few_masks_that_are_dear_are_made_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four at a millisecond each would hold up the step's thread, one after the other."""
    from phases.appendix.guidance import backend as llguidance

    def threads_of(cores: int, dear: float) -> tuple[list[bool], list[bool]]:
        """Whether threads make the masks of seven steps; and whether they are as one by itself makes them."""
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr(llguidance, "DEAR", dear)
        known = vocabulary()
        backend = llguidance.GuidanceBackend(known)
        compiled = backend.compile(Grammar.regex("[a-z]{9}"))
        outputs, other = [compiled.matcher() for _ in range(3)], compiled.matcher()
        words, wanted = np.zeros((3, known.words), np.int32), np.zeros(known.words, np.int32)
        by_threads, right = [], []
        for _ in range(7):
            words[:] = 0
            done = backend.begin([Job(output, row, ()) for row, output in enumerate(outputs)], words)
            by_threads.append(done is not None)
            if done is not None:
                done.result(30)
            other.fill(wanted)
            right.append(all((row == wanted).all() for row in words))
            token = known.encode("a")[0]
            for output in (*outputs, other):
                assert output.advance((token,)) == 1
        return by_threads, right

    never, then = [False] * 7, [False, True, True, True, True, False, True]
    for cores, dear, expected in ((9, 0.0, then), (9, 60.0, never), (2, 0.0, never)):
        by_threads, right = threads_of(cores, dear)
        what = f"{cores} cores, three masks, dear from {dear} s on, in seven steps"
        assert by_threads == expected, f"{what}: made by threads: {by_threads}"
        assert right == [True] * 7, f"{what}: as one makes them by itself: {right}"


def test_who_waits_for_one_thread_need_not_wake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr(llguidance, "FEW_ALONE", 7)
    known = vocabulary()
    for cores, most in ((1, 7), (2, 7), (3, FEW)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        backend = llguidance.GuidanceBackend(known)
        compiled = backend.compile(Grammar.regex("[a-z]{9}"))
        words = np.zeros((9, known.words), np.int32)
        alone = []
        for count in (1, FEW, FEW + 1, 7, 8):
            jobs = [Job(compiled.matcher(), row, ()) for row in range(count)]
            done = backend.begin(jobs, words[:count])
            alone.append(done is None)
            if done is not None:
                done.result(30)
        expected = [count <= most for count in (1, FEW, FEW + 1, 7, 8)]
        assert alone == expected, f"{cores} cores, 1, 4, 5, 7 and 8 masks: made by who asks: {alone}"


def test_a_lexer_that_cannot_be_made_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)))
    compiled = llguidance.GuidanceBackend(vocabulary()).compile(Grammar.regex("[a-z]+"))
    compiled._make = lambda: 1 // 0  # type: ignore[attr-defined]
    outputs: list[Matcher] = []
    deadline = time.monotonic() + 30
    while len(outputs) < 2 * llguidance.FEW and time.monotonic() < deadline:
        if (made := compiled.soon()) is not None:
            outputs.append(made)
    assert len(outputs) == 2 * llguidance.FEW, (
        f"after {len(outputs)} outputs of a lexer nobody gets one any more"
    )


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 5}, {"enum": ["abc", "the"]}, True])
def test_masks_do_not_depend_on_the_lexer_or_on_who_reads_the_tokenizer(schema: Any) -> None:

    known = vocabulary()
    assert known.source is not None, "a byte-level tokenizer is read by the library itself"
    rows: list[Matcher] = []
    for one in (known, replace(known, source=None)):
        compiled = GuidanceBackend(one).compile(Grammar.json_schema(schema))
        rows += [compiled.matcher() for _ in range(3)]
    assert len(rows) > 4, "few are filled one by one"
    backend, words, rng = (
        GuidanceBackend(known),
        np.zeros((len(rows), known.words), np.int32),
        random.Random(3),
    )
    for step in range(8):
        words[:] = -1
        backend.fill([Job(matcher, row, ()) for row, matcher in enumerate(rows)], words)
        for row in range(1, len(rows)):
            assert (words[row] == words[0]).all(), f"token {step} of the output: mask {row} is another one"
        assert len({tuple(matcher.forced()) for matcher in rows}) == 1, (
            f"token {step}: what is forced differs"
        )
        token = rng.choice(bits(words[0], SIZE))
        if token == EOS:
            break
        assert backend.advance([(matcher, (token,)) for matcher in rows]) == [1] * len(rows)


def test_what_older_drafts_ignore_beside_a_reference_is_ignored() -> None:

    backend = GuidanceBackend(vocabulary())
    pair = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "default": {"$ref": "#/definitions/pair", "maxProperties": 0, "enum": ["never"]},
            "x": {"enum": [{"$ref": "a value", "maxItems": 1}]},
        },
        "required": ["default", "x"],
        "additionalProperties": False,
        "definitions": {"pair": {"type": "object", **pair}},
    }
    for draft, value in (
        ("http://json-schema.org/draft-07/schema#", {"a": 1}),
        ("http://json-schema.org/draft-04/schema", {"a": 1}),
    ):
        ids = tokenizer().encode(json.dumps({"default": value, "x": {"$ref": "a value", "maxItems": 1}}))
        matcher = backend.compile(Grammar.json_schema({"$schema": draft, **schema})).matcher()
        assert matcher.advance(ids) == len(ids) and matcher.accepting, f"{draft} refuses {value}"
    newest = "https://json-schema.org/draft/2020-12/schema"
    with pytest.raises(UserError, match="refused"):
        backend.compile(Grammar.json_schema({"$schema": newest, **schema}))


"""Graphs around attention and sampling by kernels: the others would only take the interpreter's time."""


class OddOnlyEarly(OddOnly):
    """Can be begun before the last tokens are dealt out, and says whether that is all."""

    begun, done = 0, True

    def begin(self, works: Sequence[Work], landed: Landed = NOBODYS) -> bool:
        self.begun += 1
        return self.done


@pytest.mark.parametrize("done", [True, False])
def test_masked_steps_overlap(model: Model, done: bool) -> None:
    masks = OddOnlyEarly(model.config.vocab_size)
    masks.done = done
    made = cuda_graphs.load(model, **SMALL)
    engine = Engine(made.scheduler, made.runner, masks=masks)
    engine.loop = EarlyHalves(masks)
    for completion in engine.generate([PROMPT, [3, 1]], SamplingParams(max_tokens=5, ignore_eos=True)):
        assert all(token % 2 for token in completion.token_ids), completion.token_ids
    assert masks.filled == engine.stats.steps and masks.begun >= 4, "no mask was begun early"
    check(engine)


def test_what_is_forced_is_drafted_for_a_few_and_not_for_many() -> None:
    """Their steps have slower kernels, and everybody in them waits."""
    drafter = GrammarDrafter(most_ahead=Guidance().jump_rows)
    running = [Request(n, [1], 1, 9, SamplingParams(), constraint=object()) for n in range(5)]
    for count in range(1, 6):
        drafter.begin(running[:count])
        assert drafter.looks_ahead == (count <= 4), f"{count} requests: looks ahead is {drafter.looks_ahead}"


@pytest.mark.parametrize("count", [1, 4], ids=["alone", "several"])
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_forced_tokens_save_steps_and_change_nothing(model: Model, overlap: bool, count: int) -> None:
    schema = Grammar.json_schema(
        {
            "type": "object",
            "properties": {
                "thename": {"type": "boolean"},
                "average": {"type": "null"},
                "k": {"enum": ["anthering"]},
            },
            "required": ["thename", "average", "k"],
            "additionalProperties": False,
        }
    )
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=s, grammar=schema) for s in range(count)]
    with_, without = (
        engine_of(model, overlap=overlap, speculate=False, jump_forward=jump) for jump in (True, False)
    )
    for engine in (with_, without):  # nobody waits for a lexer
        compiled = engine.masks.pool.ask(schema).wait()  # type: ignore[attr-defined]
        _ = [compiled.matcher() for _ in range(count)]
    left, right = (engine.generate([PROMPT] * count, params) for engine in (with_, without))
    assert [c.token_ids for c in left] == [c.token_ids for c in right], "jumping forward changes the text"
    drafter = with_.scheduler.drafter
    assert isinstance(drafter, GrammarDrafter) and drafter.forced > 0, "nothing that is forced was drafted"
    assert sum(drafter.stats.drafted) == sum(drafter.stats.accepted) == drafter.forced, (
        "a forced draft was not counted, or not accepted"
    )
    assert with_.stats.steps < 0.9 * without.stats.steps, (with_.stats.steps, without.stats.steps)
    check(with_)


def test_steps_take_turns_on_a_cpu_while_somebody_has_a_grammar(model: Model) -> None:
    engine = loaded(model, speculate=False)
    drafter = engine.scheduler.drafter
    (free,) = engine.add(PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True))
    engine.step()
    engine.step()
    assert not drafter.waits and free.placeholders == 1, "nobody has a grammar, but steps do not overlap"
    (bound,) = engine.add(PROMPT, SamplingParams(max_tokens=20, grammar=GRAMMARS["person"]))
    while not bound.tokens[bound.prompt_len :]:
        engine.step()
    engine.step()
    assert drafter.waits, "a grammar may force tokens behind the newest one, which is not waited for"
    run(engine)
    assert bound.finish_reason in ("stop", "length") and len(free.output_ids) == 40
    check(engine)


def test_a_cpu_drafts_what_is_forced_only_for_few(model: Model) -> None:
    word = Grammar.choice(["anthering thename average"])
    params = SamplingParams(max_tokens=40, grammar=word)
    steps, texts = {}, set()
    for count in (FEW_IN_TURN, FEW_IN_TURN + 1):
        engine = loaded(model, speculate=False)
        texts |= {text_of(completion) for completion in engine.generate([PROMPT] * count, params)}
        steps[count] = engine.stats.steps
        forced = engine.scheduler.drafter.forced
        assert bool(forced) == (count == FEW_IN_TURN), (
            f"{forced} forced tokens were drafted for {count} requests"
        )
        check(engine)
    assert texts == {"anthering thename average"}
    assert steps[FEW_IN_TURN] < steps[FEW_IN_TURN + 1], "drafts save no steps"


def test_a_certain_token_that_does_not_come_ends_its_own_request(model: Model) -> None:
    engine = engine_of(model, speculate=False, jump_forward=True)
    word = Grammar.choice(["anthering thename average"])
    (good,) = engine.add(PROMPT, SamplingParams(max_tokens=40, grammar=word))
    (bad,) = engine.add(PROMPT, SamplingParams(max_tokens=40, grammar=word))
    real = engine.runner.extra.agree
    seen = []

    def disagree(sampled: Sequence[int], drafts: Sequence[int]) -> int:
        seen.append(drafts)
        return 0 if len(seen) == 2 else real(sampled, drafts)

    engine.runner.extra.agree = disagree
    run(engine)
    ended = sorted([good.finish_reason, bad.finish_reason])
    assert len(seen) >= 2, "nothing was drafted"
    assert ended == ["error", "stop"], f"one of two requests was given a wrong token, but they ended {ended}"
    check(engine)


@pytest.mark.parametrize("text", ["abab", "ccc", "zzz", "abzz", "d"])
def test_guesses_of_another_drafter_are_cut_where_the_grammar_says(model: Model, text: str) -> None:
    params = [
        SamplingParams(max_tokens=30, temperature=1.0, seed=s, grammar=Grammar.regex("(ab|c){4,9}d"))
        for s in range(5)
    ]
    expected = engine_of(model, overlap=False, jump_forward=False).generate([PROMPT] * 5, params)
    engine = engine_of(model, overlap=False)
    engine.scheduler.drafter = GrammarDrafter(Guess(text))
    found = engine.generate([PROMPT] * 5, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected], "drafts change the text"
    assert engine.scheduler.drafter.refused > 0
    (alone,) = engine.generate([PROMPT], params[:1])
    assert alone.token_ids == expected[0].token_ids, "drafts change the text of a request that is alone"
    check(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "speculating"])
def test_a_crowd_parses(model: Model, overlap: bool) -> None:
    crowd(engine_of(model, **CROWD, overlap=overlap, cache_bytes=blocks(model, 90)), 60, SCHEMAS)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "speculating"])
def test_a_thousand_parse(model: Model, overlap: bool) -> None:
    many = CROWD | {"max_rows": 64, "cache_bytes": blocks(model, 260)}
    crowd(engine_of(model, **many, overlap=overlap), 1000, SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_greedy_and_sampled_outputs_obey(model: Model, name: str, overlap: bool) -> None:
    engine = engine_of(model, overlap=overlap)
    params = [SamplingParams(max_tokens=60, grammar=GRAMMARS[name])]
    params += [
        SamplingParams(max_tokens=60, temperature=1.0, seed=s, grammar=GRAMMARS[name]) for s in range(4)
    ]
    for completion in engine.generate([PROMPT] * len(params), params):
        must_obey(completion, name)
    check(engine)


HOSTILE = rules.HOSTILE | {
    "ambiguous": Grammar.lark('start: s\ns: s s | "a" |'),
    "left": Grammar.lark('start: start "a" | "b"'),
}


def test_hostile_grammars_harm_nobody(model: Model) -> None:
    must_harm_nobody(engine_of(model, max_rows=16), HOSTILE)


def test_stats_reach_through_grammars() -> None:
    """`--stats` and `Tint` ask the scheduler's drafter, which here is one around that of phase 11."""
    speculator = Speculator(NGrams(), Control(4))
    assert GrammarDrafter(speculator).stats is speculator.stats
    assert GrammarDrafter().stats.lines() == ["speculation: nothing was drafted"]

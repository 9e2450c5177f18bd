"""Grammars in an engine: every output parses, whatever else happens to its request."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import cuda_graphs
import forward
import structured
from common.errors import UserError
from common.events import Completion
from common.request import Request
from common.sampling import ops
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.sampling.sampler import Allowed, Sampler
from continuous.engine import MOST_LOOKS, Engine
from continuous.work import Work
from forward.model import Model
from paged_cache import BlockPool, PagedEngine
from speculative.loops import Watcher
from structured.backends.llguidance import FEW, OPTIONS, source_of
from structured.drafter import FEW_IN_TURN, GrammarDrafter
from structured.feature import Structured
from structured.loop import NOBODYS, Landed, TwoHalves
from structured.masks import Constraint, Crowd, GrammarMasks
from structured.matcher import Job, Matcher
from tests.fakes import OddOnly
from tests.schedules import check
from tests.structured_kit import EOS, SCHEMAS, SIZE, bits, mask, must_validate, tokenizer, vocabulary

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("llguidance")

SMALL: dict[str, Any] = {"max_rows": 8, "max_len": 96, "step_tokens": 96, "block_size": 4}
GRAMMARS = {name: Grammar.json_schema(schema) for name, schema in SCHEMAS.items()}


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def few_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four masks are left to other threads, as on a GPU's host, even if there is one alone."""
    monkeypatch.setattr("structured.backends.llguidance.FEW_ALONE", FEW)


def engine_of(model: Model, **options: Any) -> PagedEngine:
    """An engine whose steps overlap under grammars, too, as on a GPU, unless it is told otherwise."""
    engine = structured.load(model, tokenizer=tokenizer(), **{**SMALL, **options})
    if isinstance(engine.scheduler.drafter, GrammarDrafter) and model.device.type == "cpu":
        assert engine.scheduler.drafter.in_turn, "on a CPU there is nothing to overlap with"
        engine.scheduler.drafter.in_turn = False
    return engine


@pytest.fixture(scope="module")
def engine(model: Model) -> PagedEngine:
    return engine_of(model)


def text_of(completion: Completion) -> str:
    return tokenizer().decode([token for token in completion.token_ids if token != EOS])


def must_obey(completion: Completion, name: str) -> None:
    """A finished output validates; one that was cut says so."""
    said = f"{name}, prompt {completion.index}, sample {completion.sample}: {text_of(completion)!r}"
    assert completion.finish_reason in ("stop", "length"), f"{said} ended with {completion.finish_reason}"
    if completion.finish_reason == "stop":
        assert completion.token_ids[-1] == EOS, f"{said} stopped without an end-of-sequence token"
        must_validate(text_of(completion), SCHEMAS[name], said)
    else:
        assert EOS not in completion.token_ids, f"{said} goes on after its end"


PROMPT = [5, 6, 7, 8]


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


def test_rows_without_a_grammar_are_as_ever(model: Model, engine: PagedEngine) -> None:
    free = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=9, seed=4, logprobs=2, repetition_penalty=1.2),
    ]
    plain = cuda_graphs.load(model, **SMALL).generate([PROMPT] * 3, free)
    mixed = []
    for settings in free:
        mixed += [
            settings,
            SamplingParams(max_tokens=20, temperature=1.0, seed=2, grammar=GRAMMARS["person"]),
        ]
    found = engine.generate([PROMPT] * 6, mixed)[::2]
    for left, right in zip(plain, found, strict=True):
        assert left.token_ids == right.token_ids, "a neighbour's grammar changes tokens"
        for one, other in zip(left.logprobs or [], right.logprobs or [], strict=True):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-4)


def test_engines_without_grammars_ask_for_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    monkeypatch.setattr(GrammarMasks, "fill", lambda *given: pytest.fail("masks are filled for nobody"))
    engine.generate([PROMPT], SamplingParams(max_tokens=4))
    assert engine.masks.pool.compiled == 0  # type: ignore[attr-defined]
    assert engine.masks.pool._backend is None, "a tokenizer is prepared though nobody asked"  # type: ignore[attr-defined]


# Everything else that a request may ask for.


def test_logprobs_are_raw(engine: PagedEngine) -> None:
    ask = SamplingParams(max_tokens=1, logprobs=20)
    (free,) = engine.generate([PROMPT], ask)
    (bound,) = engine.generate(
        [PROMPT], SamplingParams(max_tokens=1, logprobs=20, grammar=Grammar.regex("~x"))
    )
    assert free.logprobs and bound.logprobs
    assert bound.logprobs[0].top == free.logprobs[0].top, "log-probabilities are those of the mask"
    assert bound.token_ids != free.token_ids


def test_penalties_bias_and_truncation_stay_inside(engine: PagedEngine) -> None:
    digits = [tokenizer().encode(d)[0] for d in "0123456789"]
    grammar = Grammar.regex("[0-9]{30}")
    params = [
        SamplingParams(max_tokens=40, grammar=grammar, repetition_penalty=2.0, presence_penalty=2.0),
        SamplingParams(
            max_tokens=40, grammar=grammar, temperature=3.0, top_k=2, top_p=0.5, min_p=0.2, seed=1
        ),
        SamplingParams(
            max_tokens=40, grammar=grammar, logit_bias=dict.fromkeys(digits, -100.0), temperature=1.0
        ),
        SamplingParams(
            max_tokens=40, grammar=grammar, frequency_penalty=2.0, temperature=1.0, logprobs=3, seed=2
        ),
    ]
    for completion in engine.generate([PROMPT] * 4, params):
        assert re.fullmatch("[0-9]{30}", text_of(completion)), f"{completion.index}: {text_of(completion)!r}"
        assert completion.finish_reason == "stop"


def test_min_tokens_lengthens_as_far_as_the_grammar_goes(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = engine.masks.fill

    def filled(works: Sequence[Work]) -> Any:
        allowed = fill(works)
        assert allowed is None or allowed.words.any(1).all(), "a mask allows nothing at all"  # type: ignore[union-attr]
        return allowed

    monkeypatch.setattr(engine.masks, "fill", filled)
    star, three = Grammar.regex("x[ab]*"), Grammar.regex("x[ab]{3}")
    params = [
        SamplingParams(max_tokens=40, min_tokens=20, temperature=1, seed=3, grammar=star),
        SamplingParams(max_tokens=40, min_tokens=20, temperature=1, seed=3, grammar=three),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1, seed=3, grammar=star),
        SamplingParams(max_tokens=24, ignore_eos=True, grammar=Grammar.regex("xab")),
        SamplingParams(max_tokens=24, min_tokens=9, stop_token_ids=(tokenizer().encode("a")[0],),
                       grammar=Grammar.regex("xa+b")),
    ]  # fmt: skip
    long, short, endless, done, stopped = engine.generate([PROMPT] * 5, params)
    assert long.finish_reason == "stop" and len(long.token_ids) > 20, "the end came before min_tokens"
    assert short.finish_reason == "stop" and len(short.token_ids) < 20, "min_tokens beat the grammar's end"
    assert endless.finish_reason == "length" and len(endless.token_ids) == 24
    assert done.finish_reason == "stop" and text_of(done) == "xab", "ignore_eos beat the grammar's end"
    assert stopped.finish_reason == "stop"


def test_a_cut_says_so_and_a_stop_string_stops(engine: PagedEngine) -> None:
    grammar = Grammar.regex("a{50}")
    (cut,) = engine.generate([PROMPT], SamplingParams(max_tokens=7, grammar=grammar))
    assert cut.finish_reason == "length" and set(text_of(cut)) == {"a"}
    (stopped,) = engine.generate([PROMPT], SamplingParams(max_tokens=40, grammar=grammar, stop=("aaaa",)))
    assert stopped.finish_reason == "stop" and len(text_of(stopped)) < 10
    (none,) = engine.generate([PROMPT], SamplingParams(max_tokens=0, grammar=grammar))
    assert none.finish_reason == "length" and none.token_ids == []


def test_samples_have_places_of_their_own(engine: PagedEngine) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=1, n=5, grammar=GRAMMARS["person"])
    done = engine.generate([PROMPT, [9, 9]], params)
    assert len({text_of(completion) for completion in done}) > 1
    for completion in done:
        must_obey(completion, "person")
    check(engine)


def blocks(model: Model, count: int) -> int:
    return count * BlockPool.bytes_per_block(model.config, 4, model.dtype)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_preemption_loses_no_place(model: Model, overlap: bool) -> None:
    roomy, tight = (
        engine_of(model, overlap=overlap),
        engine_of(model, overlap=overlap, cache_bytes=blocks(model, 26)),
    )
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=s, grammar=GRAMMARS[name])
        for s, name in enumerate([*SCHEMAS] * 2)
    ]
    prompts = [[s + 1, 2, 3] for s in range(len(params))]
    left, right = roomy.generate(prompts, params), tight.generate(prompts, params)
    assert tight.scheduler.preemptions > 0, "nobody was preempted: the test shows nothing"
    assert [c.token_ids for c in left] == [c.token_ids for c in right]
    check(tight)


def test_an_abort_leaves_the_others_alone(engine: PagedEngine) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, grammar=GRAMMARS["person"])
    (kept,) = engine.add(PROMPT, params)
    (gone,) = engine.add([9], params)
    for _ in range(4):
        engine.step()
    engine.abort(gone)
    while not engine.idle:
        engine.step()
    (alone,) = engine.generate([PROMPT], params)
    assert gone.finish_reason == "abort" and kept.output_ids == alone.token_ids
    check(engine)


# A grammar on its way.


class Slow:
    """Holds a backend's compilations back."""

    def __init__(self, engine: PagedEngine, seconds: float) -> None:
        masks = engine.masks
        assert isinstance(masks, GrammarMasks)
        backend = masks.pool.backend
        compile = backend.compile

        def slowly(grammar: Grammar) -> Any:
            if "slow" in grammar.source:
                time.sleep(seconds)
            return compile(grammar)

        backend.compile = slowly  # type: ignore[method-assign]


def run(engine: PagedEngine, seconds: float = 20.0) -> list[Any]:
    outputs, deadline = [], time.monotonic() + seconds
    while not engine.idle:
        outputs += engine.step()
        assert time.monotonic() < deadline, "a request waits for ever"
    return outputs


def test_a_request_waits_for_its_grammar_and_nobody_else_does(model: Model) -> None:
    engine = engine_of(model, grammar_seconds=60.0)
    Slow(engine, 2.0)
    (waits,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("slow")))
    (quick,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("quick")))
    (free,) = engine.add(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    started = time.monotonic()
    while free.finish_reason is None or quick.finish_reason is None:
        engine.step()
    assert waits.first_token is None, "the slow grammar was awaited by all"
    assert time.monotonic() - started < 1.5
    run(engine)
    assert waits.finish_reason == "stop" and tokenizer().decode(waits.output_ids[:-1]) == "slow"
    check(engine)


def test_everybody_who_waits_is_asked_again(model: Model) -> None:
    """More than a step looks at: each is asked as often as any other, and no step asks them all."""
    engine = engine_of(model)
    asked: Counter[Request] = Counter()

    def never(request: Request) -> bool:
        asked[request] += 1
        return False

    engine.masks.ready = never  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=3, grammar=Grammar.regex("abc"))
    requests = [request for _ in range(MOST_LOOKS + 6) for request in engine.add(PROMPT, params)]
    engine.step()
    asked.clear()
    for step in range(1, 4):
        engine.step()
        assert sum(asked.values()) <= step * MOST_LOOKS, f"{sum(asked.values())} looks in {step} steps"
    for number, request in enumerate(requests):
        assert asked[request] in (2, 3), f"request {number} was asked {asked[request]} times in three steps"
    for request in requests:
        engine.abort(request)
    run(engine)
    check(engine)


def test_what_takes_too_long_is_refused(model: Model) -> None:
    engine = engine_of(model, grammar_seconds=0.5)
    Slow(engine, 2.0)
    (late,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("slow")))
    (other,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("quick")))
    run(engine)
    assert late.finish_reason == "error" and "takes longer to compile than grammar_seconds, 0.5" in str(
        late.error
    )
    assert isinstance(late.error, UserError) and other.finish_reason == "stop"
    with pytest.raises(UserError, match="takes longer"):
        engine.generate([PROMPT], SamplingParams(grammar=Grammar.regex("slower")))
    assert engine.idle


def test_aborted_while_it_waits(model: Model) -> None:
    engine = engine_of(model)
    Slow(engine, 0.3)
    requests = engine.add(PROMPT, SamplingParams(max_tokens=9, n=3, grammar=Grammar.regex("slow")))
    engine.step()
    engine.abort(requests[0])
    engine.abort(requests[2])
    run(engine)
    assert [request.finish_reason for request in requests] == ["abort", "stop", "abort"]
    check(engine)


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
    with pytest.raises(UserError, match=says):
        engine.generate([PROMPT, PROMPT], [SamplingParams(grammar=grammar), SamplingParams(max_tokens=2)])
    (bad,) = engine.add(PROMPT, SamplingParams(grammar=grammar))
    (good,) = engine.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert bad.finish_reason == "error" and re.search(says, str(bad.error)), bad.error
    assert good.finish_reason == "length", "somebody else's grammar ended a request"
    assert "\n" not in str(bad.error)
    check(engine)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.regex(""), "is empty"),
        (lambda: Grammar.regex("a" * 300_000), "has 300,000 characters"),
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema([]), "must be a JSON object"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema('{"a":' * 200 + "1" + "}" * 200), "nests deeper than 128"),
        (lambda: Grammar.json_schema({"a": object()}), "is not JSON"),
        (lambda: Grammar.json_schema({"a": {"b": dict.fromkeys(map(str, range(3000)), 1)}}), "3,000 keys"),
        (lambda: Grammar.choice("abc"), "must be a list"),
        (lambda: Grammar.choice({"a": 1}), "must be a list"),
        (lambda: Grammar.choice(5), "must be a list"),  # type: ignore[arg-type]
        (lambda: Grammar.regex(5), "must be a string"),  # type: ignore[arg-type]
        (lambda: Grammar.lark(["a"]), "must be a string"),  # type: ignore[arg-type]
        (lambda: Grammar.choice([]), "at least 1 string"),
        (lambda: Grammar.choice([""]), "at least 1 character"),
        (lambda: Grammar.choice(["\ud800"]), "UTF-8"),
        (lambda: Grammar("jsonschema", "{}"), "did you mean 'json_schema'"),  # type: ignore[arg-type]
        (lambda: SamplingParams(grammar="a+"), "must be a Grammar"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_no_grammars(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


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
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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


def test_engines_that_take_none(model: Model) -> None:
    grammar = SamplingParams(grammar=Grammar.regex("a"))
    for engine in (forward.load(model), cuda_graphs.load(model, **SMALL)):
        with pytest.raises(UserError, match="grammar is set, but must be None for an engine that masks no"):
            list(engine.stream([PROMPT], grammar))
    without = structured.load(model, **SMALL)
    with pytest.raises(UserError, match="must be None for an engine that has no tokenizer"):
        without.add(PROMPT, grammar)
    with pytest.raises(UserError, match="masks no tokens"):
        engine_of(model, structured=False).add(PROMPT, grammar)


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


def computed_after_their_end(engine: PagedEngine) -> list[int]:
    """Numbers of requests that have ended when a step that computes them begins."""
    late: list[int] = []
    forward = engine.runner.forward

    def watched(works: Sequence[Any], **options: Any) -> Any:
        late.extend(work.request.id for work in works if work.request.finish_reason is not None)
        return forward(works, **options)

    engine.runner.forward = watched  # type: ignore[method-assign]
    return late


def test_masks_that_cannot_be_made_end_their_own_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, speculate=False)
    late = computed_after_their_end(engine)
    (first,) = engine.add(PROMPT, SamplingParams(max_tokens=20, grammar=Grammar.regex("[ab]{18}")))
    for _ in range(200):
        engine.step()
        if len(first.output_ids) >= 3:
            break
    known = len(first.output_ids)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.masks), "_follow", lambda self, works, landed: 1 / 0)
        outputs = engine.step()
    assert first.finish_reason == "error" and isinstance(first.error, ZeroDivisionError), first.error
    assert len(first.output_ids) == known + 1, "the token of the step before, which went well, is lost"
    assert outputs[0].token_id == first.output_ids[-1]
    (second,) = engine.add(PROMPT, SamplingParams(max_tokens=20, grammar=Grammar.regex("b{9}")))
    run(engine)
    assert second.finish_reason == "stop", f"after a step that failed: {second.finish_reason}"
    assert not late, f"requests {late} are computed in rows that they have given back"
    check(engine)


@pytest.mark.parametrize("count", [2, 6])
def test_grammars_that_all_fail_at_once_end_each_output_once(
    model: Model, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in which nobody is left to make a mask for."""
    engine = engine_of(model, speculate=False)
    assert isinstance(engine.masks, GrammarMasks)
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


def test_who_has_ended_does_not_fail_as_well(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, speculate=False)
    failed = engine.masks.take_failed
    (request,) = engine.add(PROMPT, SamplingParams(max_tokens=20, grammar=Grammar.regex("[ab]{18}")))
    error = UserError("its grammar")

    def twice() -> list[tuple[Request, Exception]]:
        return [*failed(), *([(request, error)] * 2 if len(request.output_ids) > 3 else [])]

    monkeypatch.setattr(engine.masks, "take_failed", twice)
    ends = []
    for _ in range(60):
        ends += [output for output in engine.step() if output.finish_reason is not None]
    assert len(ends) == 1 and request.error is error, f"request {request.id} has ended {len(ends)} times"
    check(engine)


class Still(Matcher):
    """One that allows everything, and goes nowhere."""

    fill = advance = rollback = lambda self, *_: 0  # type: ignore[assignment]
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
        request.constraint = Constraint(Still())
    shape = [((request,), drafts) for request in requests]
    places = range(0, 4 * (len(drafts) + 1), len(drafts) + 1)
    pairs = zip(places, requests[:3], strict=False)  # whoever waits for a grammar or ends is none of them
    crowd = Crowd(
        shape[:3], [(place, drafts, one, cast(Constraint, one.constraint), []) for place, one in pairs]
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
    assert isinstance(engine.masks, GrammarMasks)
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


def test_grammars_are_compiled_once_and_forgotten_in_order(model: Model) -> None:
    engine = engine_of(model, grammar_cache_bytes=350_000)
    pool = engine.masks.pool  # type: ignore[attr-defined]
    for pattern in ("a", "b", "a", "a"):
        engine.generate([PROMPT] * 2, SamplingParams(max_tokens=4, grammar=Grammar.regex(pattern)))
    assert pool.compiled == 2
    for pattern in ("c", "d"):
        engine.generate([PROMPT], SamplingParams(max_tokens=4, grammar=Grammar.regex(pattern)))
        assert pool.bytes <= 350_000
    kept = [grammar.source for grammar in pool.kept]
    assert kept == ["a", "c", "d"], f"a was used after b, and yet {kept} are kept"
    engine.generate([PROMPT], SamplingParams(max_tokens=4, grammar=Grammar.regex("b")))
    assert pool.compiled == 5, "b was forgotten, and yet it is not compiled again"


def test_a_pool_without_room_still_serves(model: Model) -> None:
    engine = engine_of(model, grammar_cache_bytes=0)
    requests = [
        engine.add(PROMPT, SamplingParams(max_tokens=4, grammar=Grammar.regex(c)))[0] for c in "abcabc"
    ]
    run(engine)
    assert [tokenizer().decode(r.output_ids[:-1]) for r in requests] == list("abcabc")


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: dict[str, Grammar] = {
    "counts": Grammar.regex("a{1,9999}{1,9999}"),
    "counts of counts": Grammar.regex("(a{1,999}b?){1,999}"),
    "catastrophic": Grammar.regex("((a+)+|(a|aa)+b|(.*a){25})c"),
    "blow-up": Grammar.regex("(a|b)*a(a|b){20}"),
    "deep": Grammar.json_schema(nested(42)),
    "wide": Grammar.json_schema({"type": "object", "properties": {f"p{n}": True for n in range(2000)}}),
    "many strings": Grammar.json_schema({"enum": [f"{'x' * 20}{n}" for n in range(8000)]}),
    "no base": Grammar.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "itself": Grammar.json_schema({"$ref": "#"}),
    "ambiguous": Grammar.lark('start: s\ns: s s | "a" |'),
    "left": Grammar.lark('start: start "a" | "b"'),
}


def test_hostile_grammars_harm_nobody(model: Model) -> None:
    engine = engine_of(model, max_rows=16)
    bystander = SamplingParams(max_tokens=80, temperature=1.0, seed=1, ignore_eos=True)
    (expected,) = engine.generate([PROMPT], bystander)
    started = time.process_time()
    (kept,) = engine.add(PROMPT, bystander)
    hostile = {
        name: engine.add(PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=2, grammar=grammar))[0]
        for name, grammar in HOSTILE.items()
    }
    run(engine, 60.0)
    for name, request in hostile.items():
        assert request.finish_reason in ("stop", "length", "error"), f"{name}: {request.finish_reason}"
        if request.finish_reason == "error":
            assert isinstance(request.error, UserError), f"{name}: {request.error!r}"
    assert kept.output_ids == expected.token_ids, "a hostile grammar changed somebody's tokens"
    assert time.process_time() - started < 2 * len(HOSTILE)
    check(engine)


def test_a_thousand_grammars_are_forgotten(model: Model) -> None:
    engine = engine_of(model, grammar_cache_bytes=5_000_000)
    pool = engine.masks.pool  # type: ignore[attr-defined]
    for number in range(0, 200, 8):
        params = [
            SamplingParams(max_tokens=4, grammar=Grammar.regex(f"x{n}")) for n in range(number, number + 8)
        ]
        engine.generate([PROMPT] * 8, params)
        assert pool.bytes <= 5_000_000 and len(pool.kept) <= 50
    assert pool.compiled == 200


# The library.


def lexer_of(matcher: Any) -> int:
    """The number of the lexer that an output of llguidance shares with others."""
    number: int = matcher.group
    return number


def test_outputs_that_run_together_do_not_share_a_lexer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is shared is locked while it works: threads would wait for each other. One that no thread can
    use beside the others learns again what they know."""
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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
    from structured.backends import llguidance

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
    from structured.backends.llguidance import GuidanceBackend

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
    from structured.backends.llguidance import GuidanceBackend

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


# The kernel.


def kernels_run_on() -> str:
    """A device; skips a test where there is none."""
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    return "cuda" if torch.cuda.is_available() else "cpu"


def only(token: int, vocab: int) -> torch.Tensor:
    """A mask that allows one token."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    words[token // 32] = 1 << token % 32
    return torch.from_numpy(words.view(np.int32))


def test_the_kernel_masks_what_torch_masks() -> None:
    pytest.importorskip("triton")
    from structured.kernel import forbid, with_kernel
    from triton_paged_attention.sampler import TritonSampler

    device = kernels_run_on()
    made = torch.Generator().manual_seed(3)
    for vocab in (257, 32, 4096, 9001):
        words = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), generator=made, dtype=torch.int32)
        allowed = Allowed(words.to(device), torch.tensor([0, 2, 4], device=device))
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.randn(6, vocab, generator=made).to(device, dtype)
            expected = ops.forbid(logits.clone(), allowed.words, allowed.places)
            forbid(logits, allowed)
            assert torch.equal(logits, expected), f"{vocab} tokens in {dtype}"
            forbid(wide := logits.new_zeros(vocab, 6).T, allowed)
            assert torch.equal(wide == 0, expected > -math.inf), f"{vocab} tokens in columns, {dtype}"
            padded = Allowed(allowed.words, torch.tensor([0, -1, -1], device=device))
            room = logits.new_zeros(8, vocab)
            forbid(room[2:], padded)
            touched = room.any(1).nonzero().flatten().tolist()
            assert touched in ([], [2]), f"padding masks places {[place - 2 for place in touched]}"
    assert with_kernel(TritonSampler).forbid is not TritonSampler.forbid


@pytest.mark.parametrize("vocab", [20, 257, 4096, 9001])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 3}, {"presence_penalty": 0.5}],
    ids=["greedy", "sampled", "top-k", "penalties"],
)
def test_reading_under_masks_chooses_what_is_chosen_behind_them(vocab: int, settings: dict[str, Any]) -> None:
    """Masks of many tokens, of one, of none (whose token nobody reads), and no mask; padding of a graph."""
    pytest.importorskip("triton")
    from structured.kernel import with_kernel
    from triton_paged_attention.sampler import TritonSampler

    device = kernels_run_on()
    made, size = torch.Generator().manual_seed(vocab), 7
    last = only(vocab - 1, vocab)
    many = torch.randint(-(2**31), 2**31 - 1, (3, len(last)), generator=made, dtype=torch.int32)
    many[1, 1:] = 0
    words = torch.stack([*many, last, 0 * last]).to(device)
    places = torch.tensor([0, 2, 3, 5, -1], device=device)  # of masks 0 to 3; 1, 4 and 6 have none
    tokens: dict[object, list[int]] = {}
    for kind in (TritonSampler, with_kernel(TritonSampler)):
        sampler = kind(size, vocab, device)
        for row in range(size):
            given = settings if row != 2 else {}  # one of them is greedy
            sampler.set_row(row, SamplingParams(seed=row, **given))
        alone = not settings.keys() - {"temperature"}
        for dtype in (torch.float32, torch.bfloat16) if alone else (torch.float32,):
            logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(5)).to(device, dtype)
            before, rows = logits.clone(), torch.arange(size, device=device)
            real = places[:4] if kind is TritonSampler else places  # torch has no padding
            allowed = Allowed(words[: len(real)], real)
            found = sampler.sample(logits, rows, list(range(size)), rows * 3, allowed=allowed).tokens.tolist()
            assert found == tokens.setdefault(dtype, found), f"{dtype}, {kind.__name__}: {found}"
            if kind is not TritonSampler:
                assert torch.equal(logits, before) or not alone, "the logits have been written"
        free = sampler.sample(before.float(), rows, list(range(size)), rows * 3).tokens.tolist()
        assert free == tokens.setdefault("free", free), f"{kind.__name__} without masks: {free}"


def test_more_masks_than_are_looked_through_at_once() -> None:
    pytest.importorskip("triton")
    from structured.kernel import MASKS, rehearse, with_kernel
    from triton_paged_attention.sampler import TritonSampler

    device = kernels_run_on()
    count = MASKS.value + 4
    sampler = with_kernel(TritonSampler)(1, 64, device)
    rehearse(sampler)  # all that it does is compile
    sampler.set_row(0, SamplingParams())
    rows = torch.zeros(count, dtype=torch.int64, device=device)
    wanted = [1 + number % 60 for number in range(count)]
    words = torch.stack([only(token, 64) for token in wanted])
    allowed = Allowed(words.to(device), torch.arange(count, device=device))
    logits = torch.zeros(count, 64, device=device)
    found = sampler.sample(logits, rows, [0] * count, rows, allowed=allowed).tokens.tolist()
    wrong = [number for number in range(count) if found[number] != wanted[number]]
    assert not wrong, f"rows {wrong} are not given the token that their masks allow"


@pytest.mark.parametrize("size", [4, 16])
def test_a_first_half_leaves_the_logits_where_the_second_reads_them(model: Model, size: int) -> None:
    """By a product that writes them there, where the output head is no more than that."""
    pytest.importorskip("triton")
    from cuda_graphs.capture import Capturer
    from structured.masked_graph import LogitsGraph, MaskInputs
    from triton_paged_attention.linear import FusedLinear

    model = copy.copy(model)
    model._modules = dict(model._modules)
    head = FusedLinear(model.lm_head)
    for kind in (model.lm_head, head):
        model.lm_head = kind
        asked = list[object]()
        handle = kind.register_forward_hook(lambda *_, asked=asked: asked.append(_))
        masks, hidden = MaskInputs(16, model), torch.randn(size, model.config.hidden_size)
        half = SimpleNamespace(size=size, hidden=hidden, inputs=torch.ones(3, size, dtype=torch.int64))
        half.machine, half.pad = SimpleNamespace(model=model), lambda: None
        made = LogitsGraph(cast(Any, half), masks, Capturer(model.device))
        handle.remove()
        assert bool(asked) == (kind is not head), "logits are made somewhere, and copied"
        torch.testing.assert_close(made.logits, model.logits(hidden))
        assert masks.logits[:size].data_ptr() == made.logits.data_ptr() and not masks.logits[size:].any()


@pytest.mark.parametrize("wanted", [None, 1])
def test_masks_for_some_places_leave_the_others(wanted: int | None) -> None:
    sampler = Sampler(4, 40, "cpu")
    for row in range(4):
        sampler.set_row(row, SamplingParams(logprobs=wanted))
    logits = torch.arange(40.0).repeat(4, 1)
    words = torch.zeros(2, 2, dtype=torch.int32)
    words[:, 0] = 1 << 5
    before = logits.clone()
    rows = torch.arange(4)
    found = sampler.sample(logits, rows, [0, 1, 2, 3], rows * 0, allowed=Allowed(words, torch.tensor([1, 2])))
    assert found.tokens.tolist() == [39, 5, 5, 39]
    if wanted is not None:
        assert torch.equal(logits, before), "log-probabilities need the logits as they were"


def obey_beside_free_rows(model: Model, **options: Any) -> None:
    engine = engine_of(model, **options)
    names = list(SCHEMAS)
    bound = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=n, grammar=GRAMMARS[m])
        for n, m in enumerate(names)
    ]
    free = [SamplingParams(max_tokens=20, ignore_eos=True)] * 2
    done = engine.generate([PROMPT] * (len(bound) + 2), [*free, *bound])
    alone = engine.generate([PROMPT] * 2, free)
    assert [c.token_ids for c in done[:2]] == [c.token_ids for c in alone], (
        "a neighbour's grammar changes tokens"
    )
    for completion, name in zip(done[2:], names, strict=True):
        must_obey(completion, name)
    check(engine)


PLAIN: dict[str, Any] = {"kernels": True, "graphs": True, "graph_tokens": 0}
PLAIN |= dict.fromkeys(("norms", "rope", "activation", "projections"), "torch")
"""Graphs around attention and sampling by kernels: the others would only take the interpreter's time."""


def plan_of(engine: PagedEngine) -> Any:
    from cuda_graphs.runner import GraphRunner
    from structured.masked_plan import MaskedPlan

    assert isinstance(engine.runner, GraphRunner)
    return engine.runner.plan(MaskedPlan)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_masked_steps_are_two_graphs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows end before others, so a graph's masks are fewer than in the step before, at other places."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    options: dict[str, Any] = {**PLAIN, "max_rows": 4}
    letters, digits = Grammar.regex("[xyz]{9}"), Grammar.regex("[0-9]{9}")
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(max_tokens=3, grammar=letters),
        SamplingParams(max_tokens=5, temperature=1.0, seed=1, grammar=digits),
        SamplingParams(max_tokens=5, temperature=1.0, seed=2, ignore_eos=True),
    ]
    from structured.masked_graph import LogitsGraph, MaskedGraph

    captured: list[list[int]] = []
    first, rest = LogitsGraph.compute, MaskedGraph.compute
    with monkeypatch.context() as patch:
        patch.setattr(
            LogitsGraph, "compute", lambda self: captured.append(self.half.at.tolist()) or first(self)
        )
        patch.setattr(
            MaskedGraph, "compute", lambda self: captured.append(self.first.inputs[1].tolist()) or rest(self)
        )
        engine = engine_of(model, **options)
    assert all(set(at) == {-1} for at in captured), f"captured with somebody at positions {captured}"
    graphs = plan_of(engine).graphs
    assert sorted(size for size, _ in graphs) == [1, 1, 2, 2, 4, 4], f"masked graphs: {sorted(graphs)}"
    replayed: Counter[tuple[int, Any]] = Counter()
    for key, graph in graphs.items():
        replay = graph.replay
        graph.replay = lambda key=key, replay=replay: replayed.update([key]) or replay()
    found = engine.generate([PROMPT] * 4, params)
    eager = engine_of(model, **options)
    plan_of(eager).graphs.clear()
    free = cuda_graphs.load(model, **SMALL).generate([PROMPT] * 2, [params[0], params[3]])
    for one, other in zip(found, eager.generate([PROMPT] * 4, params), strict=True):
        assert one.token_ids == other.token_ids, (
            f"prompt {one.index}: {one.token_ids} from graphs, {other.token_ids} without"
        )
    for place, other in zip((0, 3), free, strict=True):
        assert found[place].token_ids == other.token_ids, (
            f"prompt {place}: a neighbour's grammar changes tokens"
        )
    for completion, allowed in zip(found[1:3], ("xyz", "0123456789"), strict=True):
        assert set(text_of(completion)) <= set(allowed), (
            f"prompt {completion.index} may write {allowed}, and yet it wrote {text_of(completion)!r}"
        )
    assert sum(replayed.values()) == 4, f"of four masked decode steps {dict(replayed)} were graphs"
    check(engine)


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
    engine.loop = TwoHalves(masks)
    for completion in engine.generate([PROMPT, [3, 1]], SamplingParams(max_tokens=5, ignore_eos=True)):
        assert all(token % 2 for token in completion.token_ids), completion.token_ids
    assert masks.filled == engine.stats.steps and masks.begun >= 4, "no mask was begun early"
    check(engine)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_next_step_is_staged_while_masks_are_made(model: Model) -> None:
    """With rows that become free, get new owners with nothing but one token to compute, and fail."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    options: dict[str, Any] = {**PLAIN, "max_rows": 7}
    options |= {"jump_forward": False, "speculate": False}
    grammars = [Grammar.regex("[xyz]{30}"), Grammar.regex("[0-9]{30}")]
    lengths = [7, 3, 6, 7, 5, 7, 7]
    prompts, late = [[10 + n, 20 + n] for n in range(len(lengths))], [[40], [41]]

    def outputs(staging: bool) -> tuple[list[list[int]], list[int]]:
        engine = engine_of(model, **options)
        plan, masks = plan_of(engine), engine.masks
        staged: list[int] = []
        if not staging:
            plan.graphs.clear()
        else:
            assert isinstance(engine.loop, TwoHalves)

            def noted(works: Sequence[Work]) -> None:
                plan.stage(works)
                if plan._staged is not None and plan._staged[0] is works:
                    staged.append(len(works))

            engine.loop.stage = noted
        requests = []
        for number, (prompt, most) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(
                max_tokens=most, temperature=number % 2, seed=number, grammar=grammars[number % 2]
            )
            masks.settle(params)
            requests += engine.add(prompt, params)
        take_failed = masks.take_failed

        def failed() -> list[tuple[Request, Exception]]:
            if len(requests[4].output_ids) == 2 and requests[4].finish_reason is None:
                return [*take_failed(), (requests[4], RuntimeError("this one"))]
            return take_failed()

        masks.take_failed = failed  # type: ignore[method-assign]
        while not engine.idle:
            engine.step()
            if requests[1].finish_reason is not None and late:
                params = SamplingParams(max_tokens=3, temperature=1.0, seed=5, grammar=grammars[0])
                requests += [one for prompt in late for one in engine.add(prompt, params)]
                late.clear()
        check(engine)
        late.extend([40 + n] for n in range(2))
        assert [r.finish_reason for r in requests] == ["length"] * 4 + ["error"] + ["length"] * 4
        return [request.output_ids for request in requests], staged

    (found, staged), (wanted, _) = outputs(True), outputs(False)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one == other, f"request {number}: {one} where steps are staged early, else {other}"
    assert len(staged) >= 3, f"steps that were staged early, by requests: {staged}"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_masked_steps_that_a_graph_cannot_sample(model: Model) -> None:
    """Log-probabilities and top-k are sampled eagerly, from what the first graph leaves."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    letters = Grammar.regex("[a-z]{9}")
    params = [
        SamplingParams(max_tokens=3, grammar=letters, logprobs=1),
        SamplingParams(max_tokens=3, temperature=2.0, top_k=2, seed=3, grammar=letters),
    ]
    for one in params:
        engine = engine_of(model, **PLAIN, max_rows=1)
        (found,) = engine.generate([PROMPT], [one])
        (wanted,) = engine_of(model).generate([PROMPT], [one])
        said = f"top_k {one.top_k}, logprobs {one.logprobs}"
        assert found.token_ids == wanted.token_ids, (
            f"{said}: {found.token_ids}, and without graphs {wanted.token_ids}"
        )
        assert (found.logprobs is None) == (wanted.logprobs is None), f"{said}: log-probabilities are lost"
        assert engine.runner.replays == 2, "a decode step was not replayed"  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_on_a_gpu(overlap: bool) -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    obey_beside_free_rows(model, overlap=overlap, kernels=True, graphs=True, max_rows=16, cache_bytes=1 << 22)


def test_beside_free_rows(model: Model) -> None:
    obey_beside_free_rows(model, max_rows=16)


# Speculation.


class Guess(Watcher):
    """Drafts a fixed continuation, of which a grammar may refuse the rest."""

    def __init__(self, text: str) -> None:
        self.ids = tokenizer().encode(text)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self.ids[:most]


def test_what_is_forced_is_drafted_for_a_few_and_not_for_many() -> None:
    """Their steps have slower kernels, and everybody in them waits."""
    drafter = GrammarDrafter(most_ahead=Structured().jump_rows)
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
    engine = structured.load(model, tokenizer=tokenizer(), **{**SMALL, "speculate": False})
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
        engine = structured.load(model, tokenizer=tokenizer(), **{**SMALL, "speculate": False})
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


# Many.


def crowd(model: Model, count: int, at_once: int, **options: Any) -> None:
    rng = random.Random(7)
    names = list(SCHEMAS)
    engine = engine_of(model, max_rows=at_once, step_tokens=192, chunk_tokens=16, **options)
    params, prompts, chosen = [], [], []
    for number in range(count):
        name = rng.choice(names)
        chosen.append(name)
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(20, 80), temperature=1.0, seed=number, grammar=GRAMMARS[name]
            )
        )
        prompts.append([rng.randrange(1, 257) for _ in range(rng.randrange(1, 40))])
    done = engine.generate(prompts, params)
    for completion, name in zip(done, chosen, strict=True):
        assert completion.prompt_ids  # the index names the request
        if (
            completion.finish_reason == "length"
            and len(prompts[completion.index]) + len(completion.token_ids) >= 96
        ):
            continue
        must_obey(completion, name)
    assert sum(completion.finish_reason == "stop" for completion in done) > count / 2
    assert engine.scheduler.preemptions > 0 and engine.stats.most_running > at_once // 2
    check(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "speculating"])
def test_a_crowd_parses(model: Model, overlap: bool) -> None:
    crowd(model, 60, 12, overlap=overlap, cache_bytes=blocks(model, 90))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "speculating"])
def test_a_thousand_parse(model: Model, overlap: bool) -> None:
    crowd(model, 1000, 64, overlap=overlap, cache_bytes=blocks(model, 260))

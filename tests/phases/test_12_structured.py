"""Grammars in an engine: every output parses, whatever else happens to its request."""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cuda_graphs
import forward
import structured
from common.errors import UserError
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from continuous.engine import MOST_LOOKS
from continuous.work import Work
from forward.model import Model
from paged_cache import PagedEngine
from phases import phase_named
from phases.commands.grammars import check_grammar, chosen_grammar, show_trace
from structured.automata.backend import AutomataMatcher
from structured.masks import AutomataGrammarManager
from tests.coroutines import Clock
from tests.fakes import OddOnly
from tests.hostile_grammars import hostile
from tests.schedules import check
from tests.structured_kit import (
    CROWD,
    GRAMMARS,
    PROMPT,
    SCHEMAS,
    SMALL,
    Guess,
    Make,
    Slow,
    blocks,
    computed_after_their_end,
    crowd,
    must_cut_guesses,
    must_end_its_own_step,
    must_harm_nobody,
    must_mask_every_step,
    must_match,
    must_obey,
    must_refuse,
    run,
    text_of,
    tokenizer,
)
from tests.structured_kit import equal_priority as equal_priority

pytestmark = pytest.mark.timeout(120)


def engine_of(model: Model, **options: Any) -> PagedEngine:
    """An engine with masks by the automata, which other tests may slow down."""
    return structured.load(
        model, tokenizer=tokenizer(), **{**SMALL, "grammar_seconds": 60.0, **options}
    )


@pytest.fixture
def make() -> Make:
    return engine_of


@pytest.fixture(scope="module")
def engine(model: Model) -> PagedEngine:
    return engine_of(model)


@pytest.fixture
def schemas() -> Mapping[str, Any]:
    return SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_greedy_and_sampled_outputs_obey(
    model: Model, make: Make, schemas: Mapping[str, Any], name: str, overlap: bool
) -> None:
    engine, grammar = make(model, overlap=overlap), Grammar.json_schema(schemas[name])
    params = [SamplingParams(max_tokens=60, grammar=grammar)]
    params += [
        SamplingParams(max_tokens=60, temperature=1.0, seed=s, grammar=grammar)
        for s in range(4)
    ]
    for completion in engine.generate([PROMPT] * len(params), params):
        must_obey(completion, name, schemas)
    check(engine)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex("(ab|c)+d"), "(ab|c)+d"),
        (Grammar.choice(["yes", "no", "maybe é"]), "yes|no|maybe é"),
    ],
    ids=["regex", "choice"],
)
def test_other_kinds(engine: PagedEngine, grammar: Grammar, pattern: str) -> None:
    must_match(engine, grammar, pattern)


def test_rows_without_a_grammar_are_as_ever(model: Model, engine: PagedEngine) -> None:
    free = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(
            max_tokens=9, temperature=1.0, top_k=9, seed=4, logprobs=2, repetition_penalty=1.2
        ),
    ]
    plain = cuda_graphs.load(model, **SMALL).generate([PROMPT] * 3, free)
    bound = SamplingParams(max_tokens=20, temperature=1.0, seed=2, grammar=GRAMMARS["person"])
    found = engine.generate(
        [PROMPT] * 6, [one for settings in free for one in (settings, bound)]
    )[::2]
    for left, right in zip(plain, found, strict=True):
        assert left.token_ids == right.token_ids, "a neighbour's grammar changes tokens"
        for one, other in zip(left.logprobs or [], right.logprobs or [], strict=True):
            assert one.chosen == pytest.approx(other.chosen, abs=1e-4)


def test_logprobs_are_raw(engine: PagedEngine) -> None:
    ask = SamplingParams(max_tokens=1, logprobs=20)
    free, bound = engine.generate(
        [PROMPT] * 2, [ask, replace(ask, grammar=Grammar.regex("~x"))]
    )
    assert free.logprobs and bound.logprobs
    assert bound.logprobs[0].top == free.logprobs[0].top, (
        "log-probabilities are those of the mask"
    )
    assert bound.token_ids != free.token_ids


def test_penalties_bias_and_truncation_stay_inside(engine: PagedEngine) -> None:
    digits = [tokenizer().encode(d)[0] for d in "0123456789"]
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 2.0, "presence_penalty": 2.0},
        {"temperature": 3.0, "top_k": 2, "top_p": 0.5, "min_p": 0.2, "seed": 1},
        {"logit_bias": dict.fromkeys(digits, -100.0), "temperature": 1.0},
        {"frequency_penalty": 2.0, "temperature": 1.0, "logprobs": 3, "seed": 2},
    ]
    params = [
        SamplingParams(max_tokens=40, grammar=Grammar.regex("[0-9]{30}"), **one)
        for one in settings
    ]
    for completion in engine.generate([PROMPT] * 4, params):
        assert re.fullmatch("[0-9]{30}", text_of(completion)), (
            f"{completion.index}: {text_of(completion)!r}"
        )
        assert completion.finish_reason == "stop"


def test_min_tokens_lengthens_as_far_as_the_grammar_goes(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = engine.grammar_manager.fill_bitmask

    def filled(works: Sequence[Work]) -> Any:
        allowed = fill(works)
        if allowed is not None and not any(
            work.drafts for work in works
        ):  # behind an end there is nothing
            assert allowed.words.any(1).all(), "a mask allows nothing at all"
        return allowed

    monkeypatch.setattr(engine.grammar_manager, "fill_bitmask", filled)
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
    assert long.finish_reason == "stop" and len(long.token_ids) > 20, (
        "the end came before min_tokens"
    )
    assert short.finish_reason == "stop" and len(short.token_ids) < 20, (
        "min_tokens beat the grammar's end"
    )
    assert endless.finish_reason == "length" and len(endless.token_ids) == 24
    assert done.finish_reason == "stop" and text_of(done) == "xab", (
        "ignore_eos beat the grammar's end"
    )
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("guessed", ["", "aaaa"])
def test_min_tokens_forbids_the_end_for_so_many_tokens_and_no_longer(
    model: Model, guessed: str
) -> None:
    """The end is likelier than all else, and then an a: which is drafted, or not."""
    engine = engine_of(model, overlap=False)
    if guessed:
        engine.scheduler.drafter = Guess(guessed)
    (a,), (end, *_) = tokenizer().encode("a"), engine.config.eos_token_ids
    bias, grammar = {a: 50.0, end: 100.0}, Grammar.regex("[ab]*")
    params = [
        SamplingParams(max_tokens=20, min_tokens=least, logit_bias=bias, grammar=grammar)
        for least in (0, 1, 4, 7)
    ]
    for completion, given in zip(engine.generate([PROMPT] * 4, params), params, strict=True):
        assert completion.token_ids == [a] * given.min_tokens + [end], (
            f"request {completion.index}, drafts {guessed!r}: with min_tokens {given.min_tokens} "
            f"the end came after {len(completion.token_ids) - 1} tokens"
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_goes_on_the_request_fails(
    model: Model, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A vocabulary may lack a byte: then a forbidden token would be drawn, or the end of the text."""
    engine = engine_of(model)
    fill, calls = AutomataMatcher.fill, []

    def never_the_third(matcher: Any, words: Any) -> None:
        fill(matcher, words)
        calls.append(matcher)
        if len(calls) > 2:
            words[:] = 0

    monkeypatch.setattr(AutomataMatcher, "fill", never_the_third)
    params = SamplingParams(max_tokens=9, grammar=Grammar.regex("[ab]{5}"))
    (request,) = engine.add(PROMPT, replace(params, temperature=temperature))
    while not engine.idle:
        engine.step()
    assert request.finish_reason == "error" and "no token" in str(request.error)
    assert len(request.output_ids) == 2, (
        f"request 0: token {request.output_ids[2:]} is not in its grammar"
    )


def test_a_cut_says_so_and_a_stop_string_stops(engine: PagedEngine) -> None:
    grammar = Grammar.regex("a{50}")
    (cut,) = engine.generate([PROMPT], SamplingParams(max_tokens=7, grammar=grammar))
    assert cut.finish_reason == "length" and set(text_of(cut)) == {"a"}
    (stopped,) = engine.generate(
        [PROMPT], SamplingParams(max_tokens=40, grammar=grammar, stop=("aaaa",))
    )
    assert stopped.finish_reason == "stop" and len(text_of(stopped)) < 10
    (none,) = engine.generate([PROMPT], SamplingParams(max_tokens=0, grammar=grammar))
    assert none.finish_reason == "length" and none.token_ids == []


def test_samples_have_places_of_their_own(engine: PagedEngine) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=1.5, seed=1, n=5, grammar=GRAMMARS["person"]
    )
    done = engine.generate([PROMPT, [9, 9]], params)
    assert len({text_of(completion) for completion in done}) > 1
    for completion in done:
        must_obey(completion, "person")
    check(engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "in turn"])
def test_preemption_loses_no_place(
    model: Model, make: Make, schemas: Mapping[str, Any], overlap: bool
) -> None:
    tight = make(model, overlap=overlap, cache_bytes=blocks(model, 18))
    params = [
        SamplingParams(
            max_tokens=40, temperature=1.0, seed=seed, grammar=Grammar.json_schema(schema)
        )
        for seed, schema in enumerate([*schemas.values()] * 2)
    ]
    prompts = [[seed + 1, 2, 3] for seed in range(len(params))]
    left, right = (
        engine.generate(prompts, params) for engine in (make(model, overlap=overlap), tight)
    )
    assert tight.scheduler.preemptions > 0, "nobody was preempted: the test shows nothing"
    assert [c.token_ids for c in left] == [c.token_ids for c in right]
    check(tight)


def test_a_request_waits_for_its_grammar_and_nobody_else_does(
    model: Model, make: Make
) -> None:
    engine = make(model, grammar_seconds=60.0)
    slow = Slow(engine)
    (waits,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("slow")))
    (quick,) = engine.add(PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("quick")))
    (free,) = engine.add(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    while free.finish_reason is None or quick.finish_reason is None:
        engine.step()
    assert waits.first_token is None, "nothing was held back"
    slow.go.set()
    run(engine)
    assert (
        waits.finish_reason == "stop" and tokenizer().decode(waits.output_ids[:-1]) == "slow"
    )
    check(engine)


def test_everybody_who_waits_is_asked_again(model: Model) -> None:
    """More than a step looks at: each is asked as often as any other, and no step asks them all."""
    engine = engine_of(model)
    asked: Counter[Request] = Counter()

    def never(request: Request) -> bool:
        asked[request] += 1
        return False

    engine.grammar_manager.ready = never  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=3, grammar=Grammar.regex("abc"))
    requests = [
        request for _ in range(MOST_LOOKS + 6) for request in engine.add(PROMPT, params)
    ]
    engine.step()
    asked.clear()
    for step in range(1, 4):
        engine.step()
        assert sum(asked.values()) <= step * MOST_LOOKS, (
            f"{sum(asked.values())} looks in {step} steps"
        )
    for number, request in enumerate(requests):
        assert asked[request] in (2, 3), (
            f"request {number} was asked {asked[request]} times in three steps"
        )
    for request in requests:
        engine.abort(request)
    run(engine)
    check(engine)


def test_a_refused_grammar_keeps_no_request(engine: PagedEngine) -> None:
    """One error is raised for all who ask; the frames of each raise would stay in its traceback."""
    manager = engine.grammar_manager
    assert isinstance(manager, AutomataGrammarManager)
    entry = manager.pool.ask(Grammar.regex("a("))
    depths = set()
    for _ in range(3):
        with pytest.raises(UserError):
            entry.wait()
        error = entry.future.exception()
        assert error is not None
        depths.add(len([*traceback.walk_tb(error.__traceback__)]))
    assert len(depths) == 1, f"the traceback has grown to {max(depths)} frames"


def test_what_takes_too_long_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, grammar_seconds=0.5)
    slow, clock = Slow(engine), Clock()
    params = [
        SamplingParams(max_tokens=9, grammar=Grammar.regex(w)) for w in ("slow", "quick")
    ]
    with monkeypatch.context() as patch:
        patch.setattr("structured.pool.processor_clock", lambda: clock)
        late, other = (engine.add(PROMPT, each)[0] for each in params)
        while other.finish_reason is None:
            engine.step()
        clock.now = 0.6
        run(engine)
    assert (
        late.finish_reason == "error"
        and "longer to compile than grammar_seconds, 0.5" in str(late.error)
    )
    assert isinstance(late.error, UserError) and other.finish_reason == "stop"
    with pytest.raises(UserError, match="takes longer"):
        engine.generate([PROMPT], SamplingParams(grammar=Grammar.regex("slower")))
    assert engine.idle
    slow.go.set()


def test_what_others_compute_is_not_held_against_a_grammar(model: Model) -> None:
    """Nor what a thread waits for: a busy machine is no fault of a grammar."""
    engine = engine_of(model, grammar_seconds=0.5)
    slow = Slow(engine)
    (request,) = engine.add(
        PROMPT, SamplingParams(max_tokens=9, grammar=Grammar.regex("slow"))
    )
    end = time.monotonic() + 0.8
    while time.monotonic() < end:
        engine.step()
    slow.go.set()
    run(engine)
    assert request.finish_reason == "stop"


def test_aborted_while_it_waits(model: Model) -> None:
    engine = engine_of(model)
    slow = Slow(engine)
    requests = engine.add(
        PROMPT, SamplingParams(max_tokens=9, n=3, grammar=Grammar.regex("slow"))
    )
    engine.step()
    engine.abort(requests[0])
    engine.abort(requests[2])
    engine.step()
    slow.go.set()
    run(engine)
    assert [request.finish_reason for request in requests] == ["abort", "stop", "abort"]
    check(engine)


WRONG = {
    "a regex": (Grammar.regex("a("), "is refused"),
    "a type": (Grammar.json_schema({"type": "wat"}), "'wat' is no type"),
    "a keyword": (
        Grammar.json_schema({"type": "object", "unevaluatedProperties": False}),
        "is not known here",
    ),
    "a reference": (Grammar.json_schema({"$ref": "#/$defs/none"}), "is refused"),
    "a grammar": (Grammar.lark("start: 'a'"), "know no Lark grammars"),
    "an empty language": (Grammar.regex(r"a[^\s\S]"), "has no output that ever ends$"),
    "a circle": (Grammar.json_schema({"$ref": "#"}), "has no output that ever ends$"),
}


@pytest.mark.parametrize(("grammar", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_grammars(engine: PagedEngine, grammar: Grammar, says: str) -> None:
    must_refuse(engine, grammar, says)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.regex(""), "is empty"),
        (lambda: Grammar.regex("a" * 300_000), "has 300,000 characters"),
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema([]), "must be a JSON object"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema('{"a":' * 200 + "1" + "}" * 200), "nests deeper than 128"),
        (lambda: Grammar.json_schema({"a": {"b": dict.fromkeys(map(str, range(3000)), 1)}}), "3,000 keys"),
        (lambda: Grammar.choice("abc"), "must be a list"),
        (lambda: Grammar.regex(5), "must be a string"),  # type: ignore[arg-type]
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


def test_engines_that_take_none(model: Model) -> None:
    grammar = SamplingParams(grammar=Grammar.regex("a"))
    for engine in (forward.load(model), cuda_graphs.load(model, **SMALL)):
        with pytest.raises(
            UserError, match="grammar is set, but must be None for an engine that masks no"
        ):
            list(engine.stream([PROMPT], grammar))
    without = structured.load(model, **SMALL)
    with pytest.raises(UserError, match="must be None for an engine that has no tokenizer"):
        without.add(PROMPT, grammar)
    with pytest.raises(UserError, match="masks no tokens"):
        structured.load(model, structured=False, **SMALL).add(PROMPT, grammar)


def test_a_grammar_that_fails_midway_ends_its_own_request(model: Model, make: Make) -> None:
    for overlap in (True, False):
        engine = make(model, overlap=overlap, speculate=False)
        late = computed_after_their_end(engine)
        (bad,) = engine.add(
            PROMPT, SamplingParams(max_tokens=20, min_tokens=15, grammar=Grammar.regex("a+"))
        )
        # As many as it takes for masks to be made by threads, where there are threads.
        letters = Grammar.regex("[bc]{9}")
        params = SamplingParams(max_tokens=20, temperature=1.0, n=5, seed=2, grammar=letters)
        goods = engine.add(PROMPT, params)
        for _ in range(200):
            engine.step()
            if len(bad.output_ids) >= 3:
                break
        if overlap:  # the matcher has seen the last token already
            bad.constraint.count = lambda new, count: "it is not in the grammar"  # type: ignore[union-attr]
        else:
            bad.tokens[-1] = tokenizer().encode("z")[0]  # as if the sampler had gone wrong
        run(engine)
        assert bad.finish_reason == "error" and "is not in the grammar" in str(bad.error), (
            bad.error
        )
        for good in goods:
            text = tokenizer().decode(good.output_ids[:-1])
            assert good.finish_reason == "stop" and re.fullmatch("[bc]{9}", text), (
                f"{good.id}: {text!r}"
            )
        assert not late, f"requests {late} are computed in rows that they have given back"
        check(engine)


def test_masks_that_cannot_be_made_end_their_own_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_end_its_own_step(
        engine_of(model, speculate=False), monkeypatch, structured.masks, "forbidden_ends"
    )


def test_grammars_are_compiled_once_and_forgotten_in_order(model: Model) -> None:
    engine = engine_of(model, grammar_cache_bytes=14_000)  # three of these
    pool = engine.grammar_manager.pool  # type: ignore[attr-defined]

    def serve(patterns: str) -> None:
        for pattern in patterns:
            engine.generate(
                [PROMPT] * 2, SamplingParams(max_tokens=4, grammar=Grammar.regex(pattern))
            )
            assert pool.bytes <= 14_000

    serve("abaa")
    assert pool.compiled == 2
    serve("cd")
    assert pool.compiled == 4
    serve("acd")
    assert pool.compiled == 4, "a was used after b, and yet a is forgotten"
    serve("b")
    assert pool.compiled == 5, "b was forgotten, and yet it is not compiled again"


NAMES = (
    "counts",
    "counts of counts",
    "catastrophic",
    "blow-up",
    "deep",
    "many strings",
    "no base",
    "itself",
)
HOSTILE: dict[str, Grammar] = {name: hostile()[name]() for name in NAMES}
HOSTILE["wide"] = Grammar.json_schema(
    {"type": "object", "properties": {f"p{n}": True for n in range(2000)}}
)


def test_hostile_grammars_harm_nobody(model: Model, make: Make) -> None:
    must_harm_nobody(make(model, max_rows=16), HOSTILE)


def test_masked_steps_overlap(model: Model) -> None:
    must_mask_every_step(model, OddOnly(model.config.vocab_size))


@pytest.mark.parametrize("text", ["abab", "ccc", "zzz", "abzz", "d"])
def test_guesses_of_another_drafter_are_cut_where_the_grammar_says(
    model: Model, text: str
) -> None:
    engine = engine_of(model, overlap=False)
    engine.scheduler.drafter = Guess(text)
    must_cut_guesses(engine_of(model, overlap=False), engine)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "speculating"])
def test_a_crowd_parses(
    model: Model, make: Make, schemas: Mapping[str, Any], overlap: bool
) -> None:
    crowd(make(model, **CROWD, overlap=overlap, cache_bytes=blocks(model, 90)), 60, schemas)


# On the command line.


SCHEMA = '{"type": "boolean"}'


def test_each_flag_makes_its_grammar(tmp_path: Path) -> None:
    schema, rules = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text("\ufeff" + SCHEMA, encoding="utf-8")
    rules.write_text('start: "a"', encoding="utf-8")
    assert chosen_grammar(None, None, None, None) is None
    assert chosen_grammar(schema, None, None, None) == Grammar.json_schema(SCHEMA)
    assert chosen_grammar(None, "a+", None, None) == Grammar.regex("a+")
    assert chosen_grammar(None, None, "yes,no", None) == Grammar.choice(["yes", "no"])
    assert chosen_grammar(None, None, None, rules) == Grammar.lark('start: "a"')


def test_wrong_flags(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    binary = tmp_path / "b.json"
    empty = tmp_path / "e.json"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("")
    for schema, regex, choice, says in (
        (None, "a", "b", "--regex and --choice are both given"),
        (missing, None, None, r"--json-schema .*none.json cannot be read: No such file"),
        (binary, None, None, "is not UTF-8 text"),
        (empty, None, None, "is empty"),
        (None, None, "a,,b", "holds ''"),
    ):
        with pytest.raises(UserError, match=says):
            chosen_grammar(schema, regex, choice, None)


def test_phases_before_have_none() -> None:
    bound, this = SamplingParams(grammar=Grammar.regex("a")), phase_named("12")
    with pytest.raises(
        UserError, match="a grammar is for phases from 12 on, but the phase is 09"
    ):
        check_grammar(phase_named("09"), bound, False, 1)
    with pytest.raises(UserError, match="--trace shows a grammar's masks"):
        check_grammar(this, SamplingParams(), True, 1)
    with pytest.raises(UserError, match="shows one prompt, but there are 2"):
        check_grammar(this, bound, True, 2)
    check_grammar(this, bound, True, 1)


@pytest.mark.parametrize(
    ("most", "ends"), [(9, "the grammar is satisfied"), (2, "may be incomplete")]
)
def test_the_trace_counts_what_was_allowed(
    most: int, ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = forward.load_model("random:tiny", device="cpu", dtype="float32")
    engine = structured.load(model, tokenizer=tokenizer(), max_rows=2, max_len=64)
    code = show_trace(
        engine,
        tokenizer(),
        [5, 6],
        SamplingParams(max_tokens=most, grammar=Grammar.regex("[ac]dez")),
    )
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert code == 0 and ends in shown.err
    assert lines[0].startswith("step") and lines[1].split()[:2] == ["1", "2"], lines
    assert lines[2].split()[:3] == ["2", "1", "'d'"], lines
    assert len(lines) == 1 + (5 if most == 9 else 2)

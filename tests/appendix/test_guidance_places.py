"""Places in a schema: outputs of the same place have the same mask, and it is made once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest

from common.sampling.grammar import Grammar
from phases.appendix.guidance import places
from phases.appendix.guidance.matcher import Job
from phases.appendix.guidance.places import PlacedOutput, Schema, Tokens
from structured.matcher import Matcher
from tests.guidance_kit import SCHEMAS, vocabulary
from tests.structured_kit import EOS, bits

pytestmark = pytest.mark.timeout(120)


def text(low: int = 0, high: int | None = None) -> dict[str, Any]:
    return {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = record(name=text(0, 5), age={"type": "integer", "maximum": 150}, city=text(1, 4))
MANY: dict[str, Any] = {
    **SCHEMAS,
    "records": {"type": "array", "items": PERSON, "minItems": 20},
    "short strings": {"type": "array", "items": text(1, 3), "minItems": 2, "maxItems": 4},
    "optional strings": {
        "type": "object",
        "properties": {"a": text(0, 5), "ab": text(3, 4), 'a"': text(0, 2)},
        "additionalProperties": False,
    },
    "other keys": {"type": "object", "properties": {"a": text(0, 5)}, "required": ["a"]},
    "lists of lists": {
        "type": "array",
        "items": {"type": "array", "items": text(2, 4), "maxItems": 2},
        "maxItems": 3,
    },
    "recursive": {
        "$ref": "#/$defs/a~1b",
        "$defs": {"a/b": record(v=text(0, 4), k={"type": "array", "items": {"$ref": "#/$defs/a~1b"}})},
    },
    "partly unknown": record(
        x={"anyOf": [text(0, 4), {"type": "null"}]},
        y=text(0, 6),
        p={"type": "string", "pattern": "^[a-f]{2,9}$"},
        z={"type": "object"},
        t=text(1, 7),
    ),
}


def walk(backend: Any, compiled: Any, seed: int, rows: int, steps: int) -> int:
    """Outputs drawn from masks that may be kept, of themselves or of each other; each is to be the library's.

    Returns how often one had a place.
    """
    known = vocabulary()
    quotes = {token for token, spelled in enumerate(known.tokens) if b'"' in spelled}
    words, wanted = np.zeros((rows, known.words), np.int32), np.zeros(known.words, np.int32)
    placed, rng = 0, random.Random(seed)
    running = {row: compiled.matcher() for row in range(rows)}
    read = dict.fromkeys(running, b"")
    for _ in range(steps):
        words[:] = -1
        backend.fill([Job(matcher, row, ()) for row, matcher in running.items()], words)
        moves: list[tuple[Matcher, Sequence[int]]] = []
        for row, matcher in list(running.items()):
            matcher.inner.unsafe_compute_mask_ptr(wanted.ctypes.data, wanted.nbytes)
            found, right = (set(bits(one, len(known.tokens))) for one in (words[row], wanted))
            assert found == right, (
                f"output {row} of seed {seed} behind {read[row]!r}: these tokens are in one mask only: "
                f"{sorted(known.tokens[token] for token in found ^ right)[:8]}"
            )
            placed += matcher.output is not None and matcher.output.place is not None
            some = sorted(found & quotes) if rng.random() < 0.3 else []
            token = rng.choice(some or sorted(found))
            if token == EOS:
                del running[row]
                continue
            moves.append((matcher, (token,)))
            read[row] += known.tokens[token]
            if rng.random() < 0.2:  # there and back
                assert matcher.advance((token,)) == 1
                matcher.rollback(1)
        assert backend.advance(moves) == [1] * len(moves), f"seed {seed}: a mask allows what is refused"
    return placed


@pytest.mark.parametrize("name", MANY)
def test_every_mask_is_the_librarys(name: str) -> None:
    pytest.importorskip("llguidance")
    from phases.appendix.guidance.backend import GuidanceBackend

    backend = GuidanceBackend(vocabulary())
    compiled = backend.compile(Grammar.json_schema(MANY[name]))
    placed = sum(walk(backend, compiled, seed, 6, 48) for seed in range(4))
    if name not in SCHEMAS:
        assert placed > 20, f"of all outputs' steps {placed} had a place"


def some_schema(rng: random.Random, depth: int = 0) -> Any:
    """Strings in lists and objects, mostly, with limits that are met soon."""
    kind = rng.random()
    if kind < 0.5 or depth > 3:
        low = rng.choice([0, 0, 0, 1, 3])
        return text(low, low + rng.randrange(6)) | ({"pattern": "^[a-c]*$"} if rng.random() < 0.1 else {})
    if kind < 0.7:
        low = rng.randrange(3)
        limits = {"minItems": low} | ({"maxItems": low + rng.randrange(4)} if rng.random() < 0.6 else {})
        return {"type": "array", "items": some_schema(rng, depth + 1)} | limits
    if kind < 0.9:
        names = rng.sample(["a", "ab", 'a"', "b\\", "é", "/~x", ""], rng.randrange(1, 4))
        keys = record(**{name: some_schema(rng, depth + 1) for name in names})
        return keys | {"required": names[::2], "additionalProperties": rng.random() < 0.3}
    other: list[Any] = [{"enum": ["ab", 1]}, {"anyOf": [text(0, 3), {"type": "null"}]}, True, {"const": "ab"}]
    return rng.choice(other)


def test_every_mask_is_the_librarys_whatever_the_schema() -> None:
    pytest.importorskip("llguidance")
    from phases.appendix.guidance.backend import GuidanceBackend

    backend = GuidanceBackend(vocabulary())
    placed = 0
    for seed in range(400):
        compiled = backend.compile(Grammar.json_schema(some_schema(random.Random(seed))))
        placed += walk(backend, compiled, seed, 4, 20)
    assert placed > 1000, f"of all outputs' steps {placed} had a place"


def behind(schema: Any, *texts: Sequence[str | bytes]) -> list[PlacedOutput]:
    """Outputs of one schema, each of which has read these pieces, a token each."""
    read = [[piece.encode() if isinstance(piece, str) else piece for piece in pieces] for pieces in texts]
    tokens = [*dict.fromkeys(chain.from_iterable(read)), b" " * 8]
    whole = Schema(json.dumps(schema), Tokens(tokens))
    outputs = [PlacedOutput(whole) for _ in read]
    for output, pieces in zip(outputs, read, strict=True):
        for piece in pieces:
            output.advance(tokens.index(piece))
    return outputs


def listed(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT = text(0, 6)
PAIR = record(n=True, s=TEXT)
TWO = record(a=TEXT, b=TEXT)
LIST = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 12}
LONG = LIST | {"maxItems": 99}
OPEN = {"type": "object", "properties": {"a": TEXT, "b": TEXT}}
ALIKE = record(**{"a": TEXT, "ab": TEXT, 'a"': TEXT})


@pytest.mark.parametrize(
    ("schema", "one", "other", "same"),
    [
        pytest.param(TEXT, ['"', "abc"], ['"', "xyz"], True, id="which characters"),
        pytest.param(TEXT, ['"', "ab", "c"], ['"', "abc"], True, id="in how many tokens"),
        pytest.param(TEXT, ['"ab'], ['"', "ab"], True, id="where tokens end"),
        pytest.param(TEXT, ['"', "ab"], ['"', "abc"], False, id="how many may follow"),
        pytest.param(text(4, 9), ['"', "ab"], ['"', "abc"], False, id="how many must follow"),
        pytest.param(text(0, 99), ['"', "ab"], ['"', "ab"], None, id="far from the end"),
        pytest.param(text(), ['"', "ab"], ['"', "ab"], None, id="without an end"),
        pytest.param(TEXT, ['"', "é"], ['"', "e"], True, id="a character of two bytes is one"),
        pytest.param(TEXT, ['"', b"\xc3", b"\xa9"], ['"', "e"], True, id="in two tokens, too"),
        pytest.param(TEXT, ['"', "🎉", "中"], ['"', "ab"], True, id="of three and four bytes"),
        pytest.param(TEXT, ['"', b"a\xc3"], ['"', b"b\xc3"], None, id="within a character"),
        pytest.param(TEXT, ['"', "\\"], ['"', "\\"], None, id="behind a backslash"),
        pytest.param(TEXT, ['"', "\\n", "a"], ['"', "ab"], None, id="behind an escape"),
        pytest.param(TWO, ['{"a":"', "x", '","b":"'], ['{"a":"', "xyz", '","b":"'], True, id="what was said"),
        pytest.param(TWO, ['{"a":"', '\\"', '","b":"'], ['{"a":"","b":"'], True, id="even with a quote"),
        pytest.param(TWO, ['{"a":"', "x"], ['{"a":"","b":"', "x"], False, id="under which key"),
        pytest.param(TWO, ['{\n "a" : "x"'], ['{"a":"', 'x"'], None, id="no string"),
        pytest.param(TWO, ['{\n "a" : "x', '" ,\t"b": "'], ['{"a":"', '","b":"'], True, id="white space"),
        pytest.param(OPEN, ['{"b":"'], ['{"a":"","b":"'], False, id="which keys were there"),
        pytest.param(OPEN, ['{"c":"'], ['{"c":"'], None, id="a key of which nothing is known"),
        pytest.param(OPEN, ['{"c":"","a":"'], ['{"a":"'], None, id="and what follows it"),
        pytest.param({"type": "array", "items": OPEN | {"required": ["a"]} | {"properties": {"b": TEXT,
            "a": TEXT}}}, ['[{"c":[{"a":"]}\\"}"}]},{"a":"'], ['[{"a":"1"},{"a":"'], True,
            id="up to the end of its object"),
        pytest.param(listed(OPEN), ['[{"c\\"":1', '},{"a":"'], ['[{},{"a":"'], True, id="a quote in it"),
        pytest.param(ALIKE, ['{"a":"'], ['{"ab":"'], False, id="a key that begins like another"),
        pytest.param(ALIKE, ['{"a":"'], ['{"a\\"":"'], False, id="even with a quote in it"),
        pytest.param(LIST, ['["', "a"], ['["', '","', "a"], False, id="how many items must come"),
        pytest.param(LONG, ['["","","'], ['["","","","'], True, id="items enough, and not too many"),
        pytest.param(LIST, ['["","","","","","","","","","","'], ['["","","","","","","","","'], False,
            id="near"),
        pytest.param(listed(LIST), ['[["",""],["'], ['[["'], True, id="each list anew"),
        pytest.param(listed(LIST) | {"minItems": 3}, ['[[""', ',""]', ',["'], ['[["",""', "]", ',["'], True,
            id="a token that ends a list counts for that alone"),
        pytest.param(listed(LIST) | {"minItems": 3}, ['[["",""],["'], ['[["'], False,
            id="lists are counted, too"),
        pytest.param(listed(PAIR), ['[{"n":12', ',"s":"'], ['[{"n":[1]', ',"s":"'], True,
            id="numbers, or lists"),
    ],
)  # fmt: skip
def test_what_makes_a_place(
    schema: Any, one: Sequence[str | bytes], other: Sequence[str | bytes], same: bool | None
) -> None:
    left, right = (output.place for output in behind(schema, one, other))
    found = None if left is None or right is None else left is right
    words = {True: "the same place", False: "different places", None: "no place for one of them"}
    assert found is same, f"behind {one} and {other}: {words[found]}, not {words[same]}"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        text(),
        {"type": "integer", "maxLength": 3},
        {"type": ["string", "null"]},
        {"anyOf": [TEXT, TEXT]},
        TEXT | {"pattern": "a"},
        TEXT | {"format": "date"},
        TEXT | {"minLength": 2.0},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "minLength": 2, "$defs": {"a": TEXT}},
        {"$ref": "other.json"},
        TWO | {"minProperties": 1},
        TWO | {"$id": "https://example.com/a"},
        TWO | {"$schema": "http://json-schema.org/draft-04/schema#"},
        listed(TEXT) | {"uniqueItems": True},
        {"type": "array", "prefixItems": [TEXT]},
        record(**{f"key {number}": TEXT for number in range(1000)}),
    ],
    ids=str,
)
def test_schemas_without_places(schema: Any) -> None:
    assert not Schema(json.dumps(schema), Tokens([b"a"])).has_places, "there is a place in it"


def test_tokens_are_taken_back() -> None:
    (output,) = behind(LIST, ["[", '"', "ab", '","', "a"])
    steps = [output.place]
    for piece in (2, 3, 4):
        output.advance(piece)
        steps.append(output.place)
    for taken in (2, 1, 0):
        assert output.rollback(1) and output.place is steps[taken], f"{taken} of three tokens are left"
    assert output.rollback(5) and output.state is output.schema.start, "all are taken back"
    for _ in range(places.REMEMBERED + 1):
        output.advance(0)
    assert not output.rollback(places.REMEMBERED + 1), "more is taken back than anybody remembers"


def test_states_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MOST_STATES", 50)
    letters = [bytes([letter]) for letter in b'"abcdefghij']
    schema = Schema(json.dumps(text(0, 10_000)), Tokens([*letters, b"a" * 20_000]))
    output = PlacedOutput(schema)
    for step in range(400):
        output.advance(min(step, 1))
        assert len(schema._states) <= 50, (
            f"after {step + 1} tokens {len(schema._states)} states are remembered"
        )
    assert output.state.facts.length == 399, "the output has lost its place"


class Counting:
    """Counts the masks that a backend has its library make."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        for name in ("_fill_alone", "_fill_by_threads"):
            fill = getattr(backend, name)

            def counted(unknown: Any, words: Any, fill: Any = fill) -> None:
                self.made += len(unknown.jobs)
                fill(unknown, words)

            monkeypatch.setattr(backend, name, counted)


@pytest.mark.parametrize("cores", [2, 9])
def test_a_mask_is_made_once_a_place(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    from phases.appendix.guidance.backend import GuidanceBackend

    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    known = vocabulary()
    backend = GuidanceBackend(known)
    counting = Counting(backend, monkeypatch)
    compiled = backend.compile(Grammar.json_schema(record(name=text(0, 4))))
    words = np.zeros((6, known.words), np.int32)
    letters = [known.tokens.index(letter) for letter in (b"a", b"b", b"c", b"d", b"e", b"f")]
    start = known.encode('{"name": "')
    outputs = [compiled.matcher() for _ in range(6)]
    for output in outputs:
        assert output.advance(start) == len(start)
    for count in range(1, 4):
        words[:] = 0
        backend.fill([Job(output, row, ()) for row, output in enumerate(outputs)], words)
        assert counting.made == count, f"six outputs stood in {count} places: {counting.made} masks were made"
        assert words.any(axis=1).all() and (words == words[0]).all(), (
            "outputs of one place have different masks"
        )
        backend.advance([(output, (letter,)) for output, letter in zip(outputs, letters, strict=True)])
    late = compiled.matcher()
    late.advance([*start, letters[5]])
    words[:] = 0
    assert backend.begin([Job(late, 0, ())], words[:1]) is None, "a mask that is there has to be waited for"
    assert counting.made == 3 and words[0].any(), "who comes later has its mask made again"
    draft = letters[0]
    backend.fill([Job(late, 0, (draft,))], words[:2])
    assert counting.made == 4 and (words[0] != words[1]).any(), "behind a draft stands the mask before it"


def test_masks_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    from phases.appendix.guidance import backend as llguidance

    monkeypatch.setattr(llguidance, "MOST_KEPT", 3)
    known = vocabulary()
    backend = llguidance.GuidanceBackend(known)
    output = backend.compile(Grammar.json_schema(text(0, 6))).matcher()
    words, seen = np.zeros((1, known.words), np.int32), []
    output.advance(known.encode('"ab'))
    for piece in "cdef":
        output.advance((known.tokens.index(piece.encode()),))
        backend.fill([Job(output, 0, ())], words)
        seen.append(cast(Any, output).output.place)
    assert [place.mask is not None for place in seen] == [False, True, True, True], "which masks are kept"


def test_a_mask_that_failed_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    from phases.appendix.guidance.backend import GuidanceBackend, GuidanceMatcher

    known = vocabulary()
    backend = GuidanceBackend(known)
    compiled = backend.compile(Grammar.json_schema(text(0, 12)))
    outputs = [compiled.matcher() for _ in range(4)]
    for output in outputs:
        assert output.advance(known.encode('"12345678')) > 0
    wanted = np.zeros(known.words, np.int32)
    outputs.pop().fill(wanted)
    monkeypatch.setattr(GuidanceMatcher, "problem", property(lambda self: "a limit" * (self is outputs[0])))
    words = np.zeros((3, known.words), np.int32)
    fill = GuidanceMatcher.fill

    def failing(self: Any, words: Any) -> None:
        if self is not outputs[0]:
            fill(self, words)

    monkeypatch.setattr(GuidanceMatcher, "fill", failing)
    backend.fill([Job(output, row, ()) for row, output in enumerate(outputs)], words)
    assert (words[1:] == wanted).all(), "outputs of the same place have the mask of one that has failed"
    backend.fill([Job(outputs[1], 1, ())], words)
    assert (words[1] == wanted).all(), "what failed is kept"

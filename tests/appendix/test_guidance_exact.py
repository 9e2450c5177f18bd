"""Schemas mean what they say: numbers that no double holds, keys in two spellings, days of no calendar."""

from __future__ import annotations

import calendar
import json
import re
from contextlib import suppress
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.guidance.exact import DATE, ENFORCED, exact
from structured.matcher import Backend
from tests.guidance_kit import backend_named, vocabulary
from tests.structured_kit import EOS, mask, tokenizer

BIG = 1157442765409226769


@cache
def backend(name: Any = "llguidance") -> Backend:
    return backend_named(name)(vocabulary())


def takes(schema: Any, text: str, name: str = "llguidance") -> bool:
    """Whether a text may be the whole output."""
    matcher = backend(name).compile(Grammar("json_schema", json.dumps(schema))).matcher()
    tokens = list(tokenizer().encode(text))
    return matcher.advance(tokens) == len(tokens) and EOS in mask(matcher)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"const": BIG}, "#/const"),
        ({"enum": [1, BIG]}, "#/enum"),
        ({"enum": [{"a": [BIG]}]}, "#/enum"),
        ({"type": "integer", "minimum": 2**53 + 1}, "#/minimum"),
        ({"type": "integer", "exclusiveMaximum": 2**63 - 1}, "#/exclusiveMaximum"),
        ({"properties": {"id": {"maximum": BIG}}}, "#/properties/id/maximum"),
        ({"items": {"anyOf": [{"const": -BIG}]}}, "#/items/anyOf/0/const"),
        (
            {"type": "integer", "exclusiveMinimum": 2**53},
            "#/exclusiveMinimum",
        ),  # 2**53 was taken
        (
            {"const": -(2**63)},
            "#/const",
        ),  # its magnitude is no 64-bit integer: the library ends the process
        ({"enum": [{"a": [-(2**63)]}]}, "#/enum"),
        ({"enum": [2**63]}, "#/enum"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        # What JSON escapes by number is left out by the library: "ab" was taken.
        ({"const": "a\0b"}, "#/const"),
        ({"enum": [[{"a\x7f": 1}]]}, "#/enum"),
        ({"properties": {"pattern": {"pattern": "^a\x01$"}}}, "#/properties/pattern/pattern"),
        ({"pattern": r"^(a|\x0B)+[^\x01]$"}, "#/pattern"),
        ({"pattern": r"a[\u001f]"}, "#/pattern"),
        ({"pattern": r"a\v"}, "#/pattern"),
        ({"patternProperties": {r"^a\x7F": {}}}, "#/patternProperties"),
        ({"x-guidance": {"lenient": True}, "type": "array"}, "#/x-guidance"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(schema: Any, where: str) -> None:
    with pytest.raises(UserError, match=re.escape(where)):
        takes(schema, "")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "date", "(?=b)"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(ENFORCED)), ANYTHING, max_size=4), st.booleans())
def test_a_schema_of_any_form_is_followed_or_refused(schema: Any, hint: bool) -> None:
    with suppress(ValueError):  # any other error would be one of ours: 500
        exact(schema, left=[] if hint else None)


def test_a_constant_of_a_hint_is_kept_though_it_is_null() -> None:
    for left in (None, list[str]()):
        assert exact({"const": None}, left=left) == {"const": None}, "any value is allowed"


def test_what_older_dialects_ignore_beside_a_reference_is_left_out() -> None:
    beside = {"$ref": "#/definitions/a", "maxProperties": 0, "enum": ["never"]}
    older = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": beside}}
    assert exact(older)["properties"]["x"] == {"$ref": "#/definitions/a"}
    assert exact({"properties": {"x": beside}})["properties"]["x"] == beside


def test_a_schema_inside_a_grammar_cannot_end_the_process() -> None:
    with pytest.raises(UserError, match="beyond 64 bits"):
        backend().compile(Grammar("lark", f'start: %json {{"const": {-(2**63)}}}'))


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**15, 1.5, 2**60])
def test_integers_that_doubles_hold_are_taken(number: float) -> None:
    assert takes({"const": number}, json.dumps(number))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            {"properties": {"age": {"type": "integer"}}, "required": ["age"]},
            '{"age":1,"\\u0061ge":"x"}',
        ),
        (
            {"properties": {"é": {"type": "integer"}}, "required": ["é"]},
            '{"é":1,"\\u00e9":"x"}',
        ),
        (
            {"properties": {"a\n": {"type": "integer"}}, "required": ["a\n"]},
            '{"a\\n":1,"a\\u000a":"x"}',
        ),
        ({"properties": {"a": False}}, '{"\\u0061":1}'),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061b":"x"}'),
        ({"required": ["a"], "properties": {"a": {}}, "minProperties": 2}, '{"a":1,"a":2}'),
    ],
)
def test_no_spelling_of_a_key_escapes_its_schema(schema: Any, text: str) -> None:
    schema = {"type": "object", **schema}
    assert not takes(schema, text)
    assert takes({"type": "object"}, '{"b\\n":"\\"x\\\\"}'), (
        "the five short escapes are spelled one way"
    )


DAYS = [
    (1, 31),
    (2, 28),
    (2, 29),
    (2, 30),
    (4, 30),
    (4, 31),
    (11, 31),
    (12, 31),
    (13, 1),
    (0, 1),
    (6, 0),
]


@pytest.mark.parametrize(
    "year", [1, 4, 100, 400, 1600, 1900, 1996, 2000, 2023, 2024, 2100, 9999]
)
def test_dates_are_those_of_the_calendar(year: int) -> None:
    for month, day in DAYS:
        there = 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]
        text = f"{year:04}-{month:02}-{day:02}"
        assert bool(re.fullmatch(DATE, text)) == there, text
        if year in (1900, 2000, 2023, 2024):
            assert takes({"type": "string", "format": "date"}, f'"{text}"') == there, text
            both = {"type": "string", "format": "date", "pattern": "^2"}
            assert takes(both, f'"{text}"') == (there and year >= 2000), text
            assert (
                takes({"type": "string", "format": "date-time"}, f'"{text}T10:00:00Z"')
                == there
            ), text


@pytest.mark.parametrize(
    ("clock", "there"),
    [
        ("23:59:59Z", True),
        ("10:00:00.5+02:30", True),
        ("10:00:60Z", False),
        ("24:00:00Z", False),
    ],
)
def test_a_time_has_no_leap_second_alone_or_behind_a_date(clock: str, there: bool) -> None:
    """Python's `datetime` has none, so an answer with one would not be read."""
    assert takes({"type": "string", "format": "time"}, f'"{clock}"') == there
    assert takes({"type": "string", "format": "date-time"}, f'"2024-02-29T{clock}"') == there
    both = {"type": "string", "format": "time", "pattern": "^1"}
    assert takes(both, f'"{clock}"') == (there and clock.startswith("1"))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"const": {"type": "integer"}, "format": {"const": "date"}},
        },
        {
            "properties": {"x-guidance": {"const": 1}, "pattern": {}},
            "required": ["x-guidance"],
        },
        {
            "pattern": r"^[^\u0000-\u001F]+[\u0000-\u0008a]?\u000A\u0020$",
            "enum": ['\b\f\n\r\t"\\'],
        },
    ],
    ids=["keywords", "options", "control characters"],
)
def test_what_only_looks_suspicious_stays_as_it_is(schema: Any) -> None:
    assert exact(schema) == schema


# Schemas with values at such edges, against an implementation that has no grammar.

EDGES = [0, 1, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, 2**63, -(2**63), BIG]
numbers = st.sampled_from(EDGES).flatmap(lambda edge: st.integers(edge - 2, edge + 2))
bounds = st.fixed_dictionaries(
    {"type": st.just("integer")},
    optional={
        name: numbers
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
)
schemas = st.one_of(
    bounds,
    st.builds(lambda n: {"const": n}, numbers),
    st.builds(lambda n: {"enum": n}, st.lists(numbers, min_size=1)),
)


@given(schema=schemas, value=numbers)
def test_no_invalid_number_is_taken(schema: Any, value: int) -> None:
    """A schema may be refused, by either backend; if it is not, it is followed."""
    valid = jsonschema.Draft202012Validator(schema).is_valid(value)
    for name in ("llguidance", "automata"):
        try:
            taken = takes(schema, str(value), name)
        except UserError:
            continue
        assert taken == valid, f"{name}: {value} under {schema}"


def test_masks_are_made_where_no_affinity_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # macOS has none
    backend_named("llguidance")(vocabulary())

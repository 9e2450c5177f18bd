"""Tools that are not strict: every valid value is still valid, and what is left out is named."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from phases.appendix.tools.loosen import loosen

CASES: dict[str, tuple[Any, list[str]]] = {
    "zod's record": ({"type": "object", "propertyNames": {"type": "string"}}, []),
    "names with a rule": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
    "pydantic's set": ({"properties": {"s": {"type": "array", "uniqueItems": True}}}, ["s.uniqueItems"]),
    "a format nobody knows": ({"properties": {"p": {"type": "string", "format": "cuid"}}}, ["p.format"]),
    "a lookahead": ({"properties": {"p": {"type": "string", "pattern": "^(?!a)b"}}}, ["p.pattern"]),
    "a bound of int64": ({"properties": {"n": {"type": "integer", "maximum": 2**63 - 1}}}, ["n.maximum"]),
    "a large number": ({"properties": {"n": {"const": 2**63 - 1}}}, ["n.const"]),
    "never": ({"properties": {"x": {"not": {}}}}, ["x.not"]),
    "dependencies": ({"dependencies": {"a": ["b"]}}, ["dependencies"]),
    "conditions": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"]),
    "contains": ({"properties": {"l": {"type": "array", "contains": {"const": 1}}}}, ["l.contains"]),
    "null fields": ({"required": None, "properties": {"a": {"type": "string", "default": None}}}, []),
    "annotations": ({"title": "T", "$schema": "x", "x-order": 1, "properties": {"a": {"examples": [1]}}}, []),
    "one of several": (
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"minimum": 2**60 + 1}]}}},
        ["a.oneOf.1.minimum"],
    ),
    "deep": (
        {"$defs": {"d": {"items": {"uniqueItems": True}}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
        ["$defs.d.items.uniqueItems"],
    ),
    "optional keys counted": ({"properties": {"a": {}}, "minProperties": 1}, ["minProperties"]),
}
VALUES = [
    *(
        {},
        {"a": 1},
        {"a": "x", "b": 2},
        {"s": [1, 1]},
        {"s": [1, 2]},
        {"p": "b"},
        {"p": "ab"},
        {"n": 2**63 - 1},
    ),
    *(
        {"n": 2**63},
        {"x": 1},
        {"l": [1]},
        {"l": [2]},
        {"a": [1, 1]},
        {"a": [1, 2]},
        {"a": 2**60 + 2},
        {"b": None},
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_what_was_valid_stays_valid_and_what_is_left_out_is_named(name: str) -> None:
    schema, names = CASES[name]
    made, left = loosen(schema)
    assert left == names
    strict = jsonschema.Draft202012Validator({k: v for k, v in schema.items() if v is not None})
    loose = jsonschema.Draft202012Validator(made)
    for value in VALUES:
        assert loose.is_valid(value) or not strict.is_valid(value), f"{value} is valid, and no longer taken"


def test_nothing_of_an_ordinary_schema_is_lost() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1}, "d": {"type": "string", "format": "date"}},
        "required": ["n"],
        "additionalProperties": False,
        "minProperties": 1,
    }
    assert loosen({k: v for k, v in schema.items() if k != "minProperties"}) == (
        {k: v for k, v in schema.items() if k != "minProperties"},
        [],
    )

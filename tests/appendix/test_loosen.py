"""Tools that are not strict: every valid value is still valid, and what is left out is named."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from phases.appendix.tools.loosen import loosen

CASES: dict[str, tuple[Any, list[str]]] = {
    "names with a rule": ({"type": "object", "propertyNames": {"pattern": "^a"}}, ["propertyNames"]),
    "pydantic's set": ({"properties": {"s": {"type": "array", "uniqueItems": True}}}, ["s.uniqueItems"]),
    "a format nobody knows": ({"properties": {"p": {"type": "string", "format": "cuid"}}}, ["p.format"]),
    "a lookahead": ({"properties": {"p": {"type": "string", "pattern": "^(?!a)b"}}}, ["p.pattern"]),
    "a bound of int64": ({"properties": {"n": {"type": "integer", "maximum": 2**63 - 1}}}, ["n.maximum"]),
    "never": ({"properties": {"x": {"not": {}}}}, ["x.not"]),
    "conditions": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, ["if", "then"]),
    "null fields": ({"required": None, "properties": {"a": {"type": "string", "default": None}}}, []),
    "annotations": ({"title": "T", "$schema": "x", "x-order": 1, "properties": {"a": {"examples": [1]}}}, []),
    "one of several": ({"properties": {"a": {"oneOf": [{"type": "string"}, {"minimum": 2**60 + 1}]}}},
        ["a.oneOf.1.minimum"]),
    "deep": ({"$defs": {"d": {"items": {"uniqueItems": True}}}, "properties": {"a": {"$ref": "#/$defs/d"}}},
        ["$defs.d.items.uniqueItems"]),
    "keys counted": ({"properties": {"a": {}}, "minProperties": 1}, ["minProperties"]),
}  # fmt: skip
VALUES = [
    {}, {"a": 1}, {"a": "x", "b": 2}, {"s": [1, 1]}, {"s": [1, 2]}, {"p": "b"}, {"p": "ab"}, {"n": 2**63 - 1},
    {"n": 2**63}, {"x": 1}, {"a": [1, 1]}, {"a": [1, 2]}, {"a": 2**60 + 2}, {"b": None},
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_valid_stays_valid_and_what_is_left_out_is_named(name: str) -> None:
    schema, names = CASES[name]
    made, left = loosen(schema)
    assert left == names
    strict = jsonschema.Draft202012Validator({k: v for k, v in schema.items() if v is not None})
    loose = jsonschema.Draft202012Validator(made)
    for value in VALUES:
        assert loose.is_valid(value) or not strict.is_valid(value), f"{value} is valid, and no longer taken"


def test_nothing_of_an_ordinary_schema_is_lost_and_nonsense_breaks_nothing() -> None:
    number, day = {"type": "integer", "minimum": 1}, {"type": "string", "format": "date"}
    schema = {"type": "object", "properties": {"n": number, "d": day}, "required": ["n"]}
    assert loosen(schema | {"additionalProperties": False}) == (schema | {"additionalProperties": False}, [])
    broken = {"pattern": 3, "format": [1], "patternProperties": [], "required": "a"}
    assert loosen(broken) == ({}, list(broken))

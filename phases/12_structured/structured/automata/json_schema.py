"""JSON schemas (draft 2020-12) as rules: https://json-schema.org/draft/2020-12.

Objects, arrays and references are rules that call each other; strings, numbers and literals stand where they
are used. The order of keys is that of `properties`, others come behind; a space may follow a comma or colon.
A keyword that is not known is refused by its place in the schema, a JSON pointer (RFC 6901), for to leave it
out would let wrong output pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from common.errors import UserError
from structured.automata.nodes import (
    EMPTY,
    LAST,
    Alt,
    Call,
    Cat,
    Chars,
    Members,
    Node,
    Repeat,
    complement,
    literal,
    optional,
    quoted,
)
from structured.automata.regex import parse, parse_search

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords that stand with a type at most."""
ANNOTATIONS = {
    "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
KNOWN = set().union(*OF_TYPE.values()) | ANNOTATIONS | {"type", *ALONE}

MOST_COUNT = 500
"""Of characters and items: each takes states of its own."""

SPACE = optional(literal(" "))
COMMA = Cat((literal(","), SPACE))
COLON = Cat((literal(":"), SPACE))
QUOTE = literal('"')
ANY_CHAR = Chars(((0, LAST),), quoted=True)
SIMPLE = {
    "null": literal("null"),
    "boolean": Alt((literal("true"), literal("false"))),
    "integer": parse(r"-?(0|[1-9]\d*)(\.0+)?"),  # with zeros behind the point it is one still
    "number": parse(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
}
TYPES_OF: dict[type, set[str]] = {
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    bool: {"boolean"},
}
TYPES_OF |= {type(None): {"null"}, int: {"integer", "number"}, float: {"number"}}


def rules_of(schema: Any) -> dict[str, Node]:
    """Return the rules of a schema; `start` is the output. Raises `UserError` with a JSON pointer."""
    return _SchemaReader(schema).rules


class _SchemaReader:
    """Reads a schema once; each subschema that is an object, an array or a reference becomes a rule."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, Node] = {"start": Alt(())}
        self.names: dict[str, str] = {}
        self.rules["start"] = self.value(root, "#")

    def rule(self, kind: str, schema: Any, pointer: str) -> Node:
        """Call the rule for a subschema, which is made if there is none yet."""
        key = f"{kind} {json.dumps(schema)}"
        if key not in self.names:
            name = self.names[key] = f"{kind} {pointer}"
            self.rules[name] = Alt(())  # a reference to it, while it is being made, finds it
            make = {
                "object": self.object,
                "array": self.array,
                "$ref": self.target,
                "any": self.any,
            }[kind]
            self.rules[name] = make(schema, pointer)
        return Call(self.names[key])

    def any(self, schema: Any, pointer: str) -> Node:
        """Read any value at all: one rule for all places that do not ask."""
        return Alt(tuple(self.typed(kind, {}, "any") for kind in TYPES if kind != "integer"))

    def value(self, schema: Any, pointer: str) -> Node:
        """Read any value that a schema allows."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise UserError(f"{pointer}: {schema!r} is no schema")
        for key in schema:
            if key not in KNOWN:
                raise UserError(f"{pointer}/{escape(key)}: {key} is not known here")
        asks = schema.keys() - ANNOTATIONS
        if not asks:
            return self.rule("any", {}, "any")
        for key in asks & set(ALONE):
            others = asks - {key, *(("type",) if key in ("enum", "const") else ())}
            if others:
                raise UserError(
                    f"{pointer}/{key}: {key} beside {min(others)} is not known here"
                )
        if "$ref" in asks:
            return self.rule("$ref", schema["$ref"], f"{pointer}/$ref")
        if "anyOf" in asks:
            parts = self.listed(schema, "anyOf", pointer)
            return Alt(
                tuple(self.value(part, f"{pointer}/anyOf/{n}") for n, part in enumerate(parts))
            )
        given = schema.get("type", list(TYPES))
        types = (
            {given}
            if isinstance(given, str)
            else set(given)
            if isinstance(given, list)
            else {"?"}
        )
        for wrong in types - set(TYPES):
            raise UserError(f"{pointer}/type: {wrong!r} is no type")
        if "enum" in asks or "const" in asks:
            values = (
                self.listed(schema, "enum", pointer) if "enum" in asks else [schema["const"]]
            )
            whole = [int(v) if type(v) is float and v.is_integer() else v for v in values]
            return Alt(
                tuple(constant(value) for value in whole if TYPES_OF[type(value)] & types)
            )
        types -= {"integer"} if "number" in types else set()
        return Alt(tuple(self.typed(kind, schema, pointer) for kind in TYPES if kind in types))

    def listed(self, schema: Mapping[str, Any], key: str, pointer: str) -> list[Any]:
        value = schema.get(key, [])
        if not isinstance(value, list):
            raise UserError(f"{pointer}/{key}: must be a list")
        return value

    def typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> Node:
        """Read the values of one type."""
        if kind in SIMPLE:
            return SIMPLE[kind]
        own = {key: schema[key] for key in schema if key in OF_TYPE[kind]}
        return self.string(own, pointer) if kind == "string" else self.rule(kind, own, pointer)

    def counts(
        self, schema: Mapping[str, Any], unit: str, pointer: str
    ) -> tuple[int, int | None]:
        """Read how many of a unit there must and may be at least and at most; None: no limit."""
        found: list[int | None] = []
        for key in (f"min{unit}", f"max{unit}"):
            value = schema.get(key)
            if value is not None and (
                type(value) not in (int, float) or value % 1 or value < 0
            ):
                raise UserError(f"{pointer}/{key}: {value!r} is no count")
            if value is not None and value > MOST_COUNT:
                raise UserError(f"{pointer}/{key}: {value} is more than {MOST_COUNT}")
            found.append(None if value is None else int(value))
        return found[0] or 0, found[1]

    def string(self, schema: Mapping[str, Any], pointer: str) -> Node:
        if "pattern" not in schema:
            return Cat(
                (QUOTE, _several(ANY_CHAR, *self.counts(schema, "Length", pointer)), QUOTE)
            )
        pattern, where = schema["pattern"], f"{pointer}/pattern"
        if not isinstance(pattern, str) or len(schema) > 1:
            raise UserError(f"{where}: must be a string, with no length beside it")
        return Cat((QUOTE, quoted(parse_search(pattern, where)), QUOTE))

    def array(self, schema: Mapping[str, Any], pointer: str) -> Node:
        low, high = self.counts(schema, "Items", pointer)
        item = self.value(schema.get("items", True), f"{pointer}/items")
        more = _several(
            Cat((COMMA, item)), max(low - 1, 0), None if high is None else high - 1
        )
        inside = Alt(()) if high == 0 else Cat((item, more))
        return Cat((literal("["), inside if low else optional(inside), literal("]")))

    def object(self, schema: Mapping[str, Any], pointer: str) -> Node:
        """Read an object: its `Members` between braces.

        First those of `properties`, in that order, each of which must be there if it is `required`. Then what
        else is required, in that order and once each, and must be there. Behind them may follow, any number
        of times, a member with any key but these. The value of what has no property of its own is what
        `additionalProperties` allows, by default anything. Nothing may follow where that is False.
        """
        properties, required = (
            schema.get("properties", {}),
            self.listed(schema, "required", pointer),
        )
        if not isinstance(properties, Mapping):
            raise UserError(f"{pointer}/properties: must be an object")
        others = schema.get("additionalProperties", True)
        other = self.value(others, f"{pointer}/additionalProperties")
        members: list[tuple[Node, bool]] = []
        for key, part in properties.items():
            value = self.value(part, f"{pointer}/properties/{escape(key)}")
            members.append((_member(constant(key), value), key in required))
        unnamed = [key for key in dict.fromkeys(required) if key not in properties]
        members += [(_member(constant(key), other), True) for key in unnamed]
        others_key = Cat((QUOTE, _text_but({*properties, *unnamed}), QUOTE))
        more = None if others is False else _member(others_key, other)
        return Cat((literal("{"), Members(tuple(members), COMMA, more), literal("}")))

    def target(self, reference: Any, pointer: str) -> Node:
        """Read what a local reference points to."""
        if not isinstance(reference, str) or not (
            reference == "#" or reference.startswith("#/")
        ):
            raise UserError(f"{pointer}: {reference!r} is no reference within the schema")
        found: Any = self.root
        for part in pointed(reference):
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise UserError(f"{pointer}: {reference!r} points to nothing")
        return self.value(found, reference)


def escape(key: str) -> str:
    """Spell a key as it stands in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def pointed(reference: str) -> Iterator[str]:
    """Read the keys of a pointer in a fragment: behind `#/`."""
    for part in reference.split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")


def constant(value: Any) -> Node:
    """Spell one value, its keys in the order given."""
    if isinstance(value, str):
        return Cat((QUOTE, literal(value, quoted=True), QUOTE))
    if isinstance(value, list):
        return Cat(
            (
                literal("["),
                Members(tuple((constant(v), True) for v in value), COMMA),
                literal("]"),
            )
        )
    if isinstance(value, Mapping):
        pairs = tuple((_member(constant(key), constant(v)), True) for key, v in value.items())
        return Cat((literal("{"), Members(pairs, COMMA), literal("}")))
    return literal(json.dumps(value, allow_nan=False))


def _member(key: Node, value: Node) -> Node:
    """Join a key, a colon and a value."""
    return Cat((key, COLON, value))


def _several(part: Node, low: int, high: int | None) -> Node:
    """Repeat a part; nothing at all if that cannot be."""
    return Alt(()) if high is not None and high < low else Repeat(part, low, high)


def _text_but(names: set[str]) -> Node:
    """Spell any text but these, quoted; any of them may be the beginning of another, or of a text.

    By first characters: one with which no name begins, and then anything; or one with which names begin, and
    then any text but their rests. The empty text, unless it is one of the names.
    """
    rest: dict[str, set[str]] = {}
    for name in names - {""}:
        rest.setdefault(name[0], set()).add(name[1:])
    firsts = tuple((ord(char), ord(char)) for char in rest)
    parts: list[Node] = [Cat((Chars(complement(firsts), quoted=True), Repeat(ANY_CHAR)))]
    parts += [
        Cat((literal(char, quoted=True), _text_but(behind)))
        for char, behind in sorted(rest.items())
    ]
    return Alt((*parts, *(() if "" in names else (EMPTY,))))

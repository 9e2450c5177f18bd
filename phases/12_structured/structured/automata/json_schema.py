"""JSON schemas (draft 2020-12) as rules: https://json-schema.org/draft/2020-12.

Objects, arrays and references are rules that call each other; strings, numbers and literals stand where they
are used. The order of keys is that of `properties`, others come behind; a space may follow a comma or colon.
What is not known is refused by its place in the schema, a JSON pointer, for to leave it out would let
wrong output pass. To the standard `format` is an annotation, but whoever writes one wants it: those that the
standard names are refused, and others mean nothing, like all annotations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from common.errors import UserError
from structured import pointers
from structured.automata.dfa import compile, product
from structured.automata.nodes import (
    EMPTY,
    LAST,
    Alt,
    Automaton,
    Call,
    Cat,
    Chars,
    Members,
    Node,
    Repeat,
    literal,
    optional,
    quoted,
)
from structured.automata.numbers import ANY_INTEGER, ANY_NUMBER, between, exactly
from structured.automata.regex import parse_search

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = {
    "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
KNOWN = set().union(*OF_TYPE.values()) | {"type", "enum", "const", "$ref", "anyOf"}
FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
    "uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "json-pointer",
    "relative-json-pointer", "regex",
}  # fmt: skip
HARMLESS = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Keywords with the values that ask for nothing."""

MOST_LENGTH = 500
MOST_ITEMS = 1000
MOST_RULES = 2000

SPACE = optional(Chars(((32, 32),)))
COMMA, COLON = Cat((literal(","), SPACE)), Cat((literal(":"), SPACE))
ANY_CHAR = Chars(((0, LAST),), quoted=True)
QUOTE = literal('"')
ANY_STRING = Cat((QUOTE, Repeat(ANY_CHAR), QUOTE))


def rules_of(schema: Any) -> dict[str, Node]:
    """The rules of a schema; `start` is the output. Raises `UserError`, which begins with a JSON pointer."""
    return _Reader(schema).rules


class _Reader:
    """Reads a schema once; each subschema that is an object, an array or a reference becomes a rule."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, Node] = {}
        self.names: dict[str, str] = {}
        self.rules["start"] = Alt(())
        self.rules["start"] = self.value(root, "#")

    def refuse(self, pointer: str, what: str) -> UserError:
        return UserError(f"{pointer}: {what}")

    def rule(self, kind: str, schema: Any, pointer: str) -> Node:
        """A call of the rule for a subschema, which is made if there is none yet."""
        key = f"{kind} {json.dumps(schema, sort_keys=False)}"
        if key not in self.names:
            if len(self.names) >= MOST_RULES:
                raise self.refuse(pointer, f"the schema has more than {MOST_RULES} parts")
            name = self.names[key] = f"{kind} {pointer}"
            self.rules[name] = Alt(())  # a reference to it, while it is being made, finds it
            make = {"object": self.object, "array": self.array, "$ref": self.target, "any": self.any}[kind]
            self.rules[name] = make(schema, pointer)
        return Call(self.names[key])

    def any(self, schema: Any, pointer: str) -> Node:
        """Any value at all: one rule for all who do not care."""
        return self.value(schema, pointer, inside=True)

    def value(self, schema: Any, pointer: str, *, inside: bool = False) -> Node:
        """Any value that a schema allows."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise self.refuse(pointer, f"{schema!r} is no schema")
        for key in schema:
            if key not in KNOWN and key not in ANNOTATIONS and not self.harmless(key, schema):
                raise self.refuse(f"{pointer}/{pointers.escape(key)}", f"{key} is not known here")
        asks = {key for key in set(schema) - ANNOTATIONS if not self.harmless(key, schema)}
        if schema.get("format") in FORMATS:
            asks.add("format")
        if not asks and not inside:
            return self.rule("any", {}, "any")
        for key in ("$ref", "anyOf", "enum", "const"):
            if key in asks:
                others = asks - {key, *(("type",) if key in ("enum", "const") else ())}
                if others:
                    raise self.refuse(
                        f"{pointer}/{pointers.escape(key)}", f"{key} beside {min(others)} is not known here"
                    )
        if "$ref" in asks:
            return self.rule("$ref", schema["$ref"], f"{pointer}/$ref")
        if "anyOf" in asks:
            parts = self.listed(schema, "anyOf", pointer)
            return Alt(tuple(self.value(part, f"{pointer}/anyOf/{n}") for n, part in enumerate(parts)))
        types = self.types(schema, pointer)
        if "enum" in asks or "const" in asks:
            values = self.listed(schema, "enum", pointer) if "enum" in asks else [schema["const"]]
            return Alt(tuple(constant(value) for value in values if _type_of(value) & types))
        return Alt(tuple(self.typed(kind, schema, pointer) for kind in TYPES if kind in types))

    @staticmethod
    def harmless(key: str, schema: Mapping[str, Any]) -> bool:
        """Keywords that say nothing the way they stand here."""
        return (
            (key in HARMLESS and schema[key] is HARMLESS[key])
            or (key in ("then", "else") and "if" not in schema)
            or (key in ("minContains", "maxContains") and "contains" not in schema)
        )

    def listed(self, schema: Mapping[str, Any], key: str, pointer: str) -> list[Any]:
        if not isinstance(schema[key], list):
            raise self.refuse(f"{pointer}/{key}", "must be a list")
        return list(schema[key])

    def types(self, schema: Mapping[str, Any], pointer: str) -> set[str]:
        """The types that are allowed; a number includes integers."""
        given = schema.get("type", list(TYPES))
        names = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else {"?"}
        for name in names - set(TYPES):
            raise self.refuse(f"{pointer}/type", f"{name!r} is no type")
        return names - {"integer"} if "number" in names else names

    def typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> Node:
        """The values of one type."""
        if kind == "null":
            return literal("null")
        if kind == "boolean":
            return Alt((literal("true"), literal("false")))
        if kind in ("integer", "number"):
            return self.number(kind == "integer", schema, pointer)
        if kind == "string":
            return self.string(schema, pointer)
        return self.rule(kind, {key: schema[key] for key in schema if key in OF_TYPE[kind]}, pointer)

    def count(self, schema: Mapping[str, Any], key: str, pointer: str, most: int) -> int | None:
        """A number of things; None: no limit."""
        value = schema.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
            raise self.refuse(f"{pointer}/{key}", f"{value!r} is no count")
        if value > most:
            raise self.refuse(f"{pointer}/{key}", f"{value} is more than {most}")
        return int(value)

    def string(self, schema: Mapping[str, Any], pointer: str) -> Node:
        if schema.get("format") in FORMATS:
            raise self.refuse(f"{pointer}/format", f"{schema['format']} is not known here")
        low = self.count(schema, "minLength", pointer, MOST_LENGTH) or 0
        high = self.count(schema, "maxLength", pointer, MOST_LENGTH)
        inside: Node = Repeat(ANY_CHAR, low, high)
        if high is not None and high < low:
            inside = Alt(())
        if "pattern" in schema:
            where = f"{pointer}/pattern"
            if not isinstance(schema["pattern"], str):
                raise self.refuse(where, "must be a string")
            pattern = quoted(parse_search(schema["pattern"], where))
            # Both are over the same spellings, so what they have in common is what satisfies both.
            both = low > 0 or high is not None
            inside = Automaton(_both(pattern, inside)) if both else pattern
        return Cat((QUOTE, inside, QUOTE))

    def number(self, whole: bool, schema: Mapping[str, Any], pointer: str) -> Node:
        bounds: dict[str, Fraction | None] = {}
        for key in sorted(OF_TYPE["number"]):
            value = schema.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise self.refuse(f"{pointer}/{key}", f"{value!r} is no number")
            bounds[key] = None if value is None else Fraction(repr(value))
        if all(bound is None for bound in bounds.values()):
            return ANY_INTEGER if whole else ANY_NUMBER
        low, high = bounds["minimum"], bounds["maximum"]
        above, below = bounds["exclusiveMinimum"], bounds["exclusiveMaximum"]
        open_low = above is not None and (low is None or above >= low)
        open_high = below is not None and (high is None or below <= high)
        try:
            return between(
                above if open_low else low, below if open_high else high, open_low, open_high, whole
            )
        except UserError as error:
            raise self.refuse(pointer, str(error)) from None

    def array(self, schema: Mapping[str, Any], pointer: str) -> Node:
        low = self.count(schema, "minItems", pointer, MOST_ITEMS) or 0
        high = self.count(schema, "maxItems", pointer, MOST_ITEMS)
        first = self.listed(schema, "prefixItems", pointer) if "prefixItems" in schema else []
        items = [self.value(part, f"{pointer}/prefixItems/{n}") for n, part in enumerate(first)]
        other = self.value(schema.get("items", True), f"{pointer}/items")
        if high is not None:
            items = items[:high]
        most = None if high is None else high - len(items)
        inside = _several(other, max(low - len(items), 0), most, first=not items)
        for place in range(len(items) - 1, -1, -1):  # an item is there only if all before it are
            comma = (COMMA,) if place else ()
            inside = Cat((*comma, items[place], inside))
            if low <= place:
                inside = optional(inside)
        return Cat((literal("["), inside, literal("]")))

    def object(self, schema: Mapping[str, Any], pointer: str) -> Node:
        properties = schema.get("properties", {})
        required = self.listed(schema, "required", pointer) if "required" in schema else []
        if not isinstance(properties, Mapping):
            raise self.refuse(f"{pointer}/properties", "must be an object")
        others = schema.get("additionalProperties", True)
        other = self.value(others, f"{pointer}/additionalProperties")
        members: list[tuple[Node, bool]] = []
        for key, part in properties.items():
            value = self.value(part, f"{pointer}/properties/{pointers.escape(key)}")
            members.append((member(constant(key), value), key in required))
        for key in dict.fromkeys(required):
            if key not in properties:
                members.append((member(constant(key), other), True))
        more = None
        if others is not False:
            named = {*properties, *required}
            more = member(_string_but(named) if named else ANY_STRING, other)
        return Cat((literal("{"), Members(tuple(members), COMMA, more), literal("}")))

    def target(self, reference: Any, pointer: str) -> Node:
        """What a local reference points to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self.refuse(pointer, f"{reference!r} is no reference within the schema")
        found: Any = self.root
        for part in pointers.parts(reference):
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise self.refuse(pointer, f"{reference!r} points to nothing")
        return self.value(found, reference)


def _several(item: Node, least: int, most: int | None, *, first: bool) -> Node:
    """`least` to `most` items, each behind a comma, but for the first of all."""
    if most is not None and most < least:
        return Alt(())
    if most == 0:
        return EMPTY
    if not first:
        return Repeat(Cat((COMMA, item)), least, most)
    rest = Repeat(Cat((COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
    return Cat((item, rest)) if least else optional(Cat((item, rest)))


def member(key: Node, value: Node) -> Node:
    """A key, a colon and a value."""
    return Cat((key, COLON, value))


def constant(value: Any) -> Node:
    """One value, its keys in the order given; a whole number also with zeros behind the point."""
    if isinstance(value, str):
        return Cat((QUOTE, literal(value, quoted=True), QUOTE))
    if isinstance(value, list):
        return Cat((literal("["), Members(tuple((constant(v), True) for v in value), COMMA), literal("]")))
    if isinstance(value, Mapping):
        pairs = tuple((member(constant(key), constant(v)), True) for key, v in value.items())
        return Cat((literal("{"), Members(pairs, COMMA), literal("}")))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return exactly(Fraction(repr(value)))
    return literal(json.dumps(value))


def _type_of(value: Any) -> set[str]:
    """The names of types that a value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, (int, float)):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _both(left: Node, right: Node) -> Any:
    return product(compile(left), compile(right), lambda one, other: one and other)


def _string_but(names: set[str]) -> Node:
    """Any string but these."""
    named = compile(Alt(tuple(constant(name) for name in sorted(names))))
    return Automaton(product(compile(ANY_STRING), named, lambda one, other: one and not other))

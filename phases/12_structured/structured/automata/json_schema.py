"""Translate a JSON schema (draft 2020-12, https://json-schema.org/draft/2020-12) to rules.

Objects, arrays and references become rules that call each other; strings, numbers and literals stand where
they are used. Keys come in the order of `properties`, other keys behind them. A space may follow a comma or a
colon. An unknown keyword is refused, since to ignore it would let wrong output pass; the error names its
position in the schema by a JSON pointer (RFC 6901).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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
)
from structured.automata.regex import parse

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OF_TYPE = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords beside which only `type` may stand, and beside the first two not even that."""
ANNOTATIONS = {
    "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
KNOWN = set().union(*OF_TYPE.values()) | ANNOTATIONS | {"type", *ALONE}

MOST_COUNT = 500
"""The largest count of characters or items, each of which takes states of its own."""

SPACE = optional(literal(" "))
COMMA = Cat((literal(","), SPACE))
COLON = Cat((literal(":"), SPACE))
QUOTE = literal('"')
ANY_CHAR = Chars(((0, LAST),), quoted=True)
SIMPLE = {
    "null": literal("null"),
    "boolean": Alt((literal("true"), literal("false"))),
    "integer": parse(r"-?(0|[1-9]\d*)(\.0+)?"),  # 1.0 is an integer, too
    "number": parse(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
}
TYPE_OF: dict[type, str] = dict(
    zip((type(None), bool, int, float, str, list, dict), TYPES, strict=True)
)


def rules_of(schema: Any) -> dict[str, Node]:
    """Return a JSON schema as rules (syntax trees by name); an output matches the rule `start`.

    schema: the decoded schema.

    Raises:
        UserError: a keyword is wrong or not known; the error names its position by a JSON pointer.
    """
    return _SchemaReader(schema).rules


class _SchemaReader:
    """Translates the JSON schema `root` to syntax trees by name (`rules`); each method translates a part.

    In all methods `pointer` is the JSON pointer of the part, for errors. All raise `UserError` for what is
    wrong or not supported.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, Node] = {}
        self.names: dict[str, str] = {}
        self.rules["start"] = self.value(root, "#")

    def rule(self, make: Callable[[Any, str], Node], schema: Any, pointer: str) -> Node:
        """Return a syntax tree that calls the rule for a part of the schema; a new part gets a rule first.

        Equal parts with the same `make` share a rule.
        make: returns the syntax tree of a part, given the part and its pointer.
        """
        key = f"{make.__name__} {json.dumps(schema)}"
        if key not in self.names:
            name = self.names[key] = f"{make.__name__} {pointer}"
            self.rules[name] = Alt(
                ()
            )  # a reference to the rule, while it is made, finds the name
            self.rules[name] = make(schema, pointer)
        return Call(self.names[key])

    def any(self, schema: Any, pointer: str) -> Node:
        """Return a syntax tree that matches any JSON value.

        Both arguments are ignored: one rule serves all schemas that state no condition.
        """
        return Alt(tuple(self.typed(kind, {}, "any") for kind in TYPES))

    def value(self, schema: Any, pointer: str) -> Node:
        """Return a syntax tree that matches the JSON text of every value that a schema allows.

        pointer: the schema's JSON pointer, for errors.
        """
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        if not isinstance(schema, Mapping):
            raise UserError(f"{pointer}: {schema!r} is no schema")
        for key in schema:
            if key not in KNOWN:
                raise UserError(f"{pointer}/{escape(key)}: {key} is not known here")
        asks = schema.keys() - ANNOTATIONS
        if not asks:
            return self.rule(self.any, {}, "any")
        for key in asks & set(ALONE):
            others = asks - {key, *(("type",) if key in ("enum", "const") else ())}
            if others:
                raise UserError(
                    f"{pointer}/{key}: {key} beside {min(others)} is not known here"
                )
        if "$ref" in asks:
            return self.rule(self.target, schema["$ref"], f"{pointer}/$ref")
        if "anyOf" in asks:
            parts = self.listed(schema, "anyOf", pointer)
            return Alt(
                tuple(self.value(part, f"{pointer}/anyOf/{n}") for n, part in enumerate(parts))
            )
        given = schema.get("type", list(TYPES))
        types = given if isinstance(given, list) else [given]
        for one in types:
            if one not in TYPES:
                raise UserError(f"{pointer}/type: {one!r} is no type")
        if "number" in types:
            types = [*types, "integer"]
        if "enum" in asks or "const" in asks:
            values = (
                self.listed(schema, "enum", pointer) if "enum" in asks else [schema["const"]]
            )
            whole = [int(v) if type(v) is float and v.is_integer() else v for v in values]
            return Alt(
                tuple(constant(value) for value in whole if TYPE_OF[type(value)] in types)
            )
        return Alt(tuple(self.typed(kind, schema, pointer) for kind in TYPES if kind in types))

    def listed(self, schema: Mapping[str, Any], key: str, pointer: str) -> list[Any]:
        """Return the list under the keyword `key` of a schema, or [] if the schema has no such keyword.

        Raises `UserError` if the value is no list. pointer: the schema's JSON pointer, for the error.
        """
        value = schema.get(key, [])
        if not isinstance(value, list):
            raise UserError(f"{pointer}/{key}: must be a list")
        return value

    def typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> Node:
        """Return a syntax tree that matches every value of type `kind` that a schema allows.

        kind: a JSON type, such as "string". pointer: the schema's JSON pointer, for errors.
        """
        if kind in SIMPLE:
            return SIMPLE[kind]
        own = {key: schema[key] for key in schema if key in OF_TYPE[kind]}
        if kind == "string":
            return self.string(own, pointer)
        return self.rule(self.array if kind == "array" else self.object, own, pointer)

    def counts(
        self, schema: Mapping[str, Any], unit: str, pointer: str
    ) -> tuple[int, int | None]:
        """Return the least and the most number of characters or items that a schema allows; None: no limit.

        unit: "Length" (of a string) or "Items" (of an array): the keywords are "min" and "max" and this.
        pointer: the schema's JSON pointer, for errors.
        """
        found = []
        for key in (f"min{unit}", f"max{unit}"):
            value = schema.get(key, 0)
            if type(value) not in (int, float) or value % 1 or not 0 <= value <= MOST_COUNT:
                raise UserError(
                    f"{pointer}/{key}: {value!r} is no whole number from 0 to {MOST_COUNT}"
                )
            found.append(int(value))
        return found[0], found[1] if f"max{unit}" in schema else None

    def string(self, schema: Mapping[str, Any], pointer: str) -> Node:
        """Return a syntax tree that matches every string that a schema allows, with its quotes.

        pointer: the schema's JSON pointer, for errors.
        """
        counts = self.counts(schema, "Length", pointer)
        return Cat((QUOTE, _several(ANY_CHAR, *counts), QUOTE))

    def array(self, schema: Mapping[str, Any], pointer: str) -> Node:
        """Return a syntax tree that matches every array that a schema allows, with its brackets.

        pointer: the schema's JSON pointer, for errors.
        """
        low, high = self.counts(schema, "Items", pointer)
        item = self.value(schema.get("items", True), f"{pointer}/items")
        more = _several(
            Cat((COMMA, item)), max(low - 1, 0), None if high is None else high - 1
        )
        inside = Alt(()) if high == 0 else Cat((item, more))
        return Cat((literal("["), inside if low else optional(inside), literal("]")))

    def object(self, schema: Mapping[str, Any], pointer: str) -> Node:
        """Return a syntax tree that matches every object that a schema allows: `Members` between braces.

        The members are, in this order:
        - those of `properties`, in the order given; one that is not in `required` may be left out;
        - the other keys of `required`, once each, in the order given; none may be left out;
        - as `more`, a member with any key but all of these, unless `additionalProperties` is False.

        A key that is not in `properties` has a value that `additionalProperties` allows, by default any.
        pointer: the schema's JSON pointer, for errors. Those of the schemas in it are
        `{pointer}/properties/{escape(key)}` and `{pointer}/additionalProperties`.
        """
        properties = schema.get("properties", {})
        required = self.listed(schema, "required", pointer)
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
        """Return a syntax tree that matches what the target of `reference` allows, such as `#/$defs/name`.

        pointer: the JSON pointer of the reference, for errors.
        """
        if not isinstance(reference, str) or f"{reference}/"[:2] != "#/":
            raise UserError(f"{pointer}: {reference!r} is no reference within the schema")
        found: Any = self.root
        for part in pointed(reference):
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                raise UserError(f"{pointer}: {reference!r} points to nothing")
        return self.value(found, reference)


def escape(key: str) -> str:
    """Return an object's key as one part of a JSON pointer: `~` becomes `~0`, `/` becomes `~1`."""
    return key.replace("~", "~0").replace("/", "~1")


def pointed(reference: str) -> Iterator[str]:
    """Yield the unescaped keys of a reference from the root of the schema to its target.

    For `#/$defs/name` these are `$defs` and `name`.
    """
    for part in reference.split("/")[1:]:
        yield unquote(part).replace("~1", "/").replace("~0", "~")


def constant(value: Any) -> Node:
    """Return a syntax tree that matches the JSON text of one value, as `json.dumps` writes it."""
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _member(key: Node, value: Node) -> Node:
    """Return a syntax tree that matches one member of a JSON object: its key, a colon and its value."""
    return Cat((key, COLON, value))


def _several(part: Node, low: int, high: int | None) -> Node:
    """Return a syntax tree that matches `part` `low` to `high` times (None: no limit).

    If high < low, it matches nothing, not even the empty text.
    """
    return Alt(()) if high is not None and high < low else Repeat(part, low, high)


def _text_but(names: set[str]) -> Node:
    """Return a syntax tree that matches every text but `names`, as it is written inside a JSON string.

    It matches a character with which no name begins, and then any text; or a character with which names
    begin, and then any text but the rests of these names; or the empty text, unless it is one of the names.
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

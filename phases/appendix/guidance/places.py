"""Places of outputs in their JSON schema, as far as that decides what may come next.

Outputs of one schema differ in what they say, and hardly in what they may say: after 32 characters of a city
that may have 40, it does not matter which 32 they were. So what has been read is forgotten, but for what the
schema still asks of it: which keys and how many items of what is open have been there, and how long a string
is. Outputs that stand in the same place have the same mask, and it is made once.

There is a place only near the end of a string. There most of a vocabulary is too long, and is looked at token
by token: a mask is a hundred times as dear as elsewhere, where it costs less to make it than to keep it.

Of a part of a schema with any keyword that is not known here nothing is known but where its values end, and
inside of such a value there are no places.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from structured.automata.json_schema import escape, pointed
from structured.matcher import Words

FOR_READERS = {"title", "description", "default", "examples", "$comment", "$schema", "$defs", "definitions"}
"""Keywords that say nothing about an output."""
KNOWN = {
    "string": {"type", "minLength", "maxLength"},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
}
"""By type: with these, what comes behind a character, an item or a value does not depend on which it was."""
COUNTED = {"string": "Length", "array": "Items", "object": "Properties"}
ELSEWHERE = ("$id", "$anchor", "$dynamic", "$recursive", "draft-03", "draft-04")
"""With these a reference may mean something else than a path from the root. (To old dialects `id` is one.)"""
ENDLESS = 1 << 30
MOST_CHARACTERS = 20_000
"""Longer schemas have no places: to read them takes Python's lock for a while."""
NEAR = 30
"""Characters. Where more may follow, nearly all tokens fit."""
MOST_STATES = 5_000
REMEMBERED = 64
"""Tokens that can be taken back."""
PLAIN = re.compile(r'[^"\\\x00-\x1F\x7F\uDC80-\uDCFF]+')
QUOTE, BACKSLASH, COMMA, DELETE = b'"\\,\x7f'


class Tokens:
    """The bytes of a vocabulary's tokens.

    longest: has so many.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.bytes, self.longest = tokens, max(map(len, tokens))
        self.shapes: dict[int, int] = {}  # of tokens that were asked for
        self._numbers: dict[tuple[int, str], int] = {}

    def shape(self, token: int) -> int:
        """A number, less than 0. It is the same for tokens that are alike in a string: as many characters
        that JSON writes as they are, and behind these the same.
        """
        found = self.shapes.get(token)
        if found is None:
            text = self.bytes[token].decode(errors="surrogateescape")
            plain = PLAIN.match(text)
            count = 0 if plain is None else plain.end()
            shape = self._numbers.setdefault((count, text[count:]), -1 - len(self._numbers))
            found = self.shapes[token] = shape
        return found


@dataclass(eq=False)
class SchemaNode:
    """A part of a schema.

    kind: "string", "array", "object"; empty if nothing is known.
    low, high: characters, or items, at least and at most.
    properties: of an object, by their names as JSON spells them. items: of an array.
    """

    number: int
    kind: str = ""
    low: int = 0
    high: int = ENDLESS
    properties: dict[bytes, SchemaNode] = field(default_factory=dict)
    items: SchemaNode | None = None


UNKNOWN = SchemaNode(0)


class At(IntEnum):
    """Kinds of what comes next. White space, which may come before the first six, does not matter."""

    VALUE = 0  # of `node`
    FIRST = 1  # something in the object or array that has just begun, or its end
    KEY = 2
    COLON = 3
    NEXT = 4  # a comma, or the end of what is open
    END = 5
    NAME = 6  # more of a key
    TEXT = 7  # more of a string of which the schema knows the length alone
    SCALAR = 8  # more of a number, or a word without quotes
    OTHER = 9  # more of an array or object of which nothing is known
    OTHER_TEXT = 10  # more of any other string
    OTHER_ESCAPE = 11


Frame = tuple[SchemaNode, tuple[bytes, ...]]
"""An open array, or an open object and its keys up to now."""


class Facts(NamedTuple):
    """All that is remembered of what has been read, but for how many items of its arrays are complete.

    at: what comes next. frames: what is open.
    node: of the value that comes, or may come, or has begun.
    length: characters of a string, or how deep what is not known is nested.
    part: bytes of a key, or of a character that is not complete.
    """

    at: At
    frames: tuple[Frame, ...]
    node: SchemaNode
    length: int
    part: bytes


@dataclass(eq=False)
class Place:
    """Facts shared by outputs that may continue alike. mask: of their next token, if somebody made it."""

    mask: Words | None = None


Places = dict["tuple[object, ...]", Place]
"""By how many items open arrays must and may have."""


Lists = tuple["tuple[int, ...]", "tuple[object, ...]"]
"""Of arrays that are open: how many items are complete, and what that leaves."""


class Counts(NamedTuple):
    """Changes that a token makes to the counts of complete items, one for each array that is open.

    kept: so many arrays stay open. added: items to the last of them. new: counts of arrays that it opens.
    """

    kept: int
    added: int
    new: tuple[int, ...]

    def of(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The counts behind the token."""
        kept = counts[: self.kept]
        return (*kept[:-1], kept[-1] + self.added, *self.new) if kept else self.new


class Step(NamedTuple):
    """The state behind a token; counts: None if they stay as they are."""

    state: State
    counts: Counts | None


class State:
    """Facts, the places that they tell apart, and what followed which tokens.

    places: None if it is not near the end of a string.
    in_text: in a string of which nothing is remembered but its length, if that.
    """

    __slots__ = ("after", "facts", "in_text", "places")

    def __init__(self, facts: Facts, places: Places | None) -> None:
        self.facts, self.places = facts, places
        self.in_text = facts.at in (At.TEXT, At.OTHER_TEXT)
        self.after: dict[int, Step] = {}


class Schema:
    """A schema, and the states in which its outputs were.

    Args:
        source: JSON.
        tokens: of a vocabulary.

    has_places: whether there are strings that may have so many characters, and no more.
    """

    def __init__(self, source: str, tokens: Tokens) -> None:
        self.tokens = tokens
        self._nodes: dict[str, SchemaNode] = {}
        self._document: Any = None
        short = len(source) <= MOST_CHARACTERS and "maxLength" in source
        if short and not any(word in source for word in ELSEWHERE):
            self._document = json.loads(source)
        root = self._node("#", self._document)
        strings = [node for node in self._nodes.values() if node.kind == "string"]
        self.has_places = root.kind != "" and any(node.high < ENDLESS for node in strings)
        self._states: dict[Facts, State] = {}
        self._places: dict[tuple[object, ...], Places] = {}
        self.start = self._state(Facts(At.VALUE, (), root, 0, b""))

    def step(self, state: State, token: int) -> Step:
        """Return what follows a token."""
        key = self.tokens.shape(token) if state.in_text else token
        found = state.after.get(key)
        if found is None:
            reader = Reader(state.facts)
            for byte in self.tokens.bytes[token]:
                reader.read(byte)
            found = state.after[key] = Step(self._state(reader.facts), reader.counts)
        return found

    def around(self, state: State, counts: tuple[int, ...]) -> tuple[object, ...]:
        """Return what is left to arrays that are open."""
        arrays = [node for node, _ in state.facts.frames if node.kind == "array"]
        return tuple([self._left(node, count) for node, count in zip(arrays, counts, strict=True)])

    def _left(self, node: SchemaNode, count: int) -> tuple[int, int]:
        """Return how much more a string or an array must and may have, as far as a single token can tell."""
        longest = self.tokens.longest
        return min(max(node.low - count, 0), longest), min(node.high - count, longest)

    def _state(self, facts: Facts) -> State:
        found = self._states.get(facts)
        if found is None:
            if len(self._states) >= MOST_STATES:
                self._states.clear()
                self._places.clear()
            found = self._states[facts] = State(facts, self._placed(facts))
        return found

    def _placed(self, facts: Facts) -> Places | None:
        """The places of facts: the same ones for all that differ in nothing that matters."""
        at, frames, node, length, part = facts
        if at is not At.TEXT or part or node.high - length >= min(NEAR, self.tokens.longest):
            return None
        return self._places.setdefault((frames, node, self._left(node, length)), {})

    # The schema's parts.

    def _node(self, path: str, schema: Any) -> SchemaNode:
        if path in self._nodes:
            return self._nodes[path]
        if not isinstance(schema, dict):
            return UNKNOWN
        if "$ref" in schema:
            return self._referred(schema)
        kind = schema.get("type")
        if not isinstance(kind, str) or not schema.keys() <= KNOWN.get(kind, set()) | FOR_READERS:
            return UNKNOWN
        unit = COUNTED[kind]
        low, high = schema.get(f"min{unit}", 0), schema.get(f"max{unit}", ENDLESS)
        if not type(low) is type(high) is int:
            return UNKNOWN
        made = self._nodes[path] = SchemaNode(len(self._nodes) + 1, kind, low, high)
        if kind == "object":
            for name, part in schema.get("properties", {}).items():
                spelled = json.dumps(name, ensure_ascii=False).encode()[1:-1]
                made.properties[spelled] = self._node(f"{path}/properties/{escape(name)}", part)
        made.items = self._node(f"{path}/items", schema.get("items"))
        return made

    def _referred(self, schema: dict[str, Any]) -> SchemaNode:
        """Read what a `$ref` with nothing beside it means."""
        path = schema["$ref"]
        if not isinstance(path, str) or not schema.keys() <= {"$ref"} | FOR_READERS or "%" in path:
            return UNKNOWN
        found = self._document if path == "#" or path.startswith("#/") else None
        for part in pointed(path):
            found = found.get(part) if isinstance(found, dict) else None
        if isinstance(found, dict) and "$ref" in found:  # which may lead back here
            return UNKNOWN
        return self._node(path, found)


class Reader:
    """Reads JSON that obeys its schema: a grammar has seen to that."""

    def __init__(self, facts: Facts) -> None:
        self.at, self.frames, self.node, self.length, self.part = facts
        self._open = self._kept = sum(node.kind == "array" for node, _ in self.frames)
        self._added, self._new = 0, list[int]()

    @property
    def facts(self) -> Facts:
        """All that is known now."""
        return Facts(self.at, self.frames, self.node, self.length, self.part)

    @property
    def counts(self) -> Counts | None:
        """Changes of the counts of items."""
        if self._kept == self._open and not (self._added or self._new):
            return None
        return Counts(self._kept, self._added, tuple(self._new))

    def read(self, byte: int) -> None:
        """Read a byte."""
        if self.at is At.TEXT:
            self._text(byte)
        elif self.at is At.NAME:
            self._name(byte)
        elif self.at is At.SCALAR and byte in b",]} \t\n\r":
            self._done()
            self.read(byte)
        elif self.at >= At.SCALAR:
            self._other(byte)
        elif byte not in b" \t\n\r":
            self._structure(byte)

    def _structure(self, byte: int) -> None:
        """A byte that is neither in a value nor white space."""
        if self.at is At.VALUE:
            self._begin(byte)
        elif self.at is At.COLON:
            self.at = At.VALUE
        elif byte in b"]}":
            self._close()
        elif self.at is At.NEXT:
            node = self.frames[-1][0]
            if node.kind == "array":
                self._item()
                self.at, self.node = At.VALUE, node.items or UNKNOWN
            else:
                self.at = At.KEY
        elif self.frames[-1][0].kind == "array":
            self._begin(byte)
        else:
            self.at = At.NAME

    def _item(self) -> None:
        """One more item of the last array is complete."""
        if self._new:
            self._new[-1] += 1
        else:
            self._added += 1

    def _close(self) -> None:
        """End what was opened last."""
        if self.frames[-1][0].kind == "array":
            if self._new:
                self._new.pop()
            else:
                self._kept, self._added = self._kept - 1, 0
        self.frames = self.frames[:-1]
        self._done()

    def _begin(self, byte: int) -> None:
        """The first byte of a value."""
        kind = self.node.kind
        if kind == "array" or kind == "object":
            self.frames = (*self.frames, (self.node, ()))
            self._new += [0] if kind == "array" else []
            self.at, self.node = At.FIRST, self.node.items or UNKNOWN
        elif kind == "string":
            self.at = At.TEXT
        elif byte in b"[{":
            self.at, self.length = At.OTHER, 1
        else:
            self.at = At.OTHER_TEXT if byte == QUOTE else At.SCALAR

    def _done(self) -> None:
        """A value has ended."""
        self.at = At.NEXT if self.frames else At.END
        self.node, self.length, self.part = UNKNOWN, 0, b""

    def _name(self, byte: int) -> None:
        """A byte of a key. Once an object has one that its schema does not name, nothing is known of it."""
        node, seen = self.frames[-1]
        part = self.part + bytes([byte])
        if any(name.startswith(part) for name in node.properties):
            self.part = part
        elif byte == QUOTE and self.part in node.properties:
            self.frames = (*self.frames[:-1], (node, (*seen, self.part)))
            self.at, self.node, self.part = At.COLON, node.properties[self.part], b""
        else:
            escaped = len(self.part) - len(self.part.rstrip(b"\\"))
            self.at = At.OTHER_ESCAPE if escaped % 2 else At.OTHER_TEXT
            self.frames, self.length, self.part = self.frames[:-1], 1, b""
            self._other(byte)

    def _text(self, byte: int) -> None:
        """A byte of a string; one that is not plain makes it any other."""
        if byte == QUOTE:
            self._done()
        elif byte in (BACKSLASH, DELETE):
            self.at = At.OTHER_ESCAPE if byte == BACKSLASH else At.OTHER_TEXT
            self.node, self.length = UNKNOWN, 0
        elif byte < 0x80:
            self.length += 1
        else:
            self.part += bytes([byte])
            if len(self.part) == _width(self.part[0]):
                self.length, self.part = self.length + 1, b""

    def _other(self, byte: int) -> None:
        """A byte of what is only read for its end."""
        if self.at is At.OTHER_ESCAPE:
            self.at = At.OTHER_TEXT
        elif self.at is At.OTHER_TEXT:
            if byte == BACKSLASH:
                self.at = At.OTHER_ESCAPE
            elif byte == QUOTE:
                self.at = At.OTHER
                if self.length == 0:
                    self._done()
        elif byte == QUOTE:
            self.at = At.OTHER_TEXT
        elif byte in b"[{":
            self.length += 1
        elif byte in b"]}":
            self.length -= 1
            if self.length == 0:
                self._done()


def _width(lead: int) -> int:
    """Bytes of a character by its first."""
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


class PlacedOutput:
    """The place of one output.

    What can be taken back is kept without a new object for every token. With hundreds of outputs these would
    make Python's collector look through everything there is again and again.
    """

    __slots__ = ("_before", "_lists", "_shapes", "_states", "schema", "state")

    def __init__(self, schema: Schema) -> None:
        self.schema, self.state = schema, schema.start
        self._lists: Lists = (), ()
        self._shapes = schema.tokens.shapes
        self._states: deque[State] = deque(maxlen=REMEMBERED)
        self._before: deque[Lists] = deque(maxlen=REMEMBERED)

    @property
    def place(self) -> Place | None:
        """Its place, if it is near the end of a string."""
        places, around = self.state.places, self._lists[1]
        if places is None:
            return None
        found = places.get(around)
        if found is None:
            found = places[around] = Place()
        return found

    def advance(self, token: int) -> None:
        """Read a token."""
        state = self.state
        self._states.append(state)
        self._before.append(self._lists)
        key = self._shapes.get(token, token) if state.in_text else token
        self.state, change = state.after.get(key) or self.schema.step(state, token)
        if change is not None:
            counts = change.of(self._lists[0])
            self._lists = counts, self.schema.around(self.state, counts)

    def rollback(self, count: int) -> bool:
        """Take back tokens; False: they are forgotten."""
        known = count <= len(self._states)
        for _ in range(count if known else 0):
            self.state, self._lists = self._states.pop(), self._before.pop()
        return known

"""The form that an output must have: a JSON schema, a regular expression, a list of strings, or a grammar.

A `Grammar` holds only its source, checked for size. The engine that masks tokens compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from common.errors import UserError, shown, text
from common.names import choice

Kind = Literal["json_schema", "regex", "choice", "lark"]

MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Longest source of a grammar; the largest schemas of public collections have some 100,000 characters."""

MAX_CHOICES = 10_000
MAX_DEPTH = 128
"""Deepest nesting of brackets in a JSON schema: what reads one recurses."""
MAX_KEYS = 2_000
"""Most keys of one object in a JSON schema: llguidance's time grows with their square, and 7,000 took it 13
seconds.
"""


@dataclass(frozen=True)
class Grammar:
    """The language of an output. Construction raises `UserError` for a source that cannot be one.

    kind: how to read the source: "json_schema" (draft 2020-12), "regex" (the whole output matches),
        "choice" (a JSON list of strings, one of which is the output), or "lark" (a Lark grammar, or one in
        the EBNF of GBNF, whose rule `start` or `root` is the output).
    source: its text.
    checked: True if another process has checked it. Checking a large schema takes milliseconds, in which
        nothing else runs in a process.

    Two of the same kind and source are equal: an engine compiles such a grammar once.
    """

    kind: Kind
    source: str
    checked: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.checked:
            self._check()
            object.__setattr__(self, "checked", True)

    def _check(self) -> None:
        choice("a grammar's kind", self.kind, get_args(Kind))
        known = isinstance(self.source, str)
        text(
            f"grammar ({self.kind})",
            self.source[: MAX_GRAMMAR_CHARACTERS + 1] if known else self.source,
        )
        if len(self.source) > MAX_GRAMMAR_CHARACTERS:
            raise UserError(
                f"grammar ({self.kind}) has {len(self.source):,} characters, but must have at most "
                f"{MAX_GRAMMAR_CHARACTERS:,}"
            )
        if not self.source:
            raise UserError(
                f"grammar ({self.kind}) is empty, but must have at least 1 character"
            )
        if self.kind == "json_schema":
            schema = _read("json_schema", self.source)
            if not isinstance(schema, (dict, bool)):
                raise UserError("grammar (json_schema) must be a JSON object, true or false")
            _check_schema(schema)
        if self.kind == "lark":
            for schema in _schemas_in(self.source):
                _check_schema(schema)
        if self.kind == "choice":
            _check_choices(_read("choice", self.source))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Return the grammar of JSON that a schema allows; the schema is an object or its JSON text."""
        return cls(
            "json_schema", schema if isinstance(schema, str) else _dump("json_schema", schema)
        )

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match `pattern` as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, strings: Iterable[str]) -> Grammar:
        """Return the grammar whose output is one of `strings`.

        Raises:
            UserError: they are no list of strings.
        """
        if isinstance(strings, (str, Mapping)) or not isinstance(strings, Iterable):
            raise UserError(f"choice is {shown(strings)}, but must be a list of strings")
        return cls("choice", _dump("choice", list(strings)))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Return the grammar of texts that `source`, a Lark or GBNF grammar, derives."""
        return cls("lark", source)

    def loaded(self) -> Any:
        """Return the parsed JSON of the source, for a grammar of the kind JSON schema or choice."""
        return json.loads(self.source)

    def __str__(self) -> str:
        """Return the kind and the first 60 characters of the source."""
        return f"{self.kind} {self.source[:60]!r}{'...' if len(self.source) > 60 else ''}"


def _check_schema(part: Any, depth: int = 1) -> None:
    """Raise `UserError` if `part` of a JSON schema nests too deeply or has an object of too many keys.

    The limits are `MAX_DEPTH` levels and `MAX_KEYS` keys. depth: the level of `part` in the schema.
    """
    if not isinstance(part, (dict, list)):
        return
    if depth > MAX_DEPTH:
        raise UserError(f"grammar (json_schema) nests deeper than {MAX_DEPTH} levels")
    if isinstance(part, dict) and len(part) > MAX_KEYS:
        raise UserError(
            f"grammar has an object of {len(part):,} keys, but may have {MAX_KEYS:,}"
        )
    for each in part.values() if isinstance(part, dict) else part:
        _check_schema(each, depth + 1)


def _schemas_in(source: str) -> Iterator[Any]:
    """Yield the JSON schemas (`%json {...}`) inside a Lark grammar."""
    for start in re.finditer(r"%json\s*", source):
        with suppress(ValueError, RecursionError):  # its compiler says what is wrong
            yield json.JSONDecoder().raw_decode(source, start.end())[0]


def _dump(kind: Kind, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"grammar ({kind}) is not JSON ({error})") from None


def _read(kind: Kind, source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise UserError(f"grammar ({kind}) is not JSON ({error})") from None


def _check_choices(strings: Any) -> None:
    if not isinstance(strings, list) or not strings:
        raise UserError("grammar (choice) must be a list of at least 1 string")
    if len(strings) > MAX_CHOICES:
        raise UserError(
            f"grammar (choice) has {len(strings)} strings, but must have at most {MAX_CHOICES}"
        )
    for string in strings:
        text("a string of grammar (choice)", string)
        if not string:
            raise UserError(
                "grammar (choice) holds '', but each string must have at least 1 character"
            )

"""xgrammar: a pushdown automaton in C++ whose masks are made ahead of time (Dong et al., arXiv 2411.15100).

Of a JSON schema it leaves out some of what it does not know, and then lets wrong output pass. So a schema is
looked through first, and refused for a keyword that the library does not enforce. The list was made from the
official test suite: see the lesson's table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xgrammar as xg

from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.guidance.matcher import Effort
from structured.matcher import Backend, Compiled, Matcher, Words
from structured.vocabulary import Vocabulary

ENFORCED = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items",
    "minItems", "maxItems", "minLength", "maxLength", "pattern", "anyOf", "$ref", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
IGNORED = {
    "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
MOST_ROLLBACK = 64


class XGrammarMatcher(Matcher):
    """One output in xgrammar's automaton."""

    def __init__(self, compiled: Any, eos: Sequence[int]) -> None:
        self.inner = xg.GrammarMatcher(
            compiled, override_stop_tokens=list(eos), max_rollback_tokens=MOST_ROLLBACK
        )
        self.eos, self.effort = eos, Effort()

    def fill(self, words: Words) -> None:
        """See `Matcher`; so are the others."""
        with self.effort.timed():
            self.inner.fill_next_token_bitmask(torch.from_numpy(words[None]), 0)

    def advance(self, tokens: Sequence[int]) -> int:
        """A token at a time. The library would take an end token as well."""
        with self.effort.timed():
            for count, token in enumerate(tokens):
                if token in self.eos or not self.inner.accept_token(token):
                    return count
        return len(tokens)

    def rollback(self, count: int) -> None:
        """The library keeps `MOST_ROLLBACK` tokens."""
        if count:
            self.inner.rollback(count)

    @property
    def problem(self) -> str:
        """The budget that is used up."""
        return self.effort.problem


class XGrammarCompiled(Compiled):
    """A compiled grammar, which says itself how large it is."""

    def __init__(self, inner: Any, eos: Sequence[int]) -> None:
        self.inner, self.eos = inner, eos
        self.bytes = int(inner.memory_size_bytes)

    def matcher(self) -> Matcher:
        """At the start."""
        return XGrammarMatcher(self.inner, self.eos)


class XGrammarBackend(Backend):
    """Compiles by xgrammar; `check=False` leaves out the look through the schema."""

    def __init__(self, vocabulary: Vocabulary, *, check: bool = True) -> None:
        super().__init__(vocabulary)
        self.check = check
        self.eos = list(vocabulary.eos)
        info = xg.TokenizerInfo(
            list(vocabulary.tokens), vocab_size=len(vocabulary.tokens), stop_token_ids=self.eos
        )
        self.compiler = xg.GrammarCompiler(info, max_threads=2, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend.compile`."""
        if grammar.kind == "json_schema" and self.check:
            wrong = next(unenforced(grammar.loaded(), "#"), None)
            if wrong is not None:
                raise UserError(
                    f"grammar ({grammar}) is refused: {wrong} is not enforced by xgrammar"
                )
        try:
            return XGrammarCompiled(self._compile(grammar), self.eos)
        except Exception as error:  # the library raises many kinds
            said = " ".join(str(error).split())[:300]
            raise UserError(f"grammar ({grammar}) is refused: {said}") from None

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "json_schema":
            return self.compiler.compile_json_schema(
                grammar.source, any_whitespace=True, strict_mode=True
            )
        if grammar.kind == "regex":
            return self.compiler.compile_regex(grammar.source)
        if grammar.kind == "choice":
            strings = " | ".join(json.dumps(string) for string in grammar.loaded())
            return self.compiler.compile_grammar(f"root ::= {strings}")
        return self.compiler.compile_grammar(grammar.source)


def enforced(key: str, value: Any) -> bool:
    """Whether the library holds an output to a keyword with this value."""
    if key == "$ref":  # others are taken for `true`
        return isinstance(value, str) and (value == "#" or value.startswith("#/"))
    if key in ("const", "enum"):  # of objects and arrays it knows one spelling
        values = value if key == "enum" and isinstance(value, list) else [value]
        return not any(isinstance(part, (list, Mapping)) for part in values)
    return key in ENFORCED or key in IGNORED


def unenforced(schema: Any, pointer: str) -> Iterator[str]:
    """JSON pointers of what the library would leave out: keywords, and combinations it resolves wrongly."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        where = f"{pointer}/{key}"
        if not enforced(key, value):
            yield where
        elif key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
            for name, part in value.items():
                yield from unenforced(part, f"{where}/{name}")
        elif key in ("items", "additionalProperties"):
            yield from unenforced(value, where)
        elif key == "anyOf" and isinstance(value, list):
            for number, part in enumerate(value):
                yield from unenforced(part, f"{where}/{number}")
    asks = set(schema) - IGNORED
    for key in ("$ref", "anyOf", "enum", "const"):
        if key in asks and len(asks - {"type"}) > 1:
            yield f"{pointer}/{key}"
    if "type" not in asks and asks - {"$ref", "anyOf", "enum", "const"}:
        yield f"{pointer} without a type"

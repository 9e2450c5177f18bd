"""The automata as a backend: patterns, choices and JSON schemas, with nothing but numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.automata.deadline import within
from structured.automata.json_schema import rules_of
from structured.automata.nodes import Alt, Node, literal
from structured.automata.pushdown import MOST_MASK_BYTES, Machine, MaskMaker, Place
from structured.automata.regex import parse
from structured.automata.trie import Trie
from structured.matcher import Backend, Compiled, Matcher, Words
from structured.vocabulary import Vocabulary

SECONDS = 1.5
"""Most time of a thread for one grammar."""

MOST_HEIGHT = 1000
MOST_STACKS = 64
"""Of a place: more only where a schema's alternatives begin alike for long."""


class AutomataBackend(Backend):
    """Compiles to a `Machine`; its masks are made lazily and shared by all outputs of the grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.trie = Trie(vocabulary.tokens)

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend.compile`; Lark grammars are refused."""
        try:
            with within(SECONDS):
                return AutomataGrammar(Machine(rules_for(grammar), "start"), self)
        except (UserError, RecursionError, ValueError) as error:
            raise UserError(f"grammar ({grammar}) is refused: {error}") from None


def rules_for(grammar: Grammar) -> dict[str, Node]:
    """Read a grammar as rules, of which `start` is the output. Raises `UserError` for what is not known."""
    if grammar.kind == "regex":
        return {"start": parse(grammar.source)}
    if grammar.kind == "choice":
        return {"start": Alt(tuple(literal(string) for string in grammar.loaded()))}
    if grammar.kind == "json_schema":
        return rules_of(grammar.loaded())
    raise UserError("the automata know no Lark grammars: choose another backend")


class AutomataGrammar(Compiled):
    """A machine and the masks made for it up to now."""

    def __init__(self, machine: Machine, backend: AutomataBackend) -> None:
        self.machine, self.backend = machine, backend
        self.masks = MaskMaker(machine, backend.trie)
        masks = 4 * backend.vocabulary.words * len(machine.table)
        self.bytes = machine.table.nbytes + min(MOST_MASK_BYTES, masks)

    def matcher(self) -> Matcher:
        """Return the matcher of a new output, at the start."""
        return AutomataMatcher(self)


class AutomataMatcher(Matcher):
    """One output: its place, and the places before, for `rollback`."""

    def __init__(self, grammar: AutomataGrammar) -> None:
        self.grammar, self.machine = grammar, grammar.machine
        self.places: list[Place] = [grammar.machine.start]

    def fill(self, words: Words) -> None:
        """See `Matcher`; so are the others."""
        place = self.places[-1]
        words[:] = self.grammar.masks.mask(place)
        if self.machine.may_end(place):
            for token in self.grammar.backend.vocabulary.eos:
                words[token >> 5] |= np.uint32(1 << (token & 31)).view(np.int32)

    def advance(self, tokens: Sequence[int]) -> int:
        """Take tokens a byte at a time."""
        texts = self.grammar.backend.vocabulary.tokens
        for count, token in enumerate(tokens):
            place = self.places[-1]
            for byte in texts[token]:
                place = self.machine.step(place, byte)
            if not place or not texts[token]:
                return count
            self.places.append(place)
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Return to a place that is kept."""
        if count:
            del self.places[-count:]

    @property
    def problem(self) -> str:
        """The limits of one output."""
        place = self.places[-1]
        if len(place) > MOST_STACKS:
            return f"more than {MOST_STACKS} ways to read the output"
        return (
            f"it nests deeper than {MOST_HEIGHT} levels"
            if max(map(len, place)) > MOST_HEIGHT
            else ""
        )

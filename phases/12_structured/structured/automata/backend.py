"""The automata as a `Backend`: regular expressions, choices and JSON schemas, with nothing but numpy."""

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

MOST_HEIGHT = 1000
"""Most states in a stack: how deep an output may nest."""
MOST_STACKS = 64
"""Most stacks in a place: more are needed only where alternatives of a schema share a long beginning."""


class AutomataBackend(Backend):
    """A grammar backend that compiles a grammar to a pushdown automaton over UTF-8 bytes.

    vocabulary: the model's tokens. Token masks are made when they are first needed, and shared by all
        outputs with the same grammar.
    seconds: most processor time to compile one grammar.
    """

    seconds = 1.5

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.trie = Trie(vocabulary.tokens)

    def compile(self, grammar: Grammar) -> Compiled:
        """Return a grammar compiled to an automaton, from which each output gets a matcher of its own.

        Raises:
            UserError: the grammar is wrong, too large, or written in Lark.
        """
        try:
            with within(self.seconds):
                return AutomataGrammar(Machine(rules_for(grammar), "start"), self)
        except (UserError, RecursionError, ValueError) as error:
            raise UserError(f"grammar ({grammar}) is refused: {error}") from None


def rules_for(grammar: Grammar) -> dict[str, Node]:
    """Return the rules of a grammar as syntax trees, by their names; an output matches the rule `start`.

    grammar: a regex, a choice of strings, or a JSON schema.

    Raises:
        UserError: the grammar is wrong, or of an unknown kind.
    """
    if grammar.kind == "regex":
        return {"start": parse(grammar.source)}
    if grammar.kind == "choice":
        return {"start": Alt(tuple(literal(string) for string in grammar.loaded()))}
    if grammar.kind == "json_schema":
        return rules_of(grammar.loaded())
    raise UserError("the automata know no Lark grammars: choose another backend")


class AutomataGrammar(Compiled):
    """A compiled grammar: its pushdown automaton `machine`, and the token masks that were made up to now.

    backend: has the trie of the vocabulary's tokens.
    """

    def __init__(self, machine: Machine, backend: AutomataBackend) -> None:
        self.machine, self.backend = machine, backend
        self.masks = MaskMaker(machine, backend.trie)
        masks = len(machine.table) * len(backend.vocabulary.tokens) // 8
        self.bytes = machine.table.nbytes + min(MOST_MASK_BYTES, masks)

    def matcher(self) -> Matcher:
        """Return a new matcher, which follows one output from its first token on."""
        return AutomataMatcher(self)


class AutomataMatcher(Matcher):
    """Follows one output through the compiled grammar `grammar`, token by token.

    history: the possible stacks of the automaton (a `Place`) before the first token, and after each token;
        `rollback` drops the last ones.
    """

    def __init__(self, grammar: AutomataGrammar) -> None:
        self.grammar, self.machine = grammar, grammar.machine
        self.history: list[Place] = [grammar.machine.start]

    def fill(self, words: Words) -> None:
        """Write the bit mask of tokens that may come next into `words`, int32 `[ceil(V / 32)]`.

        End tokens are in the mask if the output may end.
        """
        place = self.history[-1]
        words[:] = self.grammar.masks.mask(place)
        if self.machine.may_end(place):
            for token in self.grammar.backend.vocabulary.eos:
                words[token >> 5] |= np.uint32(1 << (token & 31)).view(np.int32)

    def advance(self, tokens: Sequence[int]) -> int:
        """Accept token ids before the first that is forbidden or ends the output; return their number."""
        texts = self.grammar.backend.vocabulary.tokens
        for count, token in enumerate(tokens):
            place = self.history[-1]
            for byte in texts[token]:
                place = self.machine.step(place, byte)
            if not place or not texts[token]:
                return count
            self.history.append(place)
        return len(tokens)

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens that `advance` accepted."""
        del self.history[len(self.history) - count :]

    @property
    def problem(self) -> str:
        """Return which limit, of stacks or nesting, this output exceeds, as an error text; "" if none."""
        place = self.history[-1]
        if len(place) > MOST_STACKS:
            return f"more than {MOST_STACKS} ways to read the output"
        if max(map(len, place)) > MOST_HEIGHT:
            return f"it nests deeper than {MOST_HEIGHT} levels"
        return ""

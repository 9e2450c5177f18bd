"""The contract of matchers: what `advance` takes is what `agrees` counts and `rollback` gives back."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.models.hub import model_folder
from common.sampling.grammar import Grammar
from common.text.tokenizer import Tokenizer
from phases.appendix.guidance.backend import fill_in_turn
from phases.appendix.guidance.spelling import Spelling
from structured.matcher import Compiled, Matcher
from tests.guidance_kit import backend_named, fill, vocabulary
from tests.structured_kit import EOS, SIZE, bits, mask, tokenizer

SCHEMA = json.dumps({"enum": [{"a": 1}, [True, "b"], "é", 12]})
GRAMMARS = {
    "schema": Grammar("json_schema", SCHEMA),
    "regex": Grammar("regex", "(ab|abc)+[0-9]{0,2}"),
    "choice": Grammar("choice", '["yes", "no", "yes and no"]'),
}
TEXTS = ('{"a": 1}', '[true, "b"]', '"é"', "12", "ababc12", "abc", "yes and no", "no", "zz")


@cache
def compiled(backend: str, grammar: str) -> Compiled:
    return backend_named(backend)(vocabulary()).compile(GRAMMARS[grammar])


def one_by_one(matcher: Matcher, tokens: list[int]) -> int:
    """How many tokens `advance` takes, asked for each by itself."""
    for count, token in enumerate(tokens):
        if matcher.advance((token,)) == 0:
            return count
    return len(tokens)


@pytest.mark.parametrize("grammar", GRAMMARS)
@given(data=st.data())
def test_drafts_are_counted_taken_and_given_back_alike(grammar: str, data: Any) -> None:
    """Behind any beginning, with end tokens anywhere in the drafts, and drafts longer than the grammar."""
    oracle: Matcher = compiled("automata", grammar).matcher()
    matcher: Any = compiled("llguidance", grammar).matcher()
    text = data.draw(st.sampled_from(TEXTS))
    tokens = list(tokenizer().encode(text))
    begun = one_by_one(oracle, tokens[: data.draw(st.integers(0, len(tokens)))])
    assert one_by_one(matcher, tokens[:begun]) == begun, f"a beginning of {text} is refused"
    rest = tokens[begun:]
    drafts = rest[: data.draw(st.integers(0, len(rest)))]
    drafts += data.draw(st.lists(st.sampled_from([EOS, *tokens]), max_size=4))
    said = tokenizer().decode(tokens[:begun] + [token for token in drafts if token != EOS])
    if (
        grammar == "schema"
    ):  # only llguidance takes other blanks than one after each colon and comma
        assume(not re.search(r"[:,](?! |$)|(^|[^:,]) ", said))
    before = mask(matcher)
    agreed = matcher.agrees(drafts)
    assert mask(matcher) == before, f"looking at {drafts} has moved the matcher"
    taken = one_by_one(matcher, drafts)
    assert agreed == taken, f"of {drafts} {agreed} agree, but {taken} are taken"
    assert taken == one_by_one(oracle, drafts), (
        f"{taken} of {drafts} are taken, but not by the automata"
    )
    matcher.rollback(taken)
    assert mask(matcher) == before, f"rollback({taken}) is not where {drafts} began"
    assert matcher.advance(drafts) == taken, (
        f"all at once, another number of {drafts} is taken"
    )
    assert matcher.problem == ""


def test_drafts_that_end_an_output_leave_it_where_it_was() -> None:
    """The right token behind them is still taken."""
    matcher: Any = compiled("llguidance", "schema").matcher()
    tokens = list(tokenizer().encode('{"a": 1}'))
    assert matcher.advance(tokens[:2]) == 2
    drafts = [*tokens[2:], EOS]
    count = matcher.agrees(drafts)
    assert count == len(drafts) - 1, "an end token counts as a draft"
    words = np.zeros((count + 1, -(-len(vocabulary().tokens) // 32)), np.int32)
    fill_in_turn([(matcher, 0, tuple(drafts[:count]))], words)
    assert EOS in bits(words[-1], SIZE), f"the output may not end behind {drafts}"
    assert matcher.advance(tokens[2:]) == len(tokens) - 2, "what was drafted is refused"


# Each is the other's oracle.

GUIDED = [
    "(ab|c)+d",
    "[a-c]{2,4}",
    "x?y?z?",
    "(a|b)*abb",
    "[0-9]+([.][0-9]+)?",
    "(true|false|null)",
    "[^a]b",
]
GUIDED += [
    '"[^"]*"',
    "é+|[à-ü]{2}",
    "(in|an|the|ing)*",
    "[a-z]{3,6}(,[a-z]{1,3})*",
    ".{2}x",
    "(a|ab)(c|bc)?",
]


@pytest.mark.parametrize("pattern", GUIDED)
def test_masks_are_those_of_the_automata_in_every_state(pattern: str) -> None:
    """All states of a pattern's automaton, reached by tokens."""
    mine, other = (
        backend_named(name)(vocabulary()).compile(Grammar.regex(pattern))
        for name in ("automata", "llguidance")
    )
    queue, seen = deque([[]]), {mine.matcher().history[-1]}  # type: ignore[attr-defined,var-annotated]
    while queue:
        tokens: list[int] = queue.popleft()
        left, right = mine.matcher(), other.matcher()
        assert left.advance(tokens) == right.advance(tokens) == len(tokens)
        found, expected = mask(left), mask(right)
        said = f"{pattern!r} after {[vocabulary().tokens[t] for t in tokens]}"
        assert (EOS in found) == (EOS in expected), f"{said}: only one may end"
        if right.forced():  # the library leaves one spelling of what it forces
            assert set(expected) <= set(found), said
        else:
            assert found == expected, (
                f"{said}: {set(found) ^ set(expected)} are in one mask only"
            )
        for token in found:
            if token != EOS:
                after = mine.matcher()
                after.advance([*tokens, token])
                if (place := after.history[-1]) not in seen:  # type: ignore[attr-defined]
                    seen.add(place)
                    queue.append([*tokens, token])
    assert len(seen) > 1


# A real vocabulary: with a tiny one a grammar that is dear to follow does not show.

BOMBS = {
    "ambiguous": 'start: e\ne: e e e | e e | "a" | "bb"',
    "ambiguous, longer": 'start: e\ne: e e e e | e e | e "b" e | "a" | "bb" | "ab"',
}


@cache
def real() -> Spelling:
    known = Tokenizer(model_folder("smollm2"))
    return Spelling.of(known, known.vocab_size, (2,))


def follow(
    backend: Any, outputs: int, grammar: Grammar, tokens: int
) -> tuple[list[str], list[float]]:
    """What ends each of some outputs of the cheapest tokens, and the seconds of each step's masks."""
    matchers = [backend.compile(grammar).matcher() for _ in range(outputs)]
    running = list(matchers)
    seconds = list[float]()
    ended = list[str]()
    words = np.zeros((outputs, -(-len(real().tokens) // 32)), np.int32)
    for step in range(tokens):
        if not running:
            break
        begun = time.process_time()  # of work: a busy machine is no fault
        fill(backend, running, words)
        moves = []
        for row, matcher in enumerate(running):
            found = [
                token
                for token in bits(words[row], len(real().tokens))
                if token not in real().eos
            ]
            moves.append((matcher, found[step % 2 : step % 2 + 1] or found[:1]))
        backend.advance(moves)
        seconds.append(time.process_time() - begun)
        ended += [matcher.problem for matcher in running if matcher.problem]
        running = [matcher for (matcher, move) in moves if move and not matcher.problem]
    return ended, seconds


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(("name", "outputs"), [("ambiguous", 1), ("ambiguous, longer", 8)])
def test_a_grammar_that_is_dear_to_follow_ends_its_own_outputs(
    name: str, outputs: int
) -> None:
    ended, seconds = follow(
        backend_named("llguidance")(real()), outputs, Grammar("lark", BOMBS[name]), 400
    )
    assert len(ended) == outputs, (
        f"{outputs - len(ended)} outputs of {name!r} were never stopped"
    )
    assert sum(seconds) < outputs * 3.0, (
        f"{name!r} has taken {sum(seconds):.1f} s of {outputs} outputs"
    )

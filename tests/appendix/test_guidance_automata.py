"""The automata of phase 12 and llguidance are each other's oracle."""

from __future__ import annotations

from collections import deque

import pytest

from common.sampling.grammar import Grammar
from structured.automata.backend import AutomataBackend
from tests.guidance_kit import vocabulary
from tests.structured_kit import EOS, mask

pytest.importorskip("llguidance")

from phases.appendix.guidance.backend import GuidanceBackend


@pytest.fixture(scope="module")
def backend() -> AutomataBackend:
    return AutomataBackend(vocabulary())


def must_equal_guidance(pattern: str, backend: AutomataBackend) -> int:
    """Walk all states of a pattern's automaton, by tokens, and compare the mask of each with llguidance's."""
    other = GuidanceBackend(vocabulary()).compile(Grammar.regex(pattern))
    mine = backend.compile(Grammar.regex(pattern))
    queue, seen = deque([[]]), {mine.matcher().places[-1]}  # type: ignore[attr-defined,var-annotated]
    while queue:
        tokens: list[int] = queue.popleft()
        left, right = mine.matcher(), other.matcher()
        assert left.advance(tokens) == right.advance(tokens) == len(tokens)
        found, expected = mask(left), mask(right)
        said = f"{pattern!r} after {[vocabulary().tokens[t] for t in tokens]}"
        assert left.accepting == right.accepting, f"{said}: only one may end"
        if right.forced():  # the library leaves one spelling of what it forces
            assert set(expected) <= set(found), said
        else:
            assert found == expected, f"{said}: {set(found) ^ set(expected)} are in one mask only"
        for token in found:
            if token != EOS:
                after = mine.matcher()
                after.advance([*tokens, token])
                if (place := after.places[-1]) not in seen:  # type: ignore[attr-defined]
                    seen.add(place)
                    queue.append([*tokens, token])
    return len(seen)


GUIDED = ["(ab|c)+d", "[a-c]{2,4}", "x?y?z?", "(a|b)*abb", "[0-9]+([.][0-9]+)?", "(true|false|null)", "[^a]b"]
GUIDED += ['"[^"]*"', "é+|[à-ü]{2}", "(in|an|the|ing)*", "[a-z]{3,6}(,[a-z]{1,3})*", ".{2}x", "(a|ab)(c|bc)?"]


@pytest.mark.parametrize("pattern", GUIDED)
def test_masks_are_those_of_llguidance_in_every_state(pattern: str, backend: AutomataBackend) -> None:
    assert must_equal_guidance(pattern, backend) > 1

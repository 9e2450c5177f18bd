"""Phase 12: the tree of a vocabulary, walked by an automaton, and the masks of its states."""

from __future__ import annotations

from benchmarks.pictures.svg import (
    Arrow,
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    column,
    picture,
    row,
    table,
    titled,
)
from structured.automata.pushdown import Machine, MaskMaker
from structured.automata.regex import parse
from structured.automata.trie import Trie

PATTERN = "(ab|c)+d"
TOKENS = ("a", "b", "ab", "abc", "c", "cd", "d", "bd", "abd")
STATES = range(4)


def walk(state: int = 0) -> Picture:
    """The tree with the state that reaches each node, and the masks of all states."""
    trie = Trie([token.encode() for token in TOKENS])
    machine = Machine({"start": parse(PATTERN)}, "start")
    maker = MaskMaker(machine, trie)
    reached = trie.walk(machine.table, state).tolist()
    arrows: list[Arrow] = []

    def branch(node: int, text: str) -> tuple[Box, Box]:
        """A node with all that is below it, and the node alone; text: that leads to the node."""
        at = reached[node]
        words = f"{text[-1:]} → {at}" if at >= 0 else f"{text[-1:]} ✗"
        look = "idle" if at < 0 else "kept a" if text else "known a"
        own = Cell(words if text else f"in {state}", look, 58)
        whole = column(own, Text(text if text in TOKENS else "", "mid", 58), gap=0)
        below = []
        for child in range(trie.children[node], trie.children[node + 1]):
            more, start = branch(child, text + chr(trie.letters[child]))
            below.append(more)
            arrows.append((own, start, ""))
        return row(whole, column(*below, gap=2), gap=30) if below else whole, own

    tree, _ = branch(0, "")
    masks = [int(maker.mask(frozenset({(start,)}))[0]) for start in STATES]
    lines: Lines = [[""]]
    for start in STATES:
        lines[0].append(Text(f"state {start}", "bold mid" if start == state else "mid"))
    for bit, token in enumerate(TOKENS):
        lines.append([token])
        for start, mask in enumerate(masks):
            how = "now a" if start == state else "now"
            lines[-1].append(Cell("", how if mask >> bit & 1 else "free", 50, 22))
    lines.append(["", *(f"{mask.bit_count()} of {len(TOKENS)}" for mask in masks)])
    return picture(
        f"The vocabulary's tree walked from state {state}, and the masks of all states",
        row(
            titled(f"the tree, walked from state {state}", tree),
            titled("masks: which tokens are allowed", table(lines)),
            gap=40,
        ),
        "Letter → state; below it the token that ends there. ✗: there is no edge.",
        arrows=arrows,
        across=True,
    )


PICTURES = {"walk": walk}
show = walk

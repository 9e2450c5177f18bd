"""Phase 12: an automaton, the tree of a vocabulary that it walks, its masks, and a stack of states."""

from __future__ import annotations

from itertools import accumulate, chain

from benchmarks.pictures.svg import (
    Arrow,
    Box,
    Cell,
    Graph,
    Lines,
    Picture,
    Text,
    column,
    picture,
    row,
    table,
    titled,
)
from structured.automata.dfa import compile
from structured.automata.nodes import Call, Cat, literal
from structured.automata.pushdown import Machine, MaskMaker
from structured.automata.regex import parse
from structured.automata.trie import Trie

PATTERN = "(ab|c)+d"
TOKENS = ("a", "b", "ab", "abc", "c", "cd", "d", "bd", "abd")
STATES = range(4)
MEANINGS = (
    "0: nothing read yet",
    "1: after a, only b may follow",
    "2: after ab or c",
    "3: after d, the text may end",
)
NESTED = '{"a":[1]}'
RULES = {
    "object": Cat((literal('{"a":'), Call("array"), literal("}"))),
    "array": parse(r"\[([01](,[01])*)?\]"),
}
"""Two rules, the first of which calls the second, for the text `NESTED`."""


def automaton() -> Picture:
    """The states of the pattern, and the letters that lead from one to another."""
    dfa = compile(parse(PATTERN))
    edges = [
        (state, to, chr(letter))
        for state, reached in enumerate(dfa.table.tolist())
        for letter, to in enumerate(reached)
        if to >= 0
    ]
    graph = Graph(dfa.accepting.tolist(), edges)
    words = column(*(Text(meaning, "soft") for meaning in MEANINGS))
    return picture(f"The automaton of {PATTERN}", row(graph, words, gap=30))


def stack() -> Picture:
    """A column for each byte read: the stack of states after it, and what may come next.

    States have letters, because the states of the other pictures have numbers.
    """
    machine = Machine(RULES, "object")
    places = accumulate(NESTED.encode(), machine.step, initial=machine.start)
    stacks = [next(iter(place)) for place in places]
    names = dict(zip(dict.fromkeys(chain(*stacks)), "ABCDEFXYZG", strict=True))
    lines: Lines = [["byte read"], ["array"], ["object"], ["may come next"]]
    for read, states in zip(f"·{NESTED}", stacks, strict=True):
        top = states[-1]
        following = [chr(byte) for byte, to in enumerate(machine.table[top]) if to >= 0]
        shown: list[Box] = [Box(), Box()]
        for height, state in enumerate(states):
            look = "now" if state == top else "kept"
            shown[-1 - height] = Cell(names[state], f"{look} a", 60)
        texts = Text(read, "mid"), *shown, Text("\u2002".join(following) or "end", "mid")
        for line, item in zip(lines, texts, strict=True):
            line.append(item)
    return picture(
        f"The stack while {NESTED} is read",
        table(lines, down=5),
        "now a: on top: it reads the next byte",
        "kept a: below: it waits",
    )


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
        own = Cell(words if text else f"state {state}", look, 58)
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
        "Letter → state; below it the token that ends there. ✗: the node is dead.",
        arrows=arrows,
        across=True,
    )


PICTURES = {"automaton": automaton, "walk": walk, "stack": stack}
show = walk

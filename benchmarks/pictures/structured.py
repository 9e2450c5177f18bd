"""Phase 12: an automaton, the tree of a vocabulary, one walked over the other, and the masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import INK, LINE, NEUTRAL, PAPER, SOFT, Picture
from structured.automata.dfa import compile
from structured.automata.nodes import Call, Cat, literal
from structured.automata.pushdown import Machine, MaskMaker
from structured.automata.regex import parse
from structured.automata.trie import Trie

PATTERN = "(ab|c)+d"
TOKENS = ("a", "b", "ab", "abc", "c", "cd", "d", "bd", "abd")

RULES = {
    "object": Cat((literal('{"a":'), Call("array"), literal("}"))),
    "array": parse(r"\[([01](,[01])*)?\]"),
}
NESTED = '{"a":[1]}'
"""Two rules, the first of which calls the second, and a text of the first."""

PLACES = {0: (70, 100), 1: (210, 50), 2: (210, 150), 3: (350, 150)}
"""Where the states are drawn."""


@dataclass(frozen=True)
class Walk:
    """A walk of the tree from one state.

    texts: of each node, what leads to it; parents: of each node, the one before it.
    reached: the state in which each node ends, -1 where the automaton has no edge.
    """

    state: int
    texts: Sequence[str]
    parents: Sequence[int]
    reached: Sequence[int]


def record() -> tuple[
    Mapping[int, Mapping[str, int]], Sequence[int], Sequence[Walk], Sequence[Sequence[bool]]
]:
    """Edges of every state, those that may end, a walk from each, and each state's mask."""
    dfa = compile(parse(PATTERN))
    edges = {
        state: {chr(byte): int(target) for byte, target in enumerate(row) if target >= 0}
        for state, row in enumerate(dfa.table.tolist())
    }
    ends = [state for state, ends in enumerate(dfa.accepting.tolist()) if ends]
    trie = Trie([token.encode() for token in TOKENS])
    machine = Machine({"start": parse(PATTERN)}, "start")
    texts = [""]
    for node in range(1, trie.size):
        texts.append(texts[int(trie.parents[node])] + chr(trie.bytes[node]))
    walks = [
        Walk(state, texts, trie.parents.tolist(), trie.walk(machine.table, state).tolist())
        for state in edges
    ]
    maker = MaskMaker(machine, trie)
    words = [int(maker.mask(frozenset({(state,)}))[0]) for state in edges]
    return (
        edges,
        ends,
        walks,
        [[bool(word >> at & 1) for at in range(len(TOKENS))] for word in words],
    )


def automaton(edges: Mapping[int, Mapping[str, int]], ends: Sequence[int]) -> Picture:
    """States as circles, edges with the letter that is read."""
    picture = Picture(
        f"The automaton of {PATTERN}",
        "; ".join(
            f"from {state} {letter} leads to {to}"
            for state, row in edges.items()
            for letter, to in row.items()
        ),
        height=206,
        width=600,
    )
    picture.line([(24, 100), (PLACES[0][0] - 19, 100)], INK, tip=True)
    both = {(state, to) for state, row in edges.items() for to in row.values()}
    for state, row in edges.items():
        for letter, to in row.items():
            (x0, y0), (x1, y1) = PLACES[state], PLACES[to]
            if state == to:
                picture.loop(x0, y0, INK)
                picture.text(x0 + 32, y0 + 44, letter, bold=True)
                continue
            far = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            dx, dy = (x1 - x0) / far, (y1 - y0) / far
            side = 7 if (to, state) in both else 0  # there and back: beside each other
            sx, sy = -dy * side, dx * side
            begin = (x0 + 18 * dx + sx, y0 + 18 * dy + sy)
            end = (x1 - 19 * dx + sx, y1 - 19 * dy + sy)
            picture.line([begin, end], INK, tip=True)
            away = 12 if not side else 10
            x, y = (begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2
            up = -1 if not side else 1
            picture.text(
                x - up * dy * away, y + up * dx * away + 4, letter, "middle", bold=True
            )
    for state, (x, y) in PLACES.items():
        for radius in (18, 14) if state in ends else (18,):
            picture.circle(x, y, radius, PAPER, NEUTRAL)
        picture.text(x, y + 5, str(state), "middle", bold=True, size=14)
    for line, words in enumerate(
        (
            "0  nothing read yet",
            "1  after a: only b may follow",
            "2  after ab or c",
            "3  after d: the text may end",
        )
    ):
        picture.text(392, 40 + 22 * line, words, fill=SOFT)
    return picture


def walk(one: Walk, masks: Sequence[Sequence[bool]]) -> Picture:
    """The tree with the state that reaches each node, and the masks of all states."""
    wide = 58
    high = 27
    step = 84
    picture = Picture(
        f"The vocabulary's tree walked from state {one.state}, and the masks of all states",
        "Alive: "
        + " ".join(
            text
            for text, state in zip(one.texts, one.reached, strict=True)
            if text and state >= 0
        ),
        height=324,
    )
    picture.text(16, 28, f"the tree, walked from state {one.state}", bold=True)
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(one.parents[1:], 1):
        below.setdefault(parent, []).append(node)
    line = 0

    def place(node: int, depth: int) -> float:
        nonlocal line
        x = 16 + step * depth
        ys = [place(child, depth + 1) for child in below.get(node, ())]
        y = ys[0] if ys else 50.0 + 44 * line
        line += not ys
        for child_y in ys:
            bend = x + wide + 12
            across = [(x + wide, y + high / 2), (bend, y + high / 2)]
            picture.line([*across, (bend, child_y + high / 2), (x + step, child_y + high / 2)])
        text, state = one.texts[node], one.reached[node]
        words = (
            f"{text[-1]} → {state}"
            if text and state >= 0
            else f"{text[-1]} ✗"
            if text
            else f"in {state}"
        )
        picture.cell(
            x, y, wide, high, "idle" if state < 0 else "kept" if text else "known", "a", words
        )
        if text in TOKENS:
            picture.text(
                x + wide / 2, y + high + 11, text, "middle", SOFT if state < 0 else INK, 11
            )
        return y

    place(0, 0)
    picture.text(16, 290, "letter → state; the token of a node stands under it.", fill=SOFT)
    picture.text(
        16, 308, "✗: the automaton has no such edge, or the parent is dead.", fill=SOFT
    )
    left, top = 520, 62
    picture.line([(left - 92, 16), (left - 92, 268)], LINE)
    picture.text(left - 72, 28, "masks: which tokens are allowed", bold=True)
    for state in range(len(masks)):
        x = left + 50 * state
        picture.text(
            x + 25, top - 10, f"state {state}", "middle", size=11, bold=state == one.state
        )
    for at, token in enumerate(TOKENS):
        y = top + 22 * at
        picture.text(left - 14, y + 15, token, "end", mono=True)
        for state, mask in enumerate(masks):
            picture.cell(
                left + 50 * state,
                y,
                50,
                22,
                "now" if mask[at] else "free",
                "a" if state == one.state else "",
            )
    for state, mask in enumerate(masks):
        words = f"{sum(mask)} of {len(TOKENS)}"
        picture.text(
            left + 50 * state + 25, top + 22 * len(TOKENS) + 16, words, "middle", size=11
        )
    return picture


def stacks() -> Sequence[tuple[str, Sequence[str], str]]:
    """What was read, the one stack that is possible after it, and the bytes that may come next.

    The states of the stack have letters here, A to G in `object` and X to Z in `array`: the automaton of the
    other pictures has the states 0 to 3.
    """
    machine = Machine(RULES, "object")
    place = machine.start
    letters = iter("ABCDEFG"), iter("XYZ")
    names: dict[int, str] = {}
    found = []
    for at in range(len(NESTED) + 1):
        (stack,) = place
        for height, state in enumerate(stack):
            if state not in names:
                names[state] = next(letters[height])
        row = machine.table[stack[-1]].tolist()
        following = " ".join(chr(byte) for byte, state in enumerate(row) if state >= 0)
        found.append((NESTED[:at], [names[state] for state in stack], following or "end"))
        if at < len(NESTED):
            place = machine.step(place, ord(NESTED[at]))
    return found


def stack(found: Sequence[tuple[str, Sequence[str], str]]) -> Picture:
    """A column for each byte read: the stack after it, and what may come next."""
    wide = 66
    high = 30
    left = 96
    picture = Picture(
        f"The stack while {NESTED} is read",
        "; ".join(
            f"after {text or 'nothing'}: {' '.join(states)}" for text, states, _ in found
        ),
        height=176,
    )
    for y, words in (
        (28, "byte read"),
        (66, "array"),
        (100, "object"),
        (150, "may come next"),
    ):
        picture.text(8, y, words, bold=True, size=11)
    for at, (text, states, following) in enumerate(found):
        x = left + wide * at
        middle = x + wide / 2
        picture.text(middle, 28, text[-1:] or "·", "middle", mono=True, size=14)
        for height, state in enumerate(states):
            top = height == len(states) - 1
            y = 80 - 34 * height
            picture.cell(
                x + 3, y, wide - 6, high, "now" if top else "kept", "ab"[height], state
            )
        picture.text(middle, 150, following, "middle", mono=True)
    picture.line([(left, 36), (left + wide * len(found), 36)], LINE)
    picture.line([(left, 122), (left + wide * len(found), 122)], LINE)
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's three."""
    edges, ends, walks, masks = record()
    return {
        "automaton": automaton(edges, ends),
        "walk": walk(walks[0], masks),
        "stack": stack(stacks()),
    }


def show(state: int) -> Picture:
    """The walk from any state, 0 to 3."""
    _, _, walks, masks = record()
    return walk(walks[state], masks)

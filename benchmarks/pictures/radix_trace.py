"""Phase 08: one radix tree behind five calls of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import SOFT, STRONG, Kind, Picture
from prefix_cache.radix import Node, RadixIndex

CELL, HIGH = 34, 26
LEFT = 292
"""Of a block; where the trees begin."""


@dataclass(frozen=True)
class Run:
    """A node: letters and numbers of its blocks, its pins, and the nodes below it."""

    letters: str
    blocks: Sequence[int]
    pins: int
    below: Sequence[Run]


@dataclass(frozen=True)
class Call:
    """A call, what it did in a few words, and the tree behind it."""

    code: str
    says: str
    tree: Sequence[Run]


def _tree(index: RadixIndex) -> list[Run]:
    def run(node: Node) -> Run:
        letters = b"".join(node.keys).decode()
        below = [run(child) for child in node.children.values()]
        return Run(letters, list(node.blocks), node.pins, below)

    return [run(child) for root in index.roots for child in root.children.values()]


def _keys(letters: str) -> list[bytes]:
    """A letter is the tokens of a block."""
    return [letter.encode() for letter in letters]


def record() -> list[Call]:
    """Two requests enter a tree, compute, and leave; then three blocks are evicted."""
    index = RadixIndex()
    calls = []

    def note(code: str, says: str) -> None:
        calls.append(Call(code, says, _tree(index)))

    first, _, _ = index.extend(index.attach([], ""), _keys("abcd"), [0, 1, 2, 3])
    note('extend(root, "abcd", [0, 1, 2, 3])', "request 1 has computed four blocks")
    second = index.attach(_keys("ab"), "")
    note('attach("ab")', "request 2 found two: the node is cut")
    second, _, _ = index.extend(second, _keys("xy"), [4, 5])
    note('extend(cursor 2, "xy", [4, 5])', "it has computed two of its own")
    index.detach(first)
    note("detach(cursor 1)", f"request 1 ends: {index.evictable} blocks may go")
    index.detach(second)
    freed = ", ".join(map(str, index.evict(3)))
    note("detach(cursor 2), evict(3)", f"freed, in this order: {freed}")
    return calls


def calls(found: Sequence[Call]) -> Picture:
    """A row for each call: what was called, and the tree that it leaves."""
    high = 78
    picture = Picture(
        "A radix tree behind five calls",
        "; ".join(
            f"{call.code}: {', '.join(_words(run) for run in call.tree)}" for call in found
        ),
        height=high * len(found) + 42,
    )
    for line, call in enumerate(found):
        y = 14 + high * line
        picture.text(14, y + 22, call.code, mono=True, size=11)
        picture.text(14, y + 40, call.says, fill=SOFT)
        for run in call.tree:
            _draw(picture, run, LEFT, y + 8)
    picture.legend(
        14,
        picture.height - 14,
        [
            ("kept", "a", "pinned"),
            ("idle", "", "no pins: may be evicted"),
        ],
    )
    picture.text(
        292, picture.height - 13, "letter: tokens of a block; number: the block", fill=SOFT
    )
    return picture


def _words(run: Run) -> str:
    below = "".join(f" above ({_words(child)})" for child in run.below)
    return f"{run.letters} in blocks {list(run.blocks)} with {run.pins} pins{below}"


def _draw(picture: Picture, run: Run, x: float, y: float) -> None:
    """Draw a node and, to its right, those below it, one under the other."""
    for at, (letter, block) in enumerate(zip(run.letters, run.blocks, strict=True)):
        kind: Kind = "kept" if run.pins else "idle"
        picture.cell(x + CELL * at, y, CELL, HIGH, kind, "a", f"{letter} {block}")
    end = x + CELL * len(run.blocks)
    pins = f"{run.pins} pin{'s' * (run.pins != 1)}"
    bend = end + 44
    for at, child in enumerate(run.below):
        row = y + (HIGH + 8) * at
        picture.line(
            [(bend, y + HIGH / 2), (bend, row + HIGH / 2), (bend + 16, row + HIGH / 2)]
        )
        _draw(picture, child, bend + 16, row)
    picture.text(end + 4, y + 17, pins, size=11, fill=STRONG["a"] if run.pins else SOFT)


def pictures() -> dict[str, Picture]:
    """The one of these calls."""
    return {"trace": calls(record())}

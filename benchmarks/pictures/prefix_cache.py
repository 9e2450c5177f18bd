"""Phase 08: the radix tree as it is cut, with pins and users, and what is forgotten first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import prefix_cache
from benchmarks.pictures import radix_trace
from benchmarks.pictures.driving import blocks, exactly, tiny
from benchmarks.pictures.svg import (
    GREY,
    INK,
    LINE,
    NEUTRAL,
    PALE,
    PAPER,
    SOFT,
    STRONG,
    Picture,
)
from common.request import Request
from prefix_cache.radix import Node

P = 4
PROMPTS = ("You are helpful. Who?", "You are helpful. Why?", "You are")
OUTPUTS = (3, 4, 2)
"""So that the first runs when the second comes, and has ended when the third comes."""
TITLES = ("a runs", "b comes: the node is cut", "a has ended, c comes")
SHARED, ALONE = (GREY, NEUTRAL), (PAPER, "#b9b2a5")
"""Colours of a node that several requests pin, and of one that none does."""


@dataclass(frozen=True)
class Stretch:
    """A node of the tree: the texts of its blocks, their numbers and users, its pins and what is below."""

    texts: Sequence[str]
    blocks: Sequence[int]
    users: Sequence[int]
    pins: int
    below: Sequence[Stretch]


@dataclass(frozen=True)
class Moment:
    """The tree after a step, and of each running request its table and how much of it was found."""

    tree: Sequence[Stretch]
    tables: Mapping[str, list[int]]
    found: Mapping[str, int]


def _load(count: int) -> Any:
    return prefix_cache.load(tiny(), **blocks(count, P), max_rows=4, max_len=128)


def _add(engine: Any, prompt: str, output: int) -> Request:
    (request,) = engine.add([ord(letter) for letter in prompt], exactly(output))
    assert isinstance(request, Request)
    return request


def _text(key: bytes) -> str:
    return "".join(chr(code) for code in memoryview(key).cast("i"))


def _tree(engine: Any) -> list[Stretch]:
    def stretch(node: Node) -> Stretch:
        users = [engine.cache.allocator.refs[block] for block in node.blocks]
        below = [stretch(child) for child in node.children.values()]
        return Stretch(
            [_text(key) for key in node.keys], list(node.blocks), users, node.pins, below
        )

    return [
        stretch(child) for root in engine.cache.index.roots for child in root.children.values()
    ]


def record() -> list[Moment]:
    """Three requests that begin alike; a moment for each, after the step that computes its prompt."""
    engine = _load(16)
    requests: dict[str, Request] = {}
    moments = []
    for name, prompt, output in zip("abc", PROMPTS, OUTPUTS, strict=True):
        requests[name] = _add(engine, prompt, output)
        engine.step()
        running = {who: one for who, one in requests.items() if one.finish_reason is None}
        moments.append(
            Moment(
                _tree(engine),
                {who: engine.cache.blocks_of(one.row) for who, one in running.items()},
                {who: one.cached_tokens for who, one in running.items()},
            )
        )
        if name == "b":
            engine.step()
    return moments


def _levels(nodes: Sequence[Stretch], depth: int = 0) -> Iterator[tuple[int, Stretch]]:
    for node in nodes:
        yield depth, node
        yield from _levels(node.below, depth + 1)


def tree(moments: Sequence[Moment]) -> Picture:
    """The tree at each moment, beside each other: a node's pins, and every block's number and users."""
    column = 244
    picture = Picture(
        "The radix tree while three requests come and the first one ends",
        "; ".join(
            ", ".join(
                f"{''.join(n.texts)!r} has {n.pins} pins, users {list(n.users)}"
                for _, n in _levels(m.tree)
            )
            for m in moments
        ),
        height=380,
    )
    for at, (moment, title) in enumerate(zip(moments, TITLES, strict=False)):
        left = 16 + column * at
        picture.text(left, 26, title, bold=True)
        for line, (who, table) in enumerate(moment.tables.items()):
            y = 46 + 18 * line
            picture.text(left, y, who, bold=True, fill=STRONG[who])
            words = f"found {moment.found[who]} tokens, table {' '.join(map(str, table))}"
            picture.text(left + 14, y, words, fill=SOFT)
        (root,) = moment.tree
        _draw(picture, root, moment, left, 106)
        if at:
            picture.line([(left - 14, 14), (left - 14, 336)], LINE)
    x = 16.0
    for (fill, stroke), words in (
        ((PALE["a"], STRONG["a"]), "pinned by one request"),
        (SHARED, "by several"),
        (ALONE, "no pins: only the memory uses it, so it can be evicted"),
    ):
        picture.box(x, 352, 18, 15, fill, stroke)
        picture.text(x + 24, 364, words, fill=SOFT)
        x += 46 + 6.8 * len(words)
    return picture


def _draw(picture: Picture, node: Stretch, moment: Moment, x: float, y: float) -> float:
    """Draw a node and what is below it; returns where the next one beside it may begin."""
    cell = 44
    wide = cell * len(node.texts)
    pinned = node.pins > 0
    whose = [who for who, table in moment.tables.items() if node.blocks[-1] in table]
    assert len(whose) == node.pins, "a pin for each request that uses the node's blocks"
    for at, (text, block, users) in enumerate(
        zip(node.texts, node.blocks, node.users, strict=True)
    ):
        left = x + cell * at
        fill, stroke = SHARED if len(whose) > 1 else ALONE
        if len(whose) == 1:
            fill, stroke = PALE[whose[0]], STRONG[whose[0]]
        picture.box(left + 1, y, cell - 2, 26, fill, stroke)
        shown = text.replace(" ", "␣")
        picture.text(
            left + cell / 2, y + 17, shown, "middle", INK if pinned else SOFT, mono=True
        )
        picture.text(left + cell / 2, y + 41, f"block {block}", "middle", SOFT, 11)
        words = "1 user" if users == 1 else f"{users} users"
        picture.text(left + cell / 2, y + 55, words, "middle", INK if users > 1 else SOFT, 11)
    pins = {0: "no pins", 1: "1 pin"}.get(node.pins, f"{node.pins} pins")
    picture.text(x + 2, y - 6, pins, fill=INK if pinned else SOFT, bold=pinned, size=11)
    right = x
    for child in node.below:
        below = y + 88
        middle = right + cell / 2
        picture.line(
            [(x + 8, y + 60), (x + 8, below - 22), (middle, below - 22), (middle, below - 18)]
        )
        right = _draw(picture, child, moment, right, below)
    return max(x + wide, right) + 14


def record_forgetting() -> list[tuple[str, dict[str, int]]]:
    """Prompts of four blocks into a pool of twelve, one by one, and how many blocks of each are kept."""
    engine = _load(12)
    moments = []
    for who in "abacd":
        _add(engine, who * 16 + "?", 1)
        while not engine.idle:
            engine.step()
        held = {node.texts[0][0]: len(node.blocks) for node in _tree(engine)}
        moments.append((who, held))
    return moments


def forgotten(moments: Sequence[tuple[str, Mapping[str, int]]]) -> Picture:
    """What the memory holds after each request: the oldest go first, and each from its end."""
    cell = 27
    column = 124
    left = 128
    names = sorted({who for who, _ in moments})
    picture = Picture(
        "What is remembered in a pool of twelve blocks",
        "; ".join(f"after {who}: {dict(held)}" for who, held in moments),
        height=62 + 34 * len(names) + 40,
    )
    seen: set[str] = set()
    for at, (who, held) in enumerate(moments):
        x = left + column * at
        again = " again" if who in seen else ""
        seen.add(who)
        picture.text(x, 28, f"after {who}{again}", bold=True, fill=STRONG[who])
        for line, name in enumerate(names):
            y = 42 + 34 * line
            for place in range(4 if name in seen else 0):
                kept = place < held.get(name, 0)
                picture.cell(
                    x + cell * place,
                    y,
                    cell,
                    27,
                    "kept" if kept else "free",
                    name,
                    "" if kept else "×",
                )
        total = sum(held.values())
        picture.text(x, 42 + 34 * len(names) + 20, f"{total} blocks kept", fill=SOFT)
    for line, name in enumerate(names):
        picture.text(left - 14, 42 + 34 * line + 18, f"prompt {name}", "end")
    picture.legend(
        left, 42 + 34 * len(names) + 46, [("kept", "a", "a block that is remembered")]
    )
    picture.text(
        left + 220,
        42 + 34 * len(names) + 47,
        "×  evicted: the least recently used first, from its end",
        fill=SOFT,
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's three."""
    drawn = {"tree": tree(record()), "evict": forgotten(record_forgetting())}
    return drawn | radix_trace.pictures()


def show(moment: int) -> Picture:
    """The tree up to when request 1, 2 or 3 has come."""
    return tree(record()[:moment])

"""Phase 08: the radix tree as it is cut, with pins and users, and what is forgotten first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import prefix_cache
from benchmarks.pictures.driving import blocks, exactly, tiny
from benchmarks.pictures.svg import (
    Arrow,
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    cells,
    column,
    picture,
    row,
    table,
    titled,
)
from common.request import Request
from prefix_cache.radix import Node

P = 4
PROMPTS = {"a": "You are helpful. Who?", "b": "You are helpful. Why?", "c": "You are"}
OUTPUTS = {"a": 3, "b": 4, "c": 2}
"""So that the first runs when the second comes, and has ended when the third comes."""
TITLES = {"a": "a runs", "b": "b comes: the node is cut", "c": "a has ended, c comes"}


def load(count: int) -> Any:
    """Phase 08's engine with a pool of so many blocks."""
    return prefix_cache.load(tiny(), **blocks(count, P), max_rows=4, max_len=128)


def add(engine: Any, prompt: str, output: int) -> Any:
    """Add a request whose tokens are letters."""
    (request,) = engine.add([ord(letter) for letter in prompt], exactly(output))
    return request


def top(engine: Any) -> list[Node]:
    """The nodes below the tree's root."""
    return [node for root in engine.cache.index.roots for node in root.children.values()]


def texts(node: Node) -> list[str]:
    """The letters of each block of a node."""
    return ["".join(map(chr, memoryview(key).cast("i"))) for key in node.keys]


def branch(
    node: Node, tables: Mapping[str, list[int]], arrows: list[Arrow]
) -> tuple[Box, Box]:
    """A node with all that is below it, and the node alone.

    tables: of running requests. arrows: gets those of the branch.
    """
    whose = [who for who, table in tables.items() if node.blocks[-1] in table]
    assert len(whose) == node.pins, "a pin for each request that uses the node's blocks"
    look = "kept" if len(whose) > 1 else f"kept {whose[0]}" if whose else "idle"
    shown = [Cell(text.replace(" ", "␣"), look, 44) for text in texts(node)]
    numbers = [Text(str(block), "mid soft") for block in node.blocks]
    pins = Text(f"{node.pins} pin{'s' * (node.pins != 1)}")
    own = table([[pins], shown, numbers], label=0)
    below = []
    for child in node.children.values():
        whole, start = branch(child, tables, arrows)
        below.append(whole)
        arrows.append((own, start, ""))
    return row(own, column(*below, gap=4), gap=36) if below else own, own


def tree(count: int = len(PROMPTS)) -> Picture:
    """Let requests that begin alike come one by one, and show the tree after the step of each prompt."""
    engine = load(16)
    requests: dict[str, Request] = {}
    moments: Lines = []
    arrows: list[Arrow] = []
    for who, prompt in list(PROMPTS.items())[:count]:
        requests[who] = add(engine, prompt, OUTPUTS[who])
        engine.step()
        running = {name: one for name, one in requests.items() if one.finish_reason is None}
        tables = {name: engine.cache.blocks_of(one.row) for name, one in running.items()}
        says = []
        for name, one in running.items():
            numbers = " ".join(map(str, tables[name]))
            says.append(
                Text(f"{name} found {one.cached_tokens} tokens, table {numbers}", name)
            )
        (node,) = top(engine)
        whole, _ = branch(node, tables, arrows)
        moments.append([titled(TITLES[who], *says), whole])
        if who == "b":
            engine.step()
    return picture(
        "The radix tree while three requests come and the first one ends",
        table(moments, down=14, label=32),
        "kept a: pinned by one request",
        "kept: by several",
        "idle: by none: only the memory uses it",
        "number: its block",
        arrows=arrows,
        across=True,
    )


def forgotten() -> Picture:
    """Prompts of four blocks into a pool of twelve, one by one, and how many blocks of each are kept."""
    engine = load(12)
    order = "abacd"
    columns: Lines = [["", *(f"prompt {who}" for who in sorted(set(order))), ""]]
    for at, who in enumerate(order):
        add(engine, who * 16 + "?", 1)
        while not engine.idle:
            engine.step()
        held = {texts(node)[0][0]: len(node.blocks) for node in top(engine)}
        again = " again" if who in order[:at] else ""
        columns.append([Text(f"after {who}{again}", f"bold mid {who}")])
        for name in sorted(set(order)):
            kept = held.get(name, 0)
            gone = 4 - kept if name in order[: at + 1] else 0
            looks = [f"kept {name}"] * kept + ["free"] * gone
            columns[-1].append(cells([""] * kept + ["×"] * gone, looks, 27))
        columns[-1].append(f"{sum(held.values())} blocks kept")
    return picture(
        "What is remembered in a pool of twelve blocks",
        table(zip(*columns, strict=True), gap=16, down=6),
        "kept a: a block that is remembered",
        "× evicted: the least recently used first, from its end",
    )


PICTURES = {"tree": tree, "evict": forgotten}
show = tree

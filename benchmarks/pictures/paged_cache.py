"""Phase 05: block tables over a pool, copy on write, and a preemption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paged_cache
from benchmarks.pictures.driving import blocks as in_blocks
from benchmarks.pictures.driving import exactly, steps, tiny
from benchmarks.pictures.svg import (
    Arrow,
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    cells,
    picture,
    row,
    table,
    titled,
)

P = 4
"""Tokens in a block."""


class Step(NamedTuple):
    """What stands where when a step has been scheduled.

    tables: of each running request (a letter) its blocks.
    stored: tokens whose keys are in them once the step has run; `fresh` of these are computed in it.
    users: of each block of the pool.
    """

    tables: dict[str, list[int]]
    stored: dict[str, int]
    fresh: dict[str, int]
    users: list[int]


def record(prompts: Sequence[int], output: int, blocks: int, n: int = 1) -> list[Step]:
    """Serve requests with prompts of these lengths, and note every step.

    blocks: in the pool. n: samples of each prompt.
    """
    engine: Any = paged_cache.load(tiny(), **in_blocks(blocks, P), max_rows=4, max_len=64)
    requests = []
    for at, length in enumerate(prompts):
        requests += engine.add([7 + at] * length, exactly(output, n=n))
    names = dict(zip(requests, "ab", strict=True))
    found = []
    for works in steps(engine):
        running = {name: one for one, name in names.items() if one in engine.scheduler.running}
        tables = {name: engine.cache.blocks_of(one.row) for name, one in running.items()}
        stored = {name: one.num_computed_tokens for name, one in running.items()}
        fresh = {names[work.request]: work.count for work in works}
        found.append(Step(tables, stored, fresh, list(engine.cache.allocator.refs)))
    return found


def tokens(step: Step, block: int, shared: int = 0) -> list[tuple[str, str]]:
    """Name and look of each token in a block; the first `shared` of several samples belong to all."""
    found = [("", "free")] * P
    for who, blocks in step.tables.items():
        first = blocks.index(block) * P if block in blocks else step.stored[who]
        for token in range(first, min(first + P, step.stored[who])):
            kind = "now" if token >= step.stored[who] - step.fresh.get(who, 0) else "kept"
            owner = who if token >= shared else ""
            if not found[token - first][1].startswith("now"):  # another computes it for both
                found[token - first] = (f"{owner or 'p'}{token}", f"{kind} {owner}")
    return found


def filled(step: Step, block: int, shared: int = 0) -> Box:
    """A block as a row of its tokens."""
    return row(*(Cell(name, look, 21) for name, look in tokens(step, block, shared)))


def growing(number: int = 5) -> Picture:
    """A step of two requests: their tokens in order, and through their block tables where they are."""
    step = record(prompts=(5, 3), output=6, blocks=8)[number - 1]
    pool = [filled(step, block) for block in range(len(step.users))]
    requests: list[Box] = []
    arrows: list[Arrow] = []
    for who, blocks in step.tables.items():
        entries = [Cell(str(block), f"known {who}", 84, 24) for block in blocks]
        arrows += [(entry, pool[int(entry.says)], who) for entry in entries]
        lines = table([[filled(step, block) for block in blocks], entries], 8, 4, label=8)
        words = f"request {who}: {step.stored[who]} tokens, and its table"
        requests.append(titled(words, lines))
    numbers = [Text(f"block {block}", "mid soft") for block in range(len(pool))]
    return picture(
        "Block tables and the pool",
        row(*requests, gap=56),
        table([[Box(0, 24)], pool, numbers], 8, label=8),
        "kept a: computed before",
        "now a: computed in this step",
        "free: no token yet",
        arrows=arrows,
    )


def copied() -> Picture:
    """Two samples of one prompt: shared blocks, and the copy that the first write makes."""
    prompt = 6
    titles = (
        "1: the prompt, once for both",
        "2: a would write: it copies",
        "3: full blocks stay shared",
    )
    moments = []
    for title, step in zip(titles, record((prompt,), output=4, blocks=3, n=2), strict=False):
        lines: Lines = [
            [f"{who}'s table", cells(blocks, [f"known {who}"], 34)]
            for who, blocks in step.tables.items()
        ]
        lines.append([Box(0, 12)])
        for block, users in enumerate(step.users):
            words = f"{users} users" if users > 1 else "1 user" if users else "free"
            style = "bold" if users > 1 else "soft"
            lines.append([f"block {block}", filled(step, block, prompt), Text(words, style)])
        moments.append(titled(title, table(lines, 8, 4)))
    return picture(
        "Two samples share their prompt until one of them writes",
        row(*moments, gap=24),
        "now: the prompt, computed in this step",
        "kept: and before",
        "now a: a writes",
        "now b: b writes",
    )


def preempted() -> Picture:
    """The pool over the steps: two requests grow until one has to go, and comes back."""
    steps = record(prompts=(5, 5), output=11, blocks=6)
    without = [at for at, step in enumerate(steps, 1) if "b" not in step.tables]
    lost, back = without[0], without[-1] + 1
    lines: Lines = [[""] * (1 + len(steps)), ["step", *range(1, 1 + len(steps))]]
    lines[0][lost] = Text("no block is free: b gives back its own ↓", "b end", 44)
    lines[0][back] = Text(f"↓ b: {steps[back - 1].fresh['b']} tokens again", "b", 44)
    for block in range(len(steps[0].users)):
        lines.append([f"block {block}"])
        for step in steps:
            looks = [look for name, look in tokens(step, block) if name]
            look = max(looks, default="free")
            lines[-1].append(Cell(f"{look[-1]} {len(looks)}" if looks else "", look, 44))
    for who in "ab":
        lines.append([f"{who} computes", *(step.fresh.get(who, "") for step in steps)])
    return picture(
        "The blocks of the pool over the steps of a preemption",
        table(lines),
        "now a: written in this step",
        "kept a: in use",
        "free: free",
        f"numbers: tokens in the block, of {P}",
    )


PICTURES = {"blocks": growing, "copy": copied, "preempt": preempted}
show = growing

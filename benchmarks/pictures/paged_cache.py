"""Phase 05: block tables over a pool, copy on write, and a preemption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paged_cache
from benchmarks.pictures.driving import blocks as in_blocks
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.driving import steps as driven
from benchmarks.pictures.svg import INK, SOFT, STRONG, Kind, Picture
from common.request import Request

P = 4
"""Tokens in a block."""
CELL, BLOCK = 21, 92
"""Width of a token, and from one block to the next."""


@dataclass(frozen=True)
class Step:
    """What stands where when a step has been scheduled.

    tables: of each request (a letter) its blocks.
    stored: tokens whose keys are in them once the step has run; `fresh` of these are computed in it.
    users: of each block of the pool.
    copies: from which block to which, before anything is written.
    waiting: requests without blocks.
    """

    tables: Mapping[str, list[int]]
    stored: Mapping[str, int]
    fresh: Mapping[str, int]
    users: Sequence[int]
    copies: Sequence[tuple[int, int]] = ()
    waiting: Sequence[str] = ()


def record(prompts: Sequence[int], output: int, blocks: int, n: int = 1) -> list[Step]:
    """Serve requests with prompts of these lengths, and note every step.

    blocks: in the pool. n: samples of each prompt.
    """
    engine = paged_cache.load(tiny(), **in_blocks(blocks, P), max_rows=4, max_len=64)
    params = exactly(output, n=n)
    requests = [
        request
        for at, length in enumerate(prompts)
        for request in engine.add([7 + at] * length, params, index=at)
    ]
    names = dict(zip(requests, "abcdef", strict=False))
    steps: list[Step] = []
    for works in driven(engine):
        running: dict[str, Request] = {names[one]: one for one in engine.scheduler.running}
        steps.append(
            Step(
                {
                    name: engine.cache.blocks_of(one.row)
                    for name, one in sorted(running.items())
                },
                {name: one.num_computed_tokens for name, one in running.items()},
                {names[work.request]: work.count for work in works},
                list(engine.cache.allocator.refs),
                list(engine.cache._copies),
                [names[one] for one in engine.scheduler.waiting],
            )
        )
    return steps


def _cells(step: Step, block: int, shared: int = 0) -> list[tuple[Kind, str, str]]:
    """The tokens of a block: how they look, their owner, and what they are called.

    shared: tokens at the beginning that belong to all, the prompt of several samples.
    """
    found: list[tuple[Kind, str, str]] = [("free", "", "")] * P
    for who, table in step.tables.items():
        for place, number in enumerate(table):
            for at in range(P if number == block else 0):
                token = place * P + at
                if token < step.stored[who]:
                    new = token >= step.stored[who] - step.fresh.get(who, 0)
                    owner, name = (
                        ("", f"p{token}") if token < shared else (who, f"{who}{token}")
                    )
                    if found[at][0] != "now":  # another request computes it for both
                        found[at] = ("now" if new else "kept", owner, name)
    return found


def blocks(step: Step) -> Picture:
    """Each request's tokens in its own order, and through its block table where they are."""
    says = ", ".join(f"{who}'s table is {table}" for who, table in step.tables.items())
    picture = Picture(
        "Block tables and the pool",
        f"{says}. Blocks of {P} tokens; a block is taken when its first token is written.",
        height=292,
    )
    width = [len(table) * BLOCK for table in step.tables.values()]
    x = (760 - sum(width) - 56 * (len(width) - 1)) / 2
    pool = 196
    place = {number: 14 + BLOCK * number for number in range(len(step.users))}
    for (who, table), wide in zip(step.tables.items(), width, strict=True):
        stored = step.stored[who]
        picture.text(x, 26, f"request {who}", bold=True, fill=STRONG[who])
        picture.text(x + 74, 26, f"{stored} tokens", fill=SOFT)
        for entry, number in enumerate(table):
            left = x + BLOCK * entry
            for at in range(P):
                token = entry * P + at
                kind: Kind = "now" if token >= stored - step.fresh.get(who, 0) else "kept"
                name = f"{who}{token}" if token < stored else ""
                picture.cell(
                    left + CELL * at, 36, CELL, 26, kind if name else "free", who, name
                )
            middle = left + P * CELL / 2
            picture.line([(middle, 63), (middle, 80)], STRONG[who])
            picture.cell(middle - 16, 80, 32, 26, "known", who, str(number))
            picture.curve((middle, 107), (place[number] + P * CELL / 2, pool - 6), STRONG[who])
        if table:
            picture.text(x - 8, 97, "table" if x > 60 else "", "end", SOFT)
        x += wide + 56
    for number, left in place.items():
        colour = INK if step.users[number] else SOFT
        picture.text(left + P * CELL / 2, pool + 42, f"block {number}", "middle", colour)
        if not step.users[number]:
            picture.cell(left, pool, P * CELL, 26, "free", words="free")
            continue
        for at, (kind, who, name) in enumerate(_cells(step, number)):
            picture.cell(left + CELL * at, pool, CELL, 26, kind, who, name)
    picture.legend(
        16,
        276,
        [
            ("kept", "a", "computed before"),
            ("now", "a", "computed in this step"),
            ("free", "", "no token yet"),
        ],
    )
    return picture


def copied(steps: Sequence[Step], prompt: int) -> Picture:
    """Two samples of one prompt: shared blocks, and the copy that the first write makes."""
    picture = Picture(
        "Two samples share their prompt until one of them writes",
        "; ".join(
            f"step {at}: a's table {step.tables['a']}, b's table {step.tables['b']}, "
            f"users {step.users}, copies {step.copies}"
            for at, step in enumerate(steps, 1)
        ),
        height=268,
    )
    titles = [
        "the prompt, once for both",
        "a would write: it copies",
        "full blocks stay shared",
    ]
    for at, (step, title) in enumerate(zip(steps, titles, strict=True)):
        left = 20 + 248 * at
        picture.text(left, 26, f"step {at + 1}", bold=True)
        picture.text(left + 48, 26, title, fill=SOFT)
        for line, (who, table) in enumerate(step.tables.items()):
            y = 40 + 32 * line
            picture.text(left, y + 18, who, bold=True, fill=STRONG[who])
            picture.text(left + 16, y + 18, "table", fill=SOFT)
            for entry, number in enumerate(table):
                picture.cell(left + 56 + 34 * entry, y, 34, 27, "known", who, str(number))
        for number, users in enumerate(step.users):
            y = 120 + 34 * number
            picture.text(left, y + 18, f"block {number}", fill=INK if users else SOFT)
            for slot, (kind, who, name) in enumerate(_cells(step, number, prompt)):
                picture.cell(left + 56 + 25 * slot, y, 25, 27, kind, who, name)
            words = {0: "free", 1: "1 user"}.get(users, f"{users} users")
            picture.text(
                left + 178, y + 18, words, fill=INK if users else SOFT, bold=users > 1
            )
        for source, target in step.copies:
            y0 = 134 + 34 * source
            y1 = 134 + 34 * target
            x = left + 158
            picture.line([(x, y0), (x + 12, y0), (x + 12, y1), (x, y1)], STRONG["a"], tip=True)
    picture.legend(
        20,
        252,
        [
            ("now", "", "the prompt, computed in this step"),
            ("kept", "", "and before"),
            ("now", "a", "a writes"),
            ("now", "b", "b writes"),
        ],
    )
    return picture


def preempted(steps: Sequence[Step]) -> Picture:
    """The pool over the steps: two requests grow until one has to go, and comes back."""
    cell = 44
    left = 112
    top = 62
    lost = next(at for at, step in enumerate(steps) if step.waiting)
    back = next(at for at in range(lost, len(steps)) if not steps[at].waiting)
    (who,) = steps[lost].waiting
    again = steps[back].fresh[who]
    high = 28
    picture = Picture(
        "The blocks of the pool over the steps of a preemption",
        f"In step {lost + 1} no block is free: {who} gives all of its own back and waits. "
        f"In step {back + 1} it computes {again} tokens at once.",
        height=top + high * len(steps[0].users) + 108,
    )
    bottom = top + high * len(steps[0].users)
    for number in range(len(steps[0].users)):
        picture.text(left - 12, top + high * number + 18, f"block {number}", "end", SOFT)
    for name in ("a", "b"):
        y = bottom + (24 if name == "a" else 44)
        picture.text(left - 12, y, f"{name} computes", "end", STRONG[name])
        for at, step in enumerate(steps):
            count = step.fresh.get(name)
            words = str(count) if count else "waits" if name in step.waiting else ""
            x = left + cell * at + cell / 2
            picture.text(x, y, words, "middle", INK if count else SOFT, bold=(count or 0) > 1)
    for at, step in enumerate(steps):
        x = left + cell * at
        picture.text(x + cell / 2, top - 8, str(at + 1), "middle", SOFT)
        for number in range(len(step.users)):
            cells = _cells(step, number)
            held = [(kind, owner) for kind, owner, name in cells if name]
            kind: Kind = "free"
            owner = next(
                (owner for owner, table in step.tables.items() if number in table), ""
            )
            if held:
                kind = "now" if any(how == "now" for how, _ in held) else "kept"
            words = f"{owner} {len(held)}" if held else ""
            picture.cell(x, top + high * number, cell, high - 1, kind, owner, words)
    picture.text(left - 12, top - 8, "step", "end", SOFT)
    x = left + cell * lost
    picture.line([(x, 18), (x, bottom + 4)], STRONG[who], dash="4 3")
    picture.text(x - 6, 28, f"no block is free: {who} gives back its own", "end", STRONG[who])
    x = left + cell * back
    picture.line([(x, 18), (x, bottom + 4)], STRONG[who], dash="4 3")
    picture.text(x + 6, 28, f"{again} tokens again", fill=STRONG[who])
    picture.legend(
        left,
        bottom + 84,
        [("now", "a", "written in this step"), ("kept", "a", "in use"), ("free", "", "free")],
    )
    picture.text(744, bottom + 85, f"numbers: tokens in the block, of {P}", "end", SOFT)
    return picture


GROWING: dict[str, Any] = {"prompts": (5, 3), "output": 6, "blocks": 8}


def pictures() -> dict[str, Picture]:
    """The lesson's three."""
    growing = record(**GROWING)
    return {
        "blocks": blocks(next(step for step in growing if step.stored["a"] == 9)),
        "copy": copied(record(prompts=(6,), output=4, blocks=3, n=2)[:3], prompt=6),
        "preempt": preempted(record(prompts=(5, 5), output=11, blocks=6)),
    }


def show(step: int) -> Picture:
    """Tables and pool in any step of two requests that grow, from 1 on."""
    return blocks(record(**GROWING)[step - 1])

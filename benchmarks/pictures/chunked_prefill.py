"""Phase 07: one budget a step beside whole prompts, and decodes that take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import chunked_prefill
import paged_cache
from benchmarks.pictures import chunk_mask
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.driving import steps as driven
from benchmarks.pictures.svg import INK, SOFT, STRONG, WIDTH, Picture
from common.request import Request

BUDGET, PROMPT = 8, 20
COLOURS = {"L": "c"}
"""The long prompt has the third request's colour."""

Step = dict[str, int]
"""How many tokens of each request (a letter) a step computes, in the order in which they are served."""


def counts(engine: Any, names: str) -> Iterator[Step]:
    """Run steps, and say what each computes."""
    for works in driven(engine):
        yield {names[work.request.index]: work.count for work in works}


def record(budget: int | None, after: int = 2) -> list[Step]:
    """`a` and `b` decode; after so many steps `L` arrives. With a budget by phase 07, without by phase 05.

    Until `L` has its third token.
    """
    sizes: dict[str, Any] = {"max_rows": 4, "max_len": 64}
    if budget is None:
        engine = paged_cache.load(tiny(), **sizes)
    else:
        engine = chunked_prefill.load(tiny(), step_tokens=budget, **sizes)
    for at in range(2):
        engine.add([at + 1] * 2, exactly(40), index=at)
    run = counts(engine, "abL")
    next(run)  # their prompts
    found = [next(run) for _ in range(after)]
    (long,) = engine.add([9] * PROMPT, exactly(3), index=2)
    for one in run:
        if long.finish_reason is not None:
            break
        found.append(one)
    return found


def record_turns(count: int = 10) -> list[Step]:
    """So many decodes, and a prompt that arrives among them, until it is computed."""
    engine = chunked_prefill.load(tiny(), step_tokens=BUDGET, max_rows=16, max_len=128)
    decodes: list[Request] = [
        engine.add([at + 1], exactly(60), index=at)[0] for at in range(count)
    ]
    while any(not request.output_ids for request in decodes):
        engine.step()
    (prompt,) = engine.add([99] * PROMPT, exactly(2), index=count)
    found = []
    for one in counts(engine, "abcdefghij"[:count] + "L"):
        if prompt.output_ids:
            break
        found.append(one)
    return found


def budget(lanes: Sequence[tuple[str, Sequence[Step]]], after: int = 2) -> Picture:
    """Lanes of steps, a cell for each computed token; the wider a step, the longer `a` and `b` wait."""
    left, high = 52, 100
    room = min(
        (WIDTH - left - 8 - 5 * len(steps)) / sum(sum(one.values()) for one in steps)
        for _, steps in lanes
    )
    cell = min(17, int(room))
    picture = Picture(
        "A long prompt among two decodes, with and without a budget",
        "; ".join(
            f"{name}: steps of {[sum(one.values()) for one in steps]} tokens"
            for name, steps in lanes
        ),
        height=30 + high * len(lanes) + 30,
    )
    for lane, (name, steps) in enumerate(lanes):
        y = 36 + high * lane
        picture.text(left - 14, y + 38, name, "end", bold=True)
        x, behind = float(left), PROMPT
        widest = max(range(len(steps)), key=lambda at: sum(steps[at].values()))
        for at, one in enumerate(steps):
            if at == after:
                picture.line([(x - 3, y), (x - 3, y + 52)], STRONG["c"], dash="3 2")
                picture.text(x - 7, y + 6, "L arrives", "end", STRONG["c"])
            begin = x
            for who, count in one.items():
                for _ in range(count):
                    picture.cell(x, y + 20, cell, 26, "now", COLOURS.get(who, who), who)
                    x += cell
            if at == widest:
                picture.line([(begin, y + 58), (begin, y + 62), (x, y + 62), (x, y + 58)])
                words = f"{sum(one.values())} tokens: the longest step, and the longest wait of a and b"
                picture.text(max(begin, left), y + 77, words, fill=INK)
            done, behind = behind, behind - one.get("L", 0)
            if behind <= 0 < done:
                picture.line([(x + 1, y + 2), (x + 1, y + 46)], STRONG["c"])
                picture.text(
                    x - 3, y + 8, "L's first token", "end" if x > 500 else "start", STRONG["c"]
                )
            x += 5
    picture.legend(
        left,
        picture.height - 12,
        [
            ("now", "a", "a decodes"),
            ("now", "b", "b decodes"),
            ("now", "c", f"L: a prompt of {PROMPT} tokens"),
        ],
    )
    return picture


def turns(steps: Sequence[Step]) -> Picture:
    """Steps that serve each request: decodes that take turns, and a prompt that always has its share."""
    names = sorted({who for one in steps for who in one if who != "L"})
    cell = 52
    left = 110
    high = 22
    picture = Picture(
        "Ten decodes and a prompt share a budget of eight",
        "; ".join(
            f"step {at}: {', '.join(f'{who} {n}' for who, n in one.items())}"
            for at, one in enumerate(steps, 1)
        ),
        height=46 + high * (len(names) + 2) + 16,
    )
    picture.text(left - 14, 26, "step", "end", SOFT)
    for at, one in enumerate(steps):
        x = left + cell * at
        picture.text(x + cell / 2, 26, str(at + 1), "middle", SOFT)
        for line, who in enumerate([*names, "L"]):
            y = 34 + high * line + (8 if who == "L" else 0)
            count = one.get(who, 0)
            colour = COLOURS.get(who, "")
            picture.cell(
                x,
                y,
                cell,
                high,
                "now" if count else "free",
                colour,
                f"+{count}" if count else "",
            )
        y = 34 + high * (len(names) + 1) + 26
        picture.text(x + cell / 2, y, str(sum(one.values())), "middle", SOFT)
    for line, who in enumerate([*names, "L"]):
        y = 34 + high * line + (8 if who == "L" else 0) + 15
        picture.text(left - 14, y, "prompt L" if who == "L" else f"decode {who}", "end")
        served = sum(who in one for one in steps)
        picture.text(left + cell * len(steps) + 12, y, f"{served} of {len(steps)}", fill=SOFT)
    picture.text(left - 14, 34 + high * (len(names) + 1) + 26, "tokens", "end", SOFT)
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's three."""
    return chunk_mask.pictures() | {
        "budget": budget([("05", record(None)), ("07", record(BUDGET))]),
        "turns": turns(record_turns()),
    }


def show(tokens: int) -> Picture:
    """The lane of any budget, from 3 on."""
    return budget([(str(tokens), record(tokens))])

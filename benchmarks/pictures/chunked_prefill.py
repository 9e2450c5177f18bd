"""Phase 07: one budget a step beside whole prompts, and the masks of one step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

import chunked_prefill
import paged_cache
from benchmarks.pictures.driving import exactly, steps, tiny
from benchmarks.pictures.svg import Box, Lines, Picture, Text, cells, picture, table, titled
from continuous.work import Work
from forward.attention import causal_mask

BUDGET, PROMPT = 8, 20
BEFORE = 2
"""Decodes of `a` and `b` before the long prompt arrives."""
NAMES, COLOURS = "abL", "abc"


def run(most: int | None) -> Iterator[list[Work]]:
    """Let `a` and `b` decode, and `L` arrive; yield steps until `L` has three tokens, without the first.

    most: tokens of a step in phase 07; None: phase 05, whose steps compute whole prompts.
    """
    sizes: dict[str, Any] = {"max_rows": 4, "max_len": 64}
    if most is None:
        engine = paged_cache.load(tiny(), **sizes)
    else:
        engine = chunked_prefill.load(tiny(), step_tokens=most, **sizes)
    for at in range(2):
        engine.add([at + 1] * 2, exactly(40), index=at)
    found = steps(engine)
    yield from islice(found, 1, 1 + BEFORE)
    engine.add([9] * PROMPT, exactly(3), index=2)
    for works in found:
        yield works
        if works[-1].start == PROMPT + 1 and works[-1].request.index == 2:
            return


def budget(*budgets: int | None) -> Picture:
    """Lanes of steps, a cell for each computed token; the wider a step, the longer `a` and `b` wait."""
    lanes = []
    for most in budgets or (None, BUDGET):
        columns: Lines = [["", "", "tokens"]]
        for at, works in enumerate(run(most)):
            words = ["L arrives"] * (at == BEFORE)
            if works[-1].start < PROMPT <= works[-1].start + works[-1].count:
                words.append("L's first token")
            owners = [work.request.index for work in works for _ in range(work.count)]
            looks = [f"now {COLOURS[who]}" for who in owners]
            step = cells([NAMES[who] for who in owners], looks, 16, 26)
            columns.append([Text(", ".join(words), "c", 0), step, len(owners)])
        title = (
            "phase 05: whole prompts"
            if most is None
            else f"phase 07: at most {most} tokens a step"
        )
        lanes.append(titled(title, table(zip(*columns, strict=True), gap=5, down=2)))
    return picture(
        "A long prompt among two decodes, with and without a budget",
        *lanes,
        "now a: a decodes",
        "now b: b decodes",
        f"now c: L: a prompt of {PROMPT} tokens",
    )


def mask() -> Picture:
    """A line for each query of the step of the second chunk, and a cell for each key that it sees."""
    (works,) = islice(run(BUDGET), BEFORE + 1, BEFORE + 2)
    lines: Lines = []
    for work in works:
        who, colour = NAMES[work.request.index], COLOURS[work.request.index]
        title = f"decode {who}" if work.count == 1 else f"chunk of {who}"
        keys = torch.arange(work.start + work.count)
        for query, seen in enumerate(causal_mask(keys[work.start :], keys).sum(1), work.start):
            looks = [f"kept {colour}"] * work.start + [f"now {colour}"] * (
                int(seen) - work.start
            )
            looks += ["idle"] * (len(keys) - int(seen))
            name = Text(title if query == work.start else "", f"bold {colour}")
            lines.append([name, f"query {query}", cells(range(len(keys)), looks, 22, 22)])
        lines.append([Box(0, 8)])
    return picture(
        "The masks of one step: two decodes, and a chunk in the middle of a prompt",
        table(lines, gap=12),
        "kept c: computed before",
        "now c: computed in this step",
        "idle: later: hidden",
    )


PICTURES = {"budget": budget, "mask": mask}
show = budget

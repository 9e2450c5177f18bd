"""Phase 07: which keys the queries of one step see, of a chunk in the middle of a prompt and of a decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import chunked_prefill
from benchmarks.pictures.driving import exactly, steps, tiny
from benchmarks.pictures.svg import SOFT, STRONG, Kind, Picture
from forward.attention import causal_mask

BUDGET, PROMPT = 8, 20
CHUNK = 1
"""Tokens of a step and of the long prompt, and which of its chunks is drawn."""
NAMES = "abL"
COLOURS = {"a": "a", "b": "b", "L": "c"}
CELL = 22


@dataclass(frozen=True)
class Part:
    """What a step computes of one request: its name, the first position, and the mask `[count, keys]`."""

    who: str
    start: int
    mask: Sequence[Sequence[bool]]


def record() -> list[Part]:
    """The step that computes the second chunk of a prompt beside two decodes."""
    engine: Any = chunked_prefill.load(tiny(), step_tokens=BUDGET, max_rows=4, max_len=64)
    for at in range(2):
        engine.add([at + 1] * 2, exactly(40), index=at)
    for _ in range(3):
        engine.step()
    engine.add([9] * PROMPT, exactly(3), index=2)
    for _ in range(CHUNK):
        engine.step()
    works = next(steps(engine))
    return [_part(work.request.index, work.start, work.count) for work in works]


def _part(index: int, start: int, count: int) -> Part:
    positions = torch.arange(start + count)
    mask = causal_mask(positions[start:], positions)
    return Part(NAMES[index], start, mask.tolist())


def masks(parts: Sequence[Part]) -> Picture:
    """A row for each query of the step, and a cell for each key that it sees."""
    rows = sum(len(part.mask) for part in parts)
    picture = Picture(
        "The masks of one step: two decodes, and a chunk in the middle of a prompt",
        "; ".join(
            f"{part.who}: queries {part.start} to {part.start + len(part.mask) - 1} "
            f"over {len(part.mask[0])} keys"
            for part in parts
        ),
        height=62 + CELL * rows + 12 * len(parts) + 26,
    )
    left = 196
    picture.text(
        left, 20, "keys in the cache before the step, and those of the step", fill=SOFT
    )
    y = 30.0
    for part in parts:
        colour = COLOURS[part.who]
        title = f"decode {part.who}" if len(part.mask) == 1 else f"chunk of {part.who}"
        picture.text(12, y + 16, title, bold=True, fill=STRONG[colour])
        for line, row in enumerate(part.mask):
            query = f"query {part.start + line}"
            picture.text(left - 12, y + 16, query, "end", SOFT, 11)
            for key, seen in enumerate(row):
                kind: Kind = "idle" if not seen else "kept" if key < part.start else "now"
                picture.cell(left + CELL * key, y, CELL, CELL, kind, colour, str(key))
            y += CELL
        y += 12
    picture.legend(
        left,
        picture.height - 14,
        [
            ("kept", "c", "computed before"),
            ("now", "c", "computed in this step"),
            ("idle", "", "later: hidden"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The one of this step."""
    return {"mask": masks(record())}

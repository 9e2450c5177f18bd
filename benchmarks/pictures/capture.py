"""Phase 09: a decode graph is captured once, and replayed with other numbers in the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cuda_graphs
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.svg import LINE, SOFT, Kind, Picture
from common.sampling.metadata import SamplingFlags
from cuda_graphs.decode_graph import DecodeGraph
from cuda_graphs.executors import DecodeGraphExecutor

PROMPTS = (3, 5, 2, 4)
OUTPUTS = (4, 2, 4, 4)
"""Tokens of four requests; the second is the first to end."""
SIZE = 4
"""Requests that the graph has room for."""
OPERATORS = ("gather", "model", "sample", "scatter")
CELL, HIGH = 38, 26


@dataclass(frozen=True)
class Step:
    """What the fixed tensors hold when the graph is replayed, and what it writes: row, position, token.

    The numbers of padding are row 0 and position -1; its token is written nowhere.
    """

    rows: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int]


def record() -> list[Step]:
    """Three requests from their prompts to their ends: every step that one graph of four rows computes."""
    options: dict[str, Any] = {"kernels": True, "graphs": True, "sampling": "torch"}
    engine: Any = cuda_graphs.load(
        tiny(),
        overlap=False,
        max_rows=SIZE,
        max_len=32,
        graph_tokens=0,
        step_tokens=32,
        **options,
    )
    for at, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        engine.add([at + 1] * prompt, exactly(output), index=at)
    (executor,) = (
        one for one in engine.runner.executors if isinstance(one, DecodeGraphExecutor)
    )
    graph = executor.graphs[SIZE, SamplingFlags(0)]
    steps: list[Step] = []
    engine.step()  # the prompts
    while not engine.idle:
        before = engine.runner.replays
        engine.step()
        if engine.runner.replays > before:
            steps.append(_step(graph))
    return steps


def _step(graph: DecodeGraph) -> Step:
    return Step(graph.rows.tolist(), graph.at.tolist(), graph.tokens.tolist())


def replays(steps: Sequence[Step]) -> Picture:
    """Above what is captured, and below a row for each replay: what the tensors hold, and what comes out."""
    inputs = (96, 268)
    results = 592
    picture = Picture(
        "A graph is captured once and replayed with other numbers",
        "; ".join(
            f"rows {step.rows}, positions {step.positions} give tokens {step.tokens}"
            for step in steps
        ),
        height=158 + 42 * len(steps),
    )
    wide = CELL * SIZE
    top = 44
    picture.text(12, top + 17, "capture", bold=True)
    for x, name in zip((*inputs, results), ("row", "position", "token"), strict=True):
        picture.text(x, 30, name, bold=True)
        picture.text(x, top + HIGH + 16, "its address is recorded", size=11, fill=SOFT)
        picture.cell(x, top, wide, HIGH, "free", "", "a tensor that stays")
    x = inputs[1] + wide + 8
    each = (results - 8 - x) / 2
    for at, name in enumerate(OPERATORS):
        left, y = x + each * (at % 2), top - 16 + 30 * (at // 2)
        picture.cell(left, y, each, HIGH, "known", "", name)
    picture.text(x, top + 60, "kernels, recorded", size=11, fill=SOFT)
    picture.line([(12, top + 72), (picture.width - 12, top + 72)], LINE)
    for line, step in enumerate(steps):
        y = top + 84 + 42 * line
        picture.text(12, y + 17, f"replay {line + 1}", bold=True)
        for left, numbers in (
            (inputs[0], step.rows),
            (inputs[1], step.positions),
            (results, step.tokens),
        ):
            for at, number in enumerate(numbers):
                padding = step.positions[at] < 0
                words = "·" if padding and numbers is step.tokens else str(number)
                kind: Kind = "idle" if padding else "now" if numbers is step.tokens else "kept"
                picture.cell(
                    left + CELL * at, y, CELL, HIGH, kind, "abcd"[step.rows[at]], words
                )
        picture.cell(x, y, 2 * each, HIGH, "known", "", "all of them in one call")
    picture.legend(
        12,
        picture.height - 14,
        [
            ("kept", "a", "sent by the host"),
            ("now", "a", "sampled, and written behind the request's tokens"),
            ("idle", "", "padding"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The one of these steps."""
    return {"capture": replays(record())}

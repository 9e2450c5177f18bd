"""Phase 09: a graph that is captured once and replayed, and in which order host and device work."""

from __future__ import annotations

from typing import Any

import cuda_graphs
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.svg import (
    Box,
    Cell,
    Lines,
    Picture,
    cells,
    picture,
    table,
    titled,
    track,
)
from common.sampling.metadata import SamplingFlags
from cuda_graphs.executors import DecodeGraphExecutor

LENGTHS = ((3, 4), (5, 2), (2, 4), (4, 4))
"""Tokens of four requests, prompt and output; the second is the first to end."""
SIZE = 4
"""Requests that the graph has room for."""
CELL = 34
UNIT = 25
HOST, STEP = 2, 4
"""How long each is drawn. The order is the engine's; the lengths are not measured."""


def panel(overlap: bool) -> Box:
    """Lanes of host and device, and which tokens the host knows whenever it plans a step.

    One request, from its prompt to its last token. In each of its steps the engine plans first, then reads
    tokens. A step begins when it is planned and the one before it has ended; reading waits for its step.
    """
    engine: Any = cuda_graphs.load(tiny(), overlap=overlap, max_rows=1, max_len=32)
    (request,) = engine.add([1, 2, 3], exactly(3))
    lanes: dict[str, list[tuple[float, Box]]] = {"host": [], "device": [], "host knows": []}
    ends: list[int] = [0]
    now = read = 0
    while not engine.idle:
        computed = request.num_computed_tokens
        looks = ["known a"] * len(request.tokens) + ["coming a"] * request.placeholders
        outputs = engine.step()
        if request.num_computed_tokens > computed:
            step = len(ends) - 1
            lanes["host"].append((UNIT * now, Cell(f"plan {step}", "kept", UNIT * HOST)))
            lanes["host knows"].append((UNIT * now, cells([""] * len(looks), looks, 13, 17)))
            now += HOST
            begin = max(now, ends[-1])
            lanes["device"].append((UNIT * begin, Cell(f"step {step}", "now a", UNIT * STEP)))
            ends.append(begin + STEP)
        for _ in outputs:
            now = max(now, ends[read + 1])
            lanes["host"].append((UNIT * now, Cell(f"read {read}", "known", UNIT * HOST)))
            now += HOST
            read += 1
    lines: Lines = [[name, track(places)] for name, places in lanes.items()]
    return titled("one step ahead" if overlap else "one after the other", table(lines, down=6))


def timeline(*orders: bool) -> Picture:
    """Host and device, overlapped or not, or both."""
    return picture(
        "Host and device, one after the other and overlapped",
        *map(panel, orders or (False, True)),
        "now a: the device computes",
        "known a: a token that the host knows when it plans",
        "coming a: a placeholder: on its way",
    )


def replays() -> Picture:
    """What is captured, and what the fixed tensors of a graph hold at each replay."""
    engine: Any = cuda_graphs.load(
        tiny(),
        kernels=True,
        graphs=True,
        overlap=False,
        sampling="torch",
        graph_tokens=0,
        max_rows=SIZE,
        max_len=32,
        step_tokens=32,
    )
    for at, (prompt, output) in enumerate(LENGTHS):
        engine.add([at + 1] * prompt, exactly(output), index=at)
    executors = engine.runner.executors
    (executor,) = (one for one in executors if isinstance(one, DecodeGraphExecutor))
    graph = executor.graphs[SIZE, SamplingFlags(0)]
    tensor = Cell("tensor's address", "known", SIZE * CELL)
    kernels = cells(["gather", "model", "sample", "scatter"], ["known"], 52)
    lines: Lines = [["", "row", "position", "kernels", "token"]]
    lines.append(["capture", tensor, tensor, kernels, tensor])
    engine.step()  # the prompts
    while not engine.idle:
        engine.step()
        rows, positions = graph.rows.tolist(), graph.at.tolist()
        used = sum(position >= 0 for position in positions)
        written = [*graph.tokens[:used].tolist(), *"·" * (SIZE - used)]
        sent = [f"kept {'abcd'[place]}" for place in rows[:used]] + ["idle"]
        sampled = [look.replace("kept", "now") for look in sent]
        inputs = cells(rows, sent, CELL), cells(positions, sent, CELL)
        call = Cell("one call for all four", "now", 208)
        name = f"replay {engine.runner.replays}"
        lines.append([name, *inputs, call, cells(written, sampled, CELL)])
    return picture(
        "A graph is captured once and replayed with other numbers",
        table(lines, gap=10, down=10),
        "known: recorded",
        "kept a: sent by the host",
        "now a: sampled, and written behind the request's tokens",
        "idle: padding",
    )


PICTURES = {"capture": replays, "overlap": timeline}
show = timeline

"""Phase 09: what host and device do in which order, one step after the other and one ahead."""

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


PICTURES = {"overlap": timeline}
show = timeline

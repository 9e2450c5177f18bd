"""Phase 02: what is computed with a cache and without, and the ring of a window layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.svg import INK, SOFT, STRONG, Picture
from common.events import generate
from forward import Generator
from kv_cache import CachedGenerator
from kv_cache.cache import LayerCache

PROMPT, OUTPUT = 3, 4
WINDOW, COLUMNS = 4, 9


def record() -> dict[str, list[tuple[int, int]]]:
    """Of each phase its steps: how many tokens were kept before, and how many the model computed."""
    model = tiny()
    seen: list[int] = []
    hook = model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    found = {}
    engines: tuple[tuple[str, Any], ...] = (
        ("01", Generator(model)),
        ("02", CachedGenerator(model)),
    )
    for name, engine in engines:
        seen.clear()
        generate(engine, [[5, 6, 7][:PROMPT]], exactly(OUTPUT))
        kept = [sum(seen[:at]) if name == "02" else 0 for at in range(len(seen))]
        found[name] = list(zip(kept, seen, strict=True))
    hook.remove()
    return found


def fill(trace: dict[str, list[tuple[int, int]]]) -> Picture:
    """Both phases' steps: dark is computed, pale was kept."""
    cell, column = 38, 330
    totals = {name: sum(count for _, count in steps) for name, steps in trace.items()}
    picture = Picture(
        "Three prompt tokens and four generated ones, without a cache and with one",
        f"Phase 01 computes {totals['01']} tokens, phase 02 computes {totals['02']}.",
        height=244,
    )
    for panel, (name, steps) in enumerate(trace.items()):
        left = 96 + column * panel
        words = f"phase {name}: {totals[name]} tokens computed"
        picture.text(left, 28, words, bold=True)
        for at, (kept, count) in enumerate(steps):
            y = 42 + 36 * at
            if not panel:
                picture.text(left - 14, y + 18, f"decode {at}" if at else "prefill", "end")
            for token in range(kept + count):
                picture.cell(
                    left + cell * token,
                    y,
                    cell,
                    28,
                    "now" if token >= kept else "kept",
                    "a",
                    f"t{token}",
                )
            token = kept + count
            picture.cell(left + cell * token, y, cell, 28, "coming", "a", f"t{token}")
    y = 42 + 36 * len(trace["01"]) + 36
    picture.legend(
        96,
        y,
        [
            ("now", "a", "computed in this step"),
            ("kept", "a", "kept, and only read"),
            ("coming", "a", "sampled, not computed"),
        ],
    )
    return picture


def record_ring() -> list[list[int]]:
    """Which column each slot of a window's ring holds, after each of the columns was written."""
    ring = LayerCache(torch.zeros(1, 1, WINDOW, 1), torch.zeros(1, 1, WINDOW, 1))
    moments = []
    for column in range(COLUMNS):
        new = torch.full((1, 1, 1, 1), float(column))
        ring.write(column, new, new)
        stored = [int(value) for value in ring.read(column + 1)[0].flatten()]
        assert stored == ring.columns(column + 1).tolist(), (
            "the ring says where its columns are"
        )
        moments.append(stored)
    return moments


def ring(moments: Sequence[Sequence[int]]) -> Picture:
    """The slots of the ring, downwards, over the columns that are written, to the right."""
    cell = 66
    left = 120
    top = 62
    picture = Picture(
        f"A window of {WINDOW} keeps {WINDOW} columns, round and round",
        "; ".join(
            f"after column {at}: slots hold {list(held)}" for at, held in enumerate(moments)
        ),
        height=top + 32 * WINDOW + 66,
    )
    picture.text(left - 14, 28, "written", "end", SOFT)
    picture.text(left - 14, 46, f"column mod {WINDOW}", "end", SOFT)
    for slot in range(WINDOW):
        picture.text(left - 14, top + 32 * slot + 19, f"slot {slot}", "end")
    for at, held in enumerate(moments):
        x = left + cell * at
        picture.text(x + cell / 2, 28, f"column {at}", "middle", INK, 11)
        picture.text(x + cell / 2, 46, str(at % WINDOW), "middle", SOFT, 11)
        for slot in range(WINDOW):
            y = top + 32 * slot
            if slot >= len(held):
                picture.cell(x + 8, y, cell - 16, 29, "free")
                continue
            new = held[slot] == at
            picture.cell(
                x + 8, y, cell - 16, 29, "now" if new else "kept", "a", f"k{held[slot]}"
            )
        oldest, newest = min(held), max(held)
        y = top + 32 * WINDOW + 18
        words = f"{oldest} to {newest}" if oldest < newest else str(newest)
        picture.text(x + cell / 2, y, words, "middle", STRONG["a"], 11)
    picture.text(left - 14, top + 32 * WINDOW + 18, "in the window", "end", STRONG["a"])
    picture.legend(
        left,
        top + 32 * WINDOW + 48,
        [
            ("now", "a", "written now, over the column that has left the window"),
            ("kept", "a", "still there"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's two."""
    return {"fill": fill(record()), "ring": ring(record_ring())}


def show(column: int) -> Picture:
    """The ring up to any column, from 0 on."""
    return ring(record_ring()[: column + 1])

"""Phase 02: what is computed with a cache and without, and the ring of a window layer."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.pictures.driving import exactly, tiny, token_ids
from benchmarks.pictures.svg import (
    Box,
    Cell,
    Item,
    Lines,
    Picture,
    picture,
    row,
    strip,
    table,
    titled,
)
from common.events import generate
from forward import Generator
from kv_cache import CachedGenerator
from kv_cache.cache import LayerCache

WINDOW = 4


def panel(phase: str, engine: Any, *, caches: bool) -> Box:
    """Each step of a request with three prompt tokens: what is kept, computed and sampled."""
    with token_ids() as seen:
        generate(engine, [[5, 6, 7]], exactly(4))
    computed = [ids.numel() for ids in seen]
    lines: Lines = []
    for step, count in enumerate(computed):
        kept = sum(computed[:step]) if caches else 0
        tokens = strip("t", "a", kept=kept, now=count, coming=1)
        lines.append([f"decode {step}" if step else "prefill", tokens])
    return titled(f"phase {phase}: {sum(computed)} tokens computed", table(lines, down=8))


def fill() -> Picture:
    """Both phases' steps."""
    return picture(
        "Three prompt tokens and four generated ones, without a cache and with one",
        row(
            panel("01", Generator(tiny()), caches=False),
            panel("02", CachedGenerator(tiny()), caches=True),
            gap=36,
        ),
        "now a: computed in this step",
        "kept a: kept, and only read",
        "coming a: sampled, not computed",
    )


def ring(last: int = 8) -> Picture:
    """The slots of a window's ring, a line each, over the columns that are written, up to the last."""
    cache = LayerCache(*torch.zeros(2, 1, 1, WINDOW, 1))
    slots = [f"slot {slot}" for slot in range(WINDOW)]
    columns: Lines = [["column", f"column mod {WINDOW}", *slots, "in the window"]]
    for written in range(last + 1):
        new = torch.full((1, 1, 1, 1), float(written))
        cache.write(written, new, new)
        held = [int(value) for value in cache.read(written + 1)[0].flatten()]
        assert held == cache.columns(written + 1).tolist(), "as the ring itself says"
        keys: list[Item] = [written, written % WINDOW]
        keys += [Cell(f"k{key}", "now a" if key == written else "kept a", 54) for key in held]
        keys += [Cell("", "free", 54)] * (WINDOW - len(held))
        columns.append([*keys, f"{min(held)} to {written}"])
    return picture(
        f"A window of {WINDOW} keeps {WINDOW} columns, round and round",
        table(zip(*columns, strict=True), gap=14, down=4),
        f"now a: written; from column {WINDOW} on over the one that has left the window",
        "kept a: still there",
    )


PICTURES = {"fill": fill, "ring": ring}
show = ring

"""Phase 05: which phase's part is in each slot of the engines of phases 05 to 09."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import chunked_prefill
import cuda_graphs
import paged_cache
import prefix_cache
import triton_paged_attention
from benchmarks.pictures.svg import SOFT, Kind, Picture
from forward import load_model
from paged_cache import Preset
from paged_cache.builder import EngineBuilder, Slot, build
from paged_cache.recipe import Feature, Recipe

PRESETS: Sequence[tuple[str, str, Preset]] = (
    ("05", "", paged_cache.PRESET),
    ("06", "kernels", triton_paged_attention.PRESET),
    ("07", "chunked_prefill", chunked_prefill.PRESET),
    ("08", "prefix_cache", prefix_cache.PRESET),
    ("09", "graphs, overlap", cuda_graphs.PRESET),
)
"""Phases, and the features that each brings."""
SLOTS = ("cache", "attention", "runner", "scheduler", "sampler_backend", "loop")
COLOURS = {"05": "", "06": "d", "07": "c", "08": "b", "09": "a"}


class InstalledError(Exception):
    """All features are installed; nothing has to be made of the parts, which would capture graphs."""


@dataclass(frozen=True)
class Watch(Feature):
    """Notes who owns the slots when all other features are installed, and ends the building.

    owners: of each slot, the name of the first feature that changed it; empty: phase 05's part.
    """

    name: ClassVar[str] = "watch"
    phase: ClassVar[int] = 99
    owners: dict[str, str] = field(default_factory=dict)

    def install(self, builder: EngineBuilder) -> None:
        """See `Feature.install`."""
        slots = [slot for slot in vars(builder).values() if isinstance(slot, Slot)]
        self.owners.update({slot.name: slot.owner for slot in slots})
        raise InstalledError


def record() -> list[Mapping[str, str]]:
    """Install the features of each phase, kernels and graphs too; which phase's part has each slot?."""
    model = load_model("random:tiny", device="cpu", dtype="float32")
    found: list[Mapping[str, str]] = []
    for _, _, preset in PRESETS:
        kinds = {kind.name: f"{kind.phase:02}" for kind in (*preset.on, *preset.fitting)}
        options: dict[str, Any] = {"max_rows": 2, "max_len": 32}
        options |= {name: True for name in ("kernels", "graphs") if name in kinds}
        chosen = preset.choose(options, torch.device("cpu"))
        watch = Watch()
        with suppress(InstalledError):
            build(Recipe(model, chosen.sizes, (*chosen.features, watch), "cpu", "float32"))
        found.append({name: kinds.get(watch.owners[name], "05") for name in SLOTS})
    return found


def parts(found: Sequence[Mapping[str, str]]) -> Picture:
    """A row for each phase's engine, and a column for each slot."""
    left = 188
    wide, high = 92, 30
    picture = Picture(
        "Whose part is in each slot of the engines of phases 05 to 09",
        "; ".join(
            f"phase {number}: " + ", ".join(f"{slot} of {row[slot]}" for slot in SLOTS)
            for (number, _, _), row in zip(PRESETS, found, strict=True)
        ),
        height=44 + (high + 6) * len(found) + 28,
    )
    for column, slot in enumerate(SLOTS):
        x = left + wide * column + wide / 2
        picture.text(x, 26, slot.removesuffix("_backend"), anchor="middle", bold=True)
    for line, ((number, brings, _), row) in enumerate(zip(PRESETS, found, strict=True)):
        y = 38 + (high + 6) * line
        picture.text(12, y + 19, f"phase {number}", bold=True)
        picture.text(76, y + 19, brings, size=11, fill=SOFT)
        for column, slot in enumerate(SLOTS):
            kind: Kind = "now" if row[slot] == number else "kept"
            colour = COLOURS[row[slot]]
            picture.cell(left + wide * column, y, wide, high, kind, colour, f"of {row[slot]}")
    picture.text(
        12,
        picture.height - 14,
        "Dark: new in this phase. Pale: an earlier phase's part.",
        fill=SOFT,
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The one of these engines."""
    return {"parts": parts(record())}

"""Lesson 05 says whose part is in each slot of the engines of phases 05 to 09."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from forward.model import Model
from paged_cache import EngineBuilder, Feature, Recipe, build
from paged_cache.builder import Slot
from phases import ROOT, phase_named
from phases.registry import import_phase

SLOTS = ("cache", "attention", "runner", "scheduler", "sampler_backend", "loop")


class InstalledError(Exception):
    """All features are installed; nothing has to be made of the parts, which would capture graphs."""


@dataclass(frozen=True)
class Watch(Feature):
    """Notes the name of the first feature that changed each slot, and ends the building."""

    name: ClassVar[str] = "watch"
    phase: ClassVar[int] = 99
    owners: dict[str, str] = field(default_factory=dict)

    def install(self, builder: EngineBuilder) -> None:
        slots = [slot for slot in vars(builder).values() if isinstance(slot, Slot)]
        self.owners.update({slot.name: slot.owner for slot in slots})
        raise InstalledError


def owners(number: str, model: Model) -> list[str]:
    """The phase whose part is in each slot of an engine of this phase."""
    preset = import_phase(phase_named(number)).PRESET
    kinds = {kind.name: f"{kind.phase:02}" for kind in (*preset.on, *preset.fitting)}
    options: dict[str, object] = {"max_rows": 2, "max_len": 32}
    options |= {name: True for name in ("kernels", "graphs") if name in kinds}
    chosen = preset.choose(options, torch.device("cpu"))
    watch = Watch()
    with suppress(InstalledError):
        build(Recipe(model, chosen.sizes, (*chosen.features, watch), "cpu", "float32"))
    return [kinds.get(watch.owners[slot], "05") for slot in SLOTS]


def test_the_lesson_says_whose_part_is_in_each_slot(model: Model) -> None:
    lesson = (ROOT / "phases/05_paged_cache/README.md").read_text(encoding="utf-8")
    for number in ("05", "06", "07", "08", "09"):
        cells = [
            f"**{phase}**" if phase == number != "05" else phase
            for phase in owners(number, model)
        ]
        assert f"| {number} | {' | '.join(cells)} |" in lesson

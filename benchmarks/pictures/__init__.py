"""Pictures of what an engine did, drawn from a trace of its steps.

`python -m benchmarks.pictures [05]` runs each phase's own engine on a few small requests, notes what every
step decided (works, tables, slots, counts of users), and draws it to `phases/NN_name/NAME.svg`. What is drawn
are decisions, never times, so the files are the same on every machine; a test draws them all again.

One module for each phase, named after its package, with `PICTURES`: names of files, and what draws each. Most
have `show`, which draws one of them for a notebook. All are made of `svg`'s kit, and trace with `driving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.evidence import ROOT
from benchmarks.pictures.svg import Picture
from common.files import whole
from phases import PHASES

__all__ = ["Picture", "draw", "main"]

HERE = Path(__file__).parent
DRAWN = [phase for phase in PHASES if (HERE / f"{phase.package}.py").exists()]
"""Phases that have pictures."""


def draw(package: str) -> Mapping[str, Picture]:
    """The pictures of a phase, by the names of their files without `.svg`."""
    module = import_module(f"benchmarks.pictures.{package}")
    return {name: picture() for name, picture in module.PICTURES.items()}


def main(wanted: Sequence[str] = ()) -> int:
    """Write the pictures of these phases (their numbers), or of all; returns 0."""
    # On a CPU it must choose the interpreter before Triton is there.
    import_module("triton_paged_attention")
    for phase in DRAWN:
        if wanted and f"{phase.number:02}" not in wanted:
            continue
        for name, picture in draw(phase.package).items():
            path = phase.folder / f"{name}.svg"
            with whole(path) as scratch:
                scratch.write_text(str(picture), encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0

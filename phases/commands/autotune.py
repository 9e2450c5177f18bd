"""`ladder run PHASE --autotune`: search for kernel configurations for a model on this GPU, with a bar."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from common.console import err, out, table
from common.errors import UserError
from common.models.config import ModelConfig
from forward.shapes import SHAPES
from phases import Phase
from phases.registry import import_phase

if TYPE_CHECKING:
    from phases.appendix.tuning.autotune import Found, TimedConfig
    from phases.appendix.tuning.shapes import Shape


WITH_KERNELS = (6, 9)
"""The phases whose engines run Triton kernels."""


def check_autotune(phase: Phase, device: torch.device) -> None:
    """Raise `UserError` unless the phase runs Triton kernels and the device is a GPU."""
    if phase.number not in WITH_KERNELS:
        has = " and ".join(f"{number:02d}" for number in WITH_KERNELS)
        raise UserError(f"--autotune is given, but phase {phase.name} has no kernels to tune: {has} have")
    if device.type != "cuda":
        raise UserError(f"device is {device.type!r}, but --autotune times kernels on 'cuda' only")


def autotune(
    phase: Phase, model: str, folder: Path | None, device: torch.device, dtype: torch.dtype, **options: Any
) -> None:
    """Search, show the configuration that was tried last, and print what was found.

    Args:
        model: its name; folder: where it is, None for a `random:SHAPE`.
        options: those of `phases.appendix.tuning.autotune.autotune`.
    """
    import_phase(phase)
    # Phase 09 has kernels of its own for few tokens; its search finds phase 06's, too.
    search = import_module(
        "phases.appendix.tuning.lone" if phase.number >= 9 else "phases.appendix.tuning.autotune"
    ).autotune

    if folder is None:
        shape = model.removeprefix("random:")
        if shape not in SHAPES:
            raise UserError(f"model {model!r}: the random shapes are {', '.join(SHAPES)}")
        config = SHAPES[shape]
    else:
        config = ModelConfig.from_folder(folder)
    begun = time.perf_counter()
    with err.status("") as status:

        def report(shape: Shape, trial: TimedConfig) -> None:
            status.update(f"{shape.title}, {describe(trial)}")

        found = list(search(config, device=device, dtype=dtype, report=report, **options))
    out.print(summary(found))
    trials = [trial for result in found for trial in result.trials]
    compiling = sum(trial.compile_seconds for trial in trials)
    out.print(
        f"{len(trials)} configurations in {time.perf_counter() - begun:,.1f} s, "
        f"of which {compiling:,.1f} s for compiling",
        soft_wrap=True,
    )
    out.out(str(found[-1].path), highlight=False)
    if any(result.best is not result.default for result in found):
        err.print("[dim]Used from now on with this Triton version; LADDER_TUNING=off ignores it.[/dim]")
    else:
        err.print("[dim]The defaults are the best that was found.[/dim]")


def describe(trial: TimedConfig) -> str:
    """A configuration, how long it took to compile and how long it runs."""
    fields = " ".join(f"{name}={value}" for name, value in vars(trial.config).items())
    result = trial.why if trial.seconds is None else f"{trial.seconds * 1e6:,.1f} µs"
    return f"{fields}: compiled in {trial.compile_seconds:.1f} s, {result}"


def summary(found: list[Found]) -> Table:
    """One row a shape: the default's time, the best time, and the winner if it is another."""
    made = table("shape", right=("default µs", "best µs", "gain", "tried"))
    made.add_column("winner")
    for result in found:
        before, after = result.default.seconds or 0.0, result.best.seconds or 0.0
        changed = {
            name: value
            for name, value in vars(result.best.config).items()
            if value != getattr(result.default.config, name)
        }
        made.add_row(
            result.shape.title,
            f"{before * 1e6:,.1f}",
            f"{after * 1e6:,.1f}",
            f"{before / after:.2f}×" if after else "",
            str(len(result.trials)),
            ", ".join(f"{name} {value}" for name, value in changed.items()) or "the default",
        )
    return made

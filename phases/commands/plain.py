"""`ladder list`, `ladder fetch` and `ladder --version`, which need no PyTorch."""

from __future__ import annotations

import platform
from importlib import metadata
from types import SimpleNamespace

from common.console import out, table
from common.models.hub import model_folder
from phases import PHASES, in_checkout


def version(package: str = "inference-ladder") -> str:
    """Return a package's version; a checkout that is not installed has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def line() -> str:
    """Return what a report of a defect begins with."""
    return f"ladder {version()}, torch {version('torch')}, Python {platform.python_version()}"


def fetch(given: SimpleNamespace) -> int:
    """Fetch a model, or see whether what is there is whole; then say where it is."""
    out.out(str(model_folder(given.model, contents=True)), highlight=False)
    return 0


def list_phases(given: SimpleNamespace) -> int:
    """Print a table of the phases, or only their names, one a line, for scripts."""
    if given.names:
        for phase in PHASES:
            out.out(phase.name, highlight=False)
        return 0
    if not in_checkout():
        made = table("Phase", "What it adds")
        for phase in PHASES:
            made.add_row(phase.name, phase.summary)
        out.print(made)
        return 0
    # Only now: names must not wait for PyTorch.
    from benchmarks.evidence import results
    from benchmarks.gains import factor_text, gain, gain_words

    evidence = results()
    made = table()
    made.add_column(
        "Phase", no_wrap=True
    )  # a name to type must be whole: other columns give way
    made.add_column("What it adds", ratio=3)
    made.add_column("Gain in", ratio=2)
    for device in evidence:
        made.add_column(device, justify="right", no_wrap=True)
    for phase in PHASES:
        gains = [gain(phase, found.get(phase.name)) for found in evidence.values()]
        words = gain_words(phase.headline) if any(gains) else ""
        made.add_row(phase.name, phase.summary, words, *map(factor_text, gains))
    out.print(made)
    out.print(
        "[dim]A gain is over the phase before, from benchmarks/results; figures are in figures/.[/dim]"
    )
    return 0

"""`ladder list`, `ladder fetch` and `ladder --version`, which need no PyTorch."""

from __future__ import annotations

import platform
from importlib import metadata
from types import SimpleNamespace

from rich.padding import Padding

from common.console import out
from common.models.hub import model_folder
from phases import PHASES, Phase, in_checkout


def version(package: str = "inference-ladder") -> str:
    """Return an installed package's version; "unknown" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def line() -> str:
    """Return one line to copy into a bug report: the versions of this package, PyTorch and Python."""
    return f"ladder {version()}, torch {version('torch')}, Python {platform.python_version()}"


def fetch(given: SimpleNamespace) -> int:
    """Run `ladder fetch`: download `given.model`, or check that it is undamaged; print its folder.

    Returns the exit code, 0.
    """
    out.out(str(model_folder(given.model, contents=True)), highlight=False)
    return 0


def list_phases(given: SimpleNamespace) -> int:
    """Run `ladder list`: print a table of the phases; with `given.names` only their names, one a line.

    Returns the exit code, 0.
    """
    if given.names:
        for phase in PHASES:
            out.out(phase.name, highlight=False)
        return 0
    gains = _gains() if in_checkout() else {}
    for phase in PHASES:
        out.print(f"[bold]{phase.name}[/bold]{gains.get(phase, '')}", soft_wrap=True)
        out.print(Padding(phase.summary, (0, 0, 0, 3)))
    if gains:
        out.print(
            "[dim]A gain is over the phase before, from benchmarks/results; figures are in figures/.[/dim]"
        )
    return 0


def _gains() -> dict[Phase, str]:
    """Return {phase: text about its measured gains over the phase before}, where there is evidence."""
    # Only now: names must not wait for PyTorch.
    from benchmarks.evidence import results
    from benchmarks.gains import factor_text, gain, gain_words, headline_of

    found, evidence = {}, results()
    for phase in PHASES:
        factors = [
            f"{factor_text(factor)} on {device}"
            for device, runs in evidence.items()
            if (factor := gain(phase, runs.get(phase.name)))
        ]
        if factors:
            words = f"{gain_words(headline_of(phase).metric)}: {', '.join(factors)}"
            found[phase] = f"  [dim]{words}[/dim]"
    return found

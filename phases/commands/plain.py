"""`ladder list`: the phases, and what each was measured to gain."""

from __future__ import annotations

from common.console import out, table
from phases import PHASES


def run(names: bool) -> int:
    """Print a table of the phases, or only their names, one a line, for scripts."""
    if names:
        for phase in PHASES:
            out.out(phase.name, highlight=False)
        return 0
    # Only now: names must not wait for PyTorch.
    from benchmarks.evidence import results
    from benchmarks.gains import factor_text, gain, gain_words

    evidence = results()
    made = table()
    made.add_column("Phase", no_wrap=True)  # a name to type must be whole: other columns give way
    made.add_column("What it adds", ratio=3)
    if evidence:
        made.add_column("Gain in", ratio=2)
    for device in evidence:
        made.add_column(device, justify="right", no_wrap=True)
    for phase in PHASES:
        gains = [gain(phase, found.get(phase.name)) for found in evidence.values()]
        words = [gain_words(phase.headline) if any(gains) else ""] if evidence else []
        made.add_row(phase.name, phase.summary, *words, *map(factor_text, gains))
    out.print(made)
    if evidence:
        out.print(
            "[dim]A gain is over the phase before, from benchmarks/results; figures are in figures/.[/dim]"
        )
    return 0

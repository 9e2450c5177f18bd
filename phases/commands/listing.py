"""`ladder list`: the phases, and what each was measured to gain."""

from __future__ import annotations

from rich.table import Table

from benchmarks.evidence import results
from benchmarks.gains import gain_text
from common.console import out
from phases import PHASES


def run(names: bool) -> int:
    """Print a table of the phases, or only their names, one a line, for scripts."""
    if names:
        for phase in PHASES:
            out.out(phase.name, highlight=False)
        return 0
    evidence = results()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("Phase", no_wrap=True)  # a name to type must be whole: other columns give way
    table.add_column("What it adds")
    for device in evidence:
        table.add_column(f"Gain, {device}", justify="right")
    for phase in PHASES:
        cells = [gain_text(phase, found.get(phase.name)) for found in evidence.values()]
        table.add_row(phase.name, phase.summary, *cells)
    out.print(table)
    if evidence:
        out.print(
            "[dim]A gain is over the phase before, from benchmarks/results; figures are in figures/.[/dim]"
        )
    return 0

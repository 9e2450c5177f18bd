"""`ladder bench` and `ladder plot`: find the file that measures and draws, and call it."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

from benchmarks.evidence import (
    FIGURES,
    RESULTS,
    SAMPLES,
    BenchOptions,
    Evidence,
    Run,
    check_folder,
    device_folder,
    results,
)
from benchmarks.gains import factor_text, gain, gain_words, headline_of
from benchmarks.labels import axis_label, scale_of
from benchmarks.provenance import clean
from common.console import err, out, table
from common.errors import UserError, integer
from common.files import whole
from common.neighbours import usage, warn
from common.paths import cache_home
from common.words import count
from phases import EXTRAS, PHASES, ROOT, phase_named

MOST_REPEATS = 1000


def bench(given: SimpleNamespace) -> int:
    """Run `ladder bench`: measure a phase (`given.what`), and print the results beside the recorded ones.

    Evidence and figure go to the cache; with `given.record` they replace those of the repository.
    given: the arguments of the command line. Returns the exit code, 0.
    """
    quick = given.quick
    record = given.record
    repeats = given.repeats
    if repeats is not None:
        integer("--repeats", repeats, low=1, high=MOST_REPEATS)
    if quick and record:
        raise UserError("--record keeps what was measured with care: leave --quick out")
    if record and repeats is not None and repeats < SAMPLES:
        raise UserError(
            f"--repeats is {repeats}, but --record keeps at least {SAMPLES} samples of each variant"
        )
    if record:
        clean(ROOT)
    name = _named(given.what)
    from benchmarks import measure
    from common.device import device_name, pick_device, pick_dtype

    module = _module(name)
    where = pick_device(given.device)
    device_is = device_folder(where.type, device_name(where))
    home = ROOT if record else cache_home() / ("quick" if quick else "bench")
    folders = [home / path.relative_to(ROOT) / device_is for path in (RESULTS, FIGURES)]
    # Minutes must not be lost because nothing can be written in the end.
    for folder in folders:
        check_folder(folder)
    options = BenchOptions(
        device=where,
        dtype=pick_dtype(given.dtype, where),
        model=given.model,
        quick=quick,
        repeats=repeats or (1 if quick else SAMPLES),
    )
    recorded = results().get(device_is, {}).get(name)
    _announce(name, options, recorded)
    begun, before = time.monotonic(), usage()
    beside = measure.Beside()
    if quick:
        measure.TRIES = 1
    seen = module.run(options)
    measured = replace(seen, seconds=time.monotonic() - begun, beside=beside.seen())
    _show(measured, recorded, quick=quick)
    written = measured.write(folders[0] / f"{measured.phase}.json")
    out.out(str(written), highlight=False)
    figure = folders[1] / f"{measured.phase}.png"
    if _draw(module, measured, figure):
        out.out(str(figure), highlight=False)
    warn(before)
    return 0


def _announce(name: str, options: BenchOptions, recorded: Evidence | None) -> None:
    """Print what will be measured, and how long that took when the evidence was recorded.

    name: of the phase or extra benchmark. recorded: the repository's evidence of it, or None.
    """
    err.print(
        f"[dim]{name} on {options.device}, {str(options.dtype).removeprefix('torch.')}, "
        f"{count(options.repeats, 'sample')} of each variant[/dim]"
    )
    if recorded is not None and recorded.seconds is not None and not options.quick:
        minutes = recorded.seconds / 60
        where = f"{recorded.machine['name']}, {recorded.machine['cores']} cores"
        err.print(f"[dim]The recorded run took {minutes:.0f} min on {where}.[/dim]")


def _show(measured: Evidence, recorded: Evidence | None, *, quick: bool) -> None:
    """Print a table for each work of a measurement: a metric of each variant, and its ratios.

    The ratios are to the first variant, and to the recorded evidence (None: there is none).
    quick: the workloads are smaller than the recorded ones, so that only gains are compared with these.
    """
    recorded_gain, recorded = recorded, None if quick else recorded
    phase = next((phase for phase in PHASES if phase.name == measured.phase), None)
    headline = "" if phase is None else headline_of(phase).metric
    more = ["recorded", "to that"] if recorded else []
    by_work: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in measured.runs:
        metric = headline if headline in run.metrics else next(iter(run.metrics))
        options = (f"{name} {value}" for name, value in run.options.items() if value != "")
        by_work[metric, run.workload, run.model, run.dtype, *options].append(run)
    for (metric, *work), runs in by_work.items():
        said = ", ".join([axis_label(metric), *work])
        out.print(said, style="dim", markup=False, soft_wrap=True)
        made = table("variant", right=["median", "to the first", *more])
        for run in runs:
            value, before = run.median(metric), None
            same = recorded.find(**run.facts) if recorded else []
            if len(same) == 1 and metric in same[0].metrics:
                before = same[0].median(metric)
            compared = "" if run is runs[0] else _ratio(value, runs[0].median(metric))
            cells = [_number(value, metric), compared, _number(before, metric)]
            made.add_row(run.variant, *[*cells, _ratio(value, before)][: 2 + len(more)])
        out.print(made)
    for when, evidence in (("here", measured), ("recorded", recorded_gain)):
        found = gain(phase, evidence) if phase else None
        if found is not None:
            out.print(
                f"{when}: {found.after.variant} against {found.before.variant}: "
                f"[bold]{factor_text(found)}[/bold] {gain_words(found.metric)} "
                f"({found.after.workload}, {found.after.model})",
                soft_wrap=True,
            )


def _number(value: float | None, metric: str) -> str:
    value = value and value * scale_of(metric)
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _ratio(value: float, other: float | None) -> str:
    return f"{value / other:.2f}×" if other else ""


def _draw(module: ModuleType, evidence: Evidence, figure: Path) -> bool:
    """Draw a benchmark's figure of its evidence into the file `figure`; return False if it has no figure.

    module: the benchmark.
    """
    if not hasattr(module, "draw"):
        return False
    with whole(figure) as scratch:
        module.draw(evidence, scratch)
    return True


def plot(given: SimpleNamespace) -> int:
    """Run `ladder plot`: draw figures from the recorded evidence, and fill in the tables of the lessons.

    given.what: a phase, whose figures alone are drawn; None: all. Returns the exit code, 0.
    """
    wanted = None if given.what is None else _named(given.what)
    found = 0
    for folder, by_phase in results().items():
        for name, evidence in by_phase.items():
            if wanted in (None, name):
                figure = FIGURES / folder / f"{name}.png"
                if _draw(_module(evidence.phase), evidence, figure):
                    out.out(str(figure.relative_to(ROOT)), highlight=False)
                found += 1
    if wanted is None:
        from benchmarks.tables import fill_all

        for path in fill_all():
            out.out(str(path.relative_to(ROOT)), highlight=False)
    if not found:
        err.print("There is no evidence to draw yet: `ladder bench PHASE` makes some.")
    return 0


def _named(text: str) -> str:
    """Return the folder name of a phase, or the name of an extra benchmark, that `text` means.

    Raises:
        UserError: `text` means neither.
    """
    return text if text in EXTRAS else phase_named(text, *EXTRAS).name


def _module(name: str) -> ModuleType:
    """Return the module of a benchmark, which has `run` and perhaps `draw`.

    name: of a phase, whose `bench.py` it is, or of an extra benchmark under `benchmarks`.
    """
    return import_module(EXTRAS.get(name, f"phases.{name}.bench"))

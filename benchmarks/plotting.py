"""Figures, drawn from evidence alone, in one style.

The colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/); lines differ in their markers too. The same evidence gives the same file,
byte for byte, with the same matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.evidence import Evidence, Run
from common.errors import UserError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#8A8A8A"
ROOFLINE = "#404040"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#606060",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "figure.facecolor": "white",
    "svg.hashsalt": "inference-ladder",
}
matplotlib.rcParams.update(STYLE)  # for what a bench.py draws by itself as well

LABELS = {
    "output_tokens_per_s": "output tokens per second",
    "prompt_tokens_per_s": "prompt tokens per second",
    "peak_memory_bytes": "peak memory (GB)",
    "kv_cache_bytes": "KV cache (GB)",
    "requests_in_flight": "requests in flight",
    "scheduling_us_per_step": "scheduling per step (µs)",
    "bandwidth_fraction": "share of the read bandwidth",
    "flop_fraction": "share of the matmul ceiling",
    "cache_hit_fraction": "share of prompt tokens found in the cache",
    "acceptance_fraction": "share of drafts accepted",
    "seconds": "seconds",
}


def panels(
    count: int = 1, *, rows: int = 1, width: float = 7.2, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in `rows` lines, `width` inches wide for one of them, more for several."""
    columns = -(-count // rows)
    size = width if count == 1 else 4.6 * columns, height * rows
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)[:count]


def bars(
    runs: Sequence[Run],
    metric: str,
    *,
    axes: Axes | None = None,
    label: Callable[[Run], str] | None = None,
    gain: bool = True,
    colour: Callable[[Run], str] | None = None,
) -> tuple[Figure, Axes]:
    """One horizontal bar a run, in the given order, with its samples as dots and its value beside it.

    label: text of a run's bar; by default its variant, and what its options say where runs share one.
    gain: write the factor over the run above it, for metrics where more is better. Runs with a roofline get a
        mark where it lies (throughputs only).
    colour: of a run's bar; by default one after the other.
    """
    if not runs:
        raise UserError(f"there are no runs to draw {metric} of: the evidence lacks them")
    figure, axes = _figure_of(axes, 1.1 + 0.42 * len(runs))
    label = label or _labels(runs)
    scale = _scale(metric)
    top = max(run.median(metric) * scale for run in runs)
    ends, longest = top, 0
    for row, run in enumerate(runs):
        value = run.median(metric) * scale
        filled = colour(run) if colour else COLOURS[row % len(COLOURS)]
        axes.barh(row, value, height=0.62, color=filled, alpha=0.9)
        samples = [sample * scale for sample in run.metrics[metric].samples]
        axes.plot(samples, [row] * len(samples), ".", color="#202020", markersize=3.5, alpha=0.7)
        text = number(value)
        before = runs[row - 1].median(metric) if row and gain and metric.endswith("_per_s") else 0.0
        if before:
            text += f"  ({run.median(metric) / before:.2f}× the one above)"
        if run.roofline and metric == "output_tokens_per_s" and run.roofline.fraction:
            ideal = value / run.roofline.fraction
            if ideal <= 4 * top:
                axes.plot([ideal, ideal], [row - 0.36, row + 0.36], color=ROOFLINE, linewidth=1.6)
                ends = max(ends, ideal)
            text += f"  {run.roofline.fraction:.0%} of roofline"
        longest = max(longest, len(text))
        axes.annotate(
            text, (max(samples, default=value), row), (5, 0), textcoords="offset points", va="center",
            fontsize=8,
            bbox={"facecolor": "white", "alpha": 0.85, "pad": 0.6, "linewidth": 0},
        )  # fmt: skip
    axes.set_yticks(range(len(runs)), [label(run) for run in runs])
    axes.invert_yaxis()
    # Room for the longest text: a letter is about 0.063 inches wide, labels take a quarter of the panel.
    place = axes.get_subplotspec()
    panel = 0.75 * figure.get_figwidth() / (place.get_gridspec().ncols if place else 1)
    axes.set_xlim(0, ends / (1 - min(0.063 * longest / panel, 0.7)))
    axes.set_xlabel(axis_label(metric))
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    return figure, axes


def lines(
    runs: Sequence[Run],
    x: str,
    metric: str,
    *,
    axes: Axes | None = None,
    by: Callable[[Run], str] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    roofline: bool = False,
) -> tuple[Figure, Axes]:
    """One line a variant (or whatever `by` says) over the option `x`; a band spans its samples.

    roofline: also draw each line's roofline, dashed, where runs have one and `metric` is a throughput.
    """
    runs = [run for run in runs if x in run.options and metric in run.metrics]
    if not runs:
        raise UserError(f"there are no runs to draw {metric} over {x} of: the evidence lacks them")
    figure, axes = _figure_of(axes, 3.2)
    by = by or (lambda run: run.variant)
    scale = _scale(metric)
    names = list(dict.fromkeys(by(run) for run in runs))
    for place, name in enumerate(names):
        group = sorted((run for run in runs if by(run) == name), key=lambda run: float(run.options[x]))
        across = [float(run.options[x]) for run in group]
        colour = COLOURS[place % len(COLOURS)]
        middle = [run.median(metric) * scale for run in group]
        low = [min(run.metrics[metric].samples) * scale for run in group]
        high = [max(run.metrics[metric].samples) * scale for run in group]
        axes.fill_between(across, low, high, color=colour, alpha=0.18, linewidth=0)
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(across, middle, color=colour, marker=marker, label=name)
        if roofline and all(run.roofline for run in group):
            ideal = [
                value / run.roofline.fraction
                for value, run in zip(middle, group, strict=True)
                if run.roofline
            ]
            axes.plot(
                across, ideal, "--", color=colour, linewidth=1.0, label="roofline" if place == 0 else None
            )
    ticks = sorted({float(run.options[x]) for run in runs})
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(LogLocator(base=2, subs=()))
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [number(tick) for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(axis_label(metric))
    axes.legend()
    return figure, axes


def reference_line(axes: Axes, value: float, text: str, *, vertical: bool = False) -> None:
    """A thin grey line at `value` with its name: a peer's number, or a ceiling."""
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=GREY, linewidth=1.0, linestyle=":")
    place, across = ((value, 1.0), axes.get_xaxis_transform()) if vertical else ((1.0, value), None)
    axes.annotate(
        text,
        place,
        (-3, 3),
        xycoords=across or axes.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=GREY,
    )


def caption(evidence: Evidence, runs: Sequence[Run] = ()) -> str:
    """Small print of a figure: machine, models, dtypes, date and commit."""
    machine = evidence.machine
    threads = (
        f", threads: {machine['threads']}" if machine["device"] == "cpu" and "threads" in machine else ""
    )
    chosen = runs or evidence.runs
    models = ", ".join(sorted({f"{run.model} ({run.weights} weights, {run.dtype})" for run in chosen}))
    commit = str(evidence.git.get("commit") or "")[:7] or "unknown commit"
    return f"{machine['name']}{threads} · {models} · torch {evidence.versions.get('torch')} · {commit}"


def save(figure: Figure, out: Path, evidence: Evidence | None = None) -> Path:
    """Write the figure as PNG (or SVG, by the name's ending), with the evidence's `caption` below it."""
    if evidence is not None:
        figure.supxlabel(caption(evidence), x=0.01, ha="left", fontsize=6.5, color=GREY)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without these the file would name the library and the time, and differ at every drawing.
    stamps: dict[str, Any] = {"Date": None} if out.suffix == ".svg" else {"Software": None}
    figure.savefig(out, dpi=120, metadata=stamps)
    return out


def axis_label(metric: str) -> str:
    """What to write on an axis for a metric's name."""
    if metric in LABELS:
        return LABELS[metric]
    name, _, tail = metric.partition("_ms_")
    words = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "end-to-end latency"}
    return f"{words.get(name, name.replace('_', ' '))}, {tail} (ms)" if tail else metric.replace("_", " ")


def number(value: float) -> str:
    """A number as people read it: 1,234 and 56.7 and 0.089."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def _figure_of(axes: Axes | None, height: float) -> tuple[Figure, Axes]:
    if axes is None:
        figure, (axes,) = panels(height=height)
        return figure, axes
    owner = axes.figure
    assert isinstance(owner, Figure)
    return owner, axes


def _scale(metric: str) -> float:
    return 1e-9 if metric.endswith("_bytes") else 1.0


def _labels(runs: Sequence[Run]) -> Callable[[Run], str]:
    """The variant, with those options (and the model) that differ between the runs."""
    facts = [{"model": run.model, **run.options} for run in runs]
    names = [name for fact in facts for name in fact]
    differing = [n for n in dict.fromkeys(names) if len({str(fact.get(n)) for fact in facts}) > 1]

    def label(run: Run) -> str:
        values = {"model": run.model, **run.options}
        extra = [f"{name} {values[name]}" for name in differing if name in values]
        return "\n".join([run.variant, ", ".join(extra)] if extra else [run.variant])

    return label

"""Figures, drawn from evidence alone, in one style.

A phase has one colour in every figure, its variants are tints of it, and other engines are grey. The first
six colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/), most others Tol's muted ones (https://personal.sron.nl/~pault/); lines
differ in their markers too. The same evidence gives the same file, byte for byte, with the same matplotlib.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from benchmarks.evidence import Evidence, Run
from benchmarks.labels import axis_label, scale_of
from common.errors import UserError

PHASE_COLOURS = (
    "#56B4E9", "#E69F00", "#CC79A7", "#0072B2", "#D55E00", "#009E73", "#332288",
    "#999933", "#882255", "#44AA99", "#AA4499", "#117733", "#CC6677", "#6A5D4D",
    "#8C6BB1", "#B15928", "#1F78B4", "#33A02C", "#E7298A",
)  # fmt: skip
"""Of phases 01 to 19, chosen so that no two that are compared look alike."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#8A8A8A"
ROOFLINE = "#404040"
OTHERS = ("nano-vLLM", "vLLM", "SGLang", "transformers")
"""How the names of other engines begin."""
LIBRARIES = ("torch", "cuDNN", "FlashAttention")
"""And those of other people's kernels, measured beside ours."""
LETTER = 0.092
"""Inches that a letter of a title takes on average."""
SMALL_LETTER = 0.053
"""And one of the small print."""

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


def panels(
    count: int = 1, *, rows: int = 1, width: float = 7.2, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in `rows` lines, `width` inches wide for one of them, more for several."""
    columns = -(-count // rows)
    size = width if count == 1 else 4.6 * columns, height * rows
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def colours(names: Iterable[str], phase: str = "") -> dict[str, str]:
    """A colour for each name of a figure.

    A phase has its own, and its variants (`09_cuda_graphs, no overlap`) are lighter, one after the other.
    Other engines are grey. Any other name is a tint of `phase`'s colour.
    """
    found: dict[str, str] = {}
    kin: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name.startswith(OTHERS + LIBRARIES):
            kin.setdefault(GREY, []).append(name)
        elif begins := re.match(r"(\d\d)_\w+", name if re.match(r"\d\d_", name) else phase):
            base = PHASE_COLOURS[int(begins[1]) - 1]
            if name == begins[0]:
                found[name] = base
            else:
                kin.setdefault(base, []).append(name)
        else:
            kin.setdefault(GREY, []).append(name)
    for base, relatives in kin.items():
        plain = base in found.values()
        steps = len(relatives) + plain
        for place, name in enumerate(relatives, start=plain):
            found[name] = tint(base, 0.7 * place / max(steps - 1, 2))
    return found


def tint(colour: str, share: float) -> str:
    """The colour with this share of white."""
    red, green, blue = ((1 - share) * part + share for part in to_rgb(colour))
    return to_hex((red, green, blue))


def measured_once(run: Run) -> bool:
    """Whether a run is another engine's number, which no command of this repository measures again."""
    return run.variant.startswith(OTHERS) and run.noise is None


def bars(
    runs: Sequence[Run],
    metric: str,
    *,
    axes: Axes | None = None,
    label: Callable[[Run], str] | None = None,
    gain: bool = True,
    phase: str = "",
) -> tuple[Figure, Axes]:
    """One horizontal bar a run, in the given order, with its samples as dots and its value beside it.

    label: text of a run's bar; by default its variant, and what its options say where runs share one.
    gain: write the factor over the run above it, for metrics where more is better. Runs with a roofline get a
        mark where it lies (throughputs only).
    phase: whose colour names have that are no phase's.
    """
    if not runs:
        raise UserError(f"there are no runs to draw {metric} of: the evidence lacks them")
    figure, axes = _figure_of(axes, 1.1 + 0.42 * len(runs))
    label = label or _labels(runs)
    shown = colours((run.variant for run in runs), phase)
    scale = scale_of(metric)
    top = max(run.median(metric) * scale for run in runs)
    note = ""
    texts: list[
        tuple[float, float, int, str]
    ] = []  # end of the bar, roofline or 0, row, words
    for row, run in enumerate(runs):
        value = run.median(metric) * scale
        axes.barh(row, value, height=0.62, color=shown[run.variant], hatch="///" * measured_once(run),
                  edgecolor="white", linewidth=0)  # fmt: skip
        samples = [sample * scale for sample in run.metrics[metric].samples]
        if len(samples) > 1:
            axes.plot(
                samples, [row] * len(samples), ".", color="#202020", markersize=3.5, alpha=0.7
            )
        text = number(value)
        before = (
            runs[row - 1].median(metric) if row and gain and metric.endswith("_per_s") else 0.0
        )
        if before:
            text += f"  ({run.median(metric) / before:.2f}× the one above)"
        ideal = 0.0
        if run.roofline and metric == "output_tokens_per_s" and run.roofline.fraction:
            ideal = value / run.roofline.fraction
            ideal = ideal if ideal <= 4 * top else 0.0
            text += f" ({_share(run.roofline.fraction)} of the roofline)"
        if ideal:
            note = "; the line: roofline"
            axes.plot([ideal, ideal], [row - 0.36, row + 0.36], color=ROOFLINE, linewidth=1.6)
        texts.append((max(samples, default=value), ideal, row, text))
    axes.set_yticks(range(len(runs)), [_marked(run, label(run)) for run in runs])
    axes.invert_yaxis()
    # Room for the longest text: a letter is about 0.063 inches wide, labels take a third of the panel.
    place = axes.get_subplotspec()
    panel = 0.68 * figure.get_figwidth() / (place.get_gridspec().ncols if place else 1)
    letter = 0.063 / panel
    ends = max(
        max(end, ideal if 0 < ideal < 1.6 * end else 0)
        / (1 - min(letter * (len(text) + 1), 0.75))
        for end, ideal, _, text in texts
    )
    axes.set_xlim(0, max([ends, *(1.03 * ideal for _, ideal, _, _ in texts)]))
    for end, ideal, row, text in texts:
        # Not across the roofline's mark: behind it, if it stands in the text's way.
        reach = end + axes.get_xlim()[1] * letter * (len(text) + 1)
        behind = ideal if end < ideal < reach else end
        beside(axes, text, behind, row, 5)
    axes.set_xlabel(axis_label(metric) + note)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
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
    phase: str = "",
) -> tuple[Figure, Axes]:
    """One line a variant (or whatever `by` says) over the option `x`; a band spans its samples.

    roofline: also draw each line's roofline, dashed, where runs have one and `metric` is a throughput.
    phase: whose colour the lines have that `by` does not call by a phase's name.
    """
    runs = [run for run in runs if x in run.options and metric in run.metrics]
    if not runs:
        raise UserError(
            f"there are no runs to draw {metric} over {x} of: the evidence lacks them"
        )
    figure, axes = _figure_of(axes, 3.2)
    by = by or (lambda run: run.variant)
    scale = scale_of(metric)
    names = list(dict.fromkeys(by(run) for run in runs))
    shown = colours(names, phase)
    for place, name in enumerate(names):
        group = sorted(
            (run for run in runs if by(run) == name), key=lambda run: float(run.options[x])
        )
        across = [float(run.options[x]) for run in group]
        colour = shown[name]
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
                across,
                ideal,
                "--",
                color=colour,
                linewidth=1.0,
                label="roofline" if place == 0 else None,
            )
    ticks = sorted({float(run.options[x]) for run in runs})
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(LogLocator(base=2, subs=()))
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [tick(value) for value in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    if log_y:
        log_axis(axes)
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(axis_label(metric))
    if len(names) > 1 or roofline:
        axes.legend()
    return figure, axes


def log_axis(axes: Axes, *, vertical: bool = True) -> None:
    """A logarithmic axis with numbers that people read: 1, 3, 10, 30, ..."""
    (axes.set_yscale if vertical else axes.set_xscale)("log")
    axis = axes.yaxis if vertical else axes.xaxis
    low, high = axes.get_ylim() if vertical else axes.get_xlim()
    between = (
        (1.0,) if high / low > 300 else (1.0, 3.0) if high / low > 12 else (1.0, 2.0, 3.0, 5.0)
    )
    axis.set_major_locator(LogLocator(base=10, subs=between))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.set_minor_formatter(NullFormatter())


def points(
    axes: Axes,
    values: Sequence[float],
    names: Sequence[str],
    texts: Sequence[str],
    colour: str,
) -> None:
    """Draw a point a row on a logarithmic axis, which has no zero that a bar could begin at.

    texts: written beside the points.
    """
    axes.plot(values, range(len(values)), "o", color=colour, markersize=7)
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        beside(axes, text, value, row, 7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(min(values) / 1.5, max(values) * (max(values) / min(values)) ** 0.45)
    log_axis(axes, vertical=False)
    axes.grid(visible=True, axis="y")


def beside(axes: Axes, text: str, value: float, row: float, gap: float = 4) -> None:
    """Write a text behind the end of a bar or a point."""
    axes.annotate(
        text, (value, row), (gap, 0), textcoords="offset points", va="center", fontsize=8
    )


def over_one(axes: Axes, counts: Sequence[int], of: str) -> None:
    """Finish a panel of rates over that of one `of`: the line of as many times, a tick for each count."""
    axes.plot(counts, counts, color="#404040", linestyle=":", label="as many times")
    axes.set_xticks(counts)
    axes.set_ylabel(f"times one {of}'s rate")
    axes.legend()


def reference_line(axes: Axes, value: float, text: str, *, vertical: bool = False) -> None:
    """A thin grey line at `value` with its name: a peer's number, or a ceiling."""
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=GREY, linewidth=1.0, linestyle=":")
    place, across = (
        ((value, 0.93), axes.get_xaxis_transform()) if vertical else ((1.0, value), None)
    )
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
        f", threads: {machine['threads']}"
        if machine["device"] == "cpu" and "threads" in machine
        else ""
    )
    chosen = runs or evidence.runs
    models = ", ".join(
        sorted({f"{run.model} ({run.weights} weights, {run.dtype})" for run in chosen})
    )
    commit = str(evidence.git.get("commit") or "")[:7] or "unknown commit"
    return f"{machine['name']}{threads} · {models} · torch {evidence.versions.get('torch')} · {commit}"


def save(figure: Figure, out: Path, evidence: Evidence | None = None) -> Path:
    """Write the figure as PNG (or SVG, by the name's ending), with the evidence's `caption` below it."""
    if evidence is not None:
        said = textwrap.fill(caption(evidence), int(figure.get_figwidth() / SMALL_LETTER))
        figure.supxlabel(said, x=0.01, ha="left", fontsize=6.5, color=GREY)
    _wrap_titles(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without these the file would name the library and the time, and differ at every drawing.
    stamps: dict[str, Any] = {"Date": None} if out.suffix == ".svg" else {"Software": None}
    figure.savefig(out, dpi=120, metadata=stamps)
    return out


def number(value: float) -> str:
    """A number as people read it: 1,234 and 56.7 and 0.089."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def times(factor: float) -> str:
    """A factor as people read it, with a third digit where two would call nearly equal things equal."""
    return f"{factor:.3f}×" if abs(factor - 1) < 0.01 else f"{factor:.2f}×"


def tick(value: float) -> str:
    """A number on an axis, with no more digits than it has: 2.5, not 2.50."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _wrap_titles(figure: Figure) -> None:
    """Break every title into lines that its axes have room for, of about the same length."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        text = axes.get_title(loc="left")
        letters = int(axes.get_window_extent().width / figure.dpi / LETTER)
        lines = partial(textwrap.wrap, text, break_long_words=False, break_on_hyphens=False)
        count = len(lines(letters))
        even = next((n for n in range(10, letters) if len(lines(n)) == count), letters)
        axes.set_title("\n".join(lines(even)))


def _share(fraction: float) -> str:
    return f"{fraction:.0%}" if fraction >= 0.01 else f"{fraction:.1%}"


def _marked(run: Run, text: str) -> str:
    return f"{text}\n(measured once)" if measured_once(run) else text


def _figure_of(axes: Axes | None, height: float) -> tuple[Figure, Axes]:
    if axes is None:
        figure, (axes,) = panels(height=height)
        return figure, axes
    owner = axes.figure
    assert isinstance(owner, Figure)
    return owner, axes


def _labels(runs: Sequence[Run]) -> Callable[[Run], str]:
    """The variant, with those options (and the model) that differ between the runs."""
    facts = [{"model": run.model, **run.options} for run in runs]
    names = [name for fact in facts for name in fact]
    differing = [
        n for n in dict.fromkeys(names) if len({str(fact.get(n)) for fact in facts}) > 1
    ]

    def label(run: Run) -> str:
        values = {"model": run.model, **run.options}
        extra = [f"{name} {values[name]}" for name in differing if name in values]
        return "\n".join([run.variant, ", ".join(extra)] if extra else [run.variant])

    return label

"""Figures, drawn from evidence alone, in one style. A figure is declared by data: `Panel` and `figure`.

A phase has one colour in every figure, its variants are tints of it, and other engines are grey. The first
six colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart
(https://jfly.uni-koeln.de/color/), most others Tol's muted ones (https://personal.sron.nl/~pault/); lines
differ in their markers too. The same evidence gives the same file, byte for byte, with the same matplotlib.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from benchmarks.evidence import Evidence, Run
from benchmarks.labels import axis_label, metric_of, number, scale_of
from benchmarks.recorded_peers import beside
from common.errors import UserError

PHASE_COLOURS = """
#56B4E9 #E69F00 #CC79A7 #0072B2 #D55E00 #009E73 #332288 #999933 #882255 #44AA99
#AA4499 #117733 #CC6677 #6A5D4D #8C6BB1 #B15928 #1F78B4 #33A02C #E7298A
"""
"""Of phases 01 to 19, chosen so that no two that are compared look alike."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#8A8A8A"
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
}
matplotlib.rcParams.update(STYLE)


def panels(
    count: int = 1, *, rows: int = 1, width: float = 7.2, height: float = 3.2
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in `rows` lines, `width` inches wide for one column, more for several."""
    columns = -(-count // rows)
    size = width if columns == 1 else 4.6 * columns, height * rows
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
    kin: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        begins = re.match(r"(\d\d)_\w+", name) or re.match(r"(\d\d)_\w+", phase)
        if begins is None or name.startswith(OTHERS + LIBRARIES):
            kin.setdefault(GREY, []).append(name)
        else:
            alike = kin.setdefault(PHASE_COLOURS.split()[int(begins[1]) - 1], [])
            alike.insert(0 if name == begins[0] else len(alike), name)
    return {
        name: tint(base, 0.7 * place / max(len(alike) - 1, 2))
        for base, alike in kin.items()
        for place, name in enumerate(alike)
    }


def tint(colour: str, share: float) -> str:
    """The colour with this share of white."""
    red, green, blue = ((1 - share) * part + share for part in to_rgb(colour))
    return to_hex((red, green, blue))


Draw = Callable[[Evidence, Path], None]
Groups = dict[str, list[Run]]
"""The runs of each line, or of each kind of points."""


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    title: text with facts of the first run in braces, `{least}` and `{most}` of the medians, and their ratio,
        `{gain}`; of lines, at the greatest `x` that all of them have.
    metric: what is drawn; empty: the rate that the workload is about.
    where: fact -> patterns as of files, of which a run matches one; one with `!` in front it must not match.
    x: option along which lines run. rows: name of the rows in which points stand. Without both: a bar a run.
    by: name of a line, or of points, and label: of a bar, texts with facts in braces; `{name}` is the variant
        without the phase that is measured.
    log: axes with a logarithmic scale, of "x" and "y".
    relative: lines are over their first point, beside the line of as many times.
    over: facts of a run whose value is a dotted line.
    peers: with the best of other engines on the same work, and the bars in order.
    """

    title: str
    metric: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    x: str = ""
    rows: str = ""
    by: str = "{variant}"
    label: str = "{name}"
    log: str = ""
    relative: bool = False
    over: Mapping[str, Any] = field(default_factory=dict)
    peers: bool = False

    def about(self, run: Run) -> str:
        """Return the metric that is drawn of a run."""
        return self.metric or metric_of(run.workload)

    def shows(self, run: Run) -> bool:
        """Return whether a run is among those that are drawn."""
        known = run.facts
        for name, patterns in self.where.items():
            said = str(known.get(name, ""))
            some = [patterns] if isinstance(patterns, str) else patterns
            if all(fnmatchcase(said, p.lstrip("!")) == p.startswith("!") for p in some):
                return False
        return self.about(run) in run.metrics and (not self.x or self.x in run.options)

    def draw(self, axes: Axes, runs: Sequence[Run], phase: str) -> None:
        """Draw runs, of which there is at least one."""
        metric = self.about(runs[0])
        if self.peers:
            runs = sorted(runs, key=lambda run: run.median(metric))
        groups: Groups = defaultdict(list)
        for run in runs:
            groups[self.by.format_map(facts(run, phase))].append(run)
        compared = list(runs)
        if self.x:
            shown = [{run.options[self.x] for run in group} for group in groups.values()]
            # Two versions of a peer may have no place in common with each other.
            last = max(set.intersection(*shown) or set.union(*shown))
            compared = [run for run in runs if run.options[self.x] == last]
            _lines(axes, groups, self, metric, phase)
        elif self.rows:
            _points(axes, groups, self, metric, phase)
        else:
            _bars(axes, runs, self.label, metric, phase)
        values = sorted(run.median(metric) * scale_of(metric) for run in compared)
        gain = times(values[-1] / values[0]) if values[0] else ""
        least, most = number(values[0]), number(values[-1])
        said = facts(runs[0], phase) | {"least": least, "most": most, "gain": gain}
        axes.set_title(self.title.format_map(Facts(said)))


def figure(
    *parts: Panel,
    each: Sequence[str] = (),
    rows: int = 1,
    height: float = 3.4,
    phase: str = "",
) -> Draw:
    """Return a bench's `draw`: panels for which evidence has runs, and one file.

    each: facts for whose values there is a panel each. rows: lines of panels. phase: whose colour names have
    that are no phase's; by default the one that is measured.
    """

    def draw(evidence: Evidence, out: Path) -> None:
        found = []

        def values(run: Run) -> tuple[Any, ...]:
            return tuple(run.facts.get(name) for name in each)

        for group in dict.fromkeys(map(values, evidence.runs)):
            for part in parts:
                every = [*evidence.runs, *(beside(evidence) if part.peers else ())]
                same = [run for run in every if values(run) == group]
                if runs := [run for run in same if part.shows(run)]:
                    found.append((part, runs, same))
        if not found:
            raise UserError(f"the evidence of {evidence.phase} has no runs to draw")
        whole, axes = panels(len(found), rows=min(rows, len(found)), height=height)
        for place, (part, runs, same) in zip(axes, found, strict=True):
            part.draw(place, runs, phase or evidence.phase)
            if part.over:
                run = next(run for run in same if part.over.items() <= run.facts.items())
                _reference(place, run.median(part.about(run)), run.variant)
        save(whole, out, evidence)

    return draw


class Facts(dict[str, Any]):
    """What a text can say of a run; what the run has not is said by nothing."""

    def __missing__(self, name: str) -> str:
        return ""


def facts(run: Run, phase: str) -> Facts:
    """Return the facts of a run, and its name."""
    known = {key: value for key, value in run.facts.items() if value is not None}
    return Facts(known, name=run.variant.removeprefix(phase).strip(", ") or run.variant)


def _bars(axes: Axes, runs: Sequence[Run], label: str, metric: str, phase: str) -> None:
    """A horizontal bar a run, with its samples as dots, and behind it its value and share of the roofline."""
    shown = colours((run.variant for run in runs), phase)
    texts = []
    for row, run in enumerate(runs):
        value = run.median(metric) * scale_of(metric)
        samples = [sample * scale_of(metric) for sample in run.metrics[metric].samples]
        # No command here measures it again.
        hatch = "///" * (run.variant.startswith(OTHERS) and run.noise is None)
        axes.barh(row, value, height=0.62, color=shown[run.variant], hatch=hatch,
                  edgecolor="white", linewidth=0)  # fmt: skip
        if len(samples) > 1:
            rows = [row] * len(samples)
            axes.plot(samples, rows, ".", color="#202020", markersize=3.5, alpha=0.7)
        text = number(value)
        if run.roofline_share and metric == "output_tokens_per_s":
            text += f" ({100 * run.roofline_share:.2g} % of the roofline)"
        texts.append((max(samples), text))
    axes.set_yticks(range(len(runs)), [label.format_map(facts(run, phase)) for run in runs])
    axes.invert_yaxis()
    # Room for the longest text: a letter is about 0.063 inches wide, labels take a third of the panel.
    place = axes.get_subplotspec()
    owner = axes.figure
    assert isinstance(owner, Figure)
    letter = (
        0.063 * (place.get_gridspec().ncols if place else 1) / (0.68 * owner.get_figwidth())
    )
    ends = [end / (1 - min(letter * (len(text) + 1), 0.75)) for end, text in texts]
    axes.set_xlim(0, max(ends) or 1)
    for row, (end, text) in enumerate(texts):
        axes.annotate(
            text, (end, row), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlabel(axis_label(metric))
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def _points(axes: Axes, groups: Groups, panel: Panel, metric: str, phase: str) -> None:
    """A point a run in the row of its case: cases are no scale, and a logarithmic axis has no zero."""
    rows: list[str] = []
    shown = colours(groups, phase)
    for marker, (name, group) in zip(MARKERS, groups.items(), strict=False):
        names = [panel.rows.format_map(facts(run, phase)) for run in group]
        rows = [*dict.fromkeys(rows + names)]
        values = [run.median(metric) * scale_of(metric) for run in group]
        places = [*map(rows.index, names)]
        axes.plot(values, places, marker, color=shown[name], label=name, markersize=7)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(axis_label(metric))
    if "x" in panel.log:
        log_axis(axes, vertical=False)
    if len(groups) > 1:
        axes.legend()


def _lines(axes: Axes, groups: Groups, panel: Panel, metric: str, phase: str) -> None:
    """A line a group, with a band over its samples."""
    shown = colours(groups, phase)
    ticks = sorted({float(run.options[panel.x]) for group in groups.values() for run in group})
    for place, (name, group) in enumerate(groups.items()):
        group.sort(key=lambda run: float(run.options[panel.x]))
        across = [float(run.options[panel.x]) for run in group]
        scale = 1 / group[0].median(metric) if panel.relative else scale_of(metric)
        bands = [[sample * scale for sample in run.metrics[metric].samples] for run in group]
        edges = [*map(min, bands)], [*map(max, bands)]
        axes.fill_between(across, *edges, color=shown[name], alpha=0.18, linewidth=0)
        middle = [run.median(metric) * scale for run in group]
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(across, middle, color=shown[name], marker=marker, label=name)
    if panel.relative:
        axes.plot(ticks, ticks, color="#404040", linestyle=":", label="as many times")
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(LogLocator(base=2, subs=()))
    if len(ticks) <= 10:
        axes.set_xticks(ticks, [tick(value) for value in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    if "y" in panel.log:
        log_axis(axes)
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_xlabel(panel.x.replace("_", " "))
    axes.set_ylabel("times the first" if panel.relative else axis_label(metric))
    if len(groups) > 1 or panel.relative:
        axes.legend()


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


def _reference(axes: Axes, value: float, text: str) -> None:
    """A dotted line at `value` with its name."""
    axes.axhline(value, color=GREY, linewidth=1.0, linestyle=":")
    place: dict[str, Any] = {
        "xycoords": axes.get_yaxis_transform(),
        "textcoords": "offset points",
    }
    axes.annotate(text, (1.0, value), (-3, 3), **place, ha="right", fontsize=8, color=GREY)


def caption(evidence: Evidence) -> str:
    """Small print of a figure: machine, models, dtypes, date and commit."""
    machine = evidence.machine
    threads = f", threads: {machine['threads']}" if machine["device"] == "cpu" else ""
    found = {f"{run.model} ({run.weights} weights, {run.dtype})" for run in evidence.runs}
    models = ", ".join(sorted(found))
    commit = str(evidence.git.get("commit") or "")[:7] or "unknown commit"
    return f"{machine['name']}{threads} · {models} · torch {evidence.versions.get('torch')} · {commit}"


def save(figure: Figure, out: Path, evidence: Evidence) -> None:
    """Write the figure as PNG, with the evidence's `caption` below it."""
    said = textwrap.fill(caption(evidence), int(figure.get_figwidth() / SMALL_LETTER))
    figure.supxlabel(said, x=0.01, ha="left", fontsize=6.5, color=GREY)
    _wrap_titles(figure)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120, metadata={"Software": None})  # its version would differ


def times(factor: float) -> str:
    """A factor as people read it, with a third digit where two would call nearly equal things equal."""
    return f"{factor:.3f}×" if abs(factor - 1) < 0.01 else f"{factor:.2f}×"


def tick(value: float) -> str:
    """A number on an axis, with no more digits than it has: 2.5, not 2.50."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
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

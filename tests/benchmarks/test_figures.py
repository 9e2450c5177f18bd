"""Every figure of the recorded evidence: it can be drawn without a warning, and nothing in it is cut."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import bench_command
from benchmarks.evidence import FIGURES, ROOT, results

pytestmark = pytest.mark.slow

RECORDED = {
    f"{folder}/{name}": found
    for folder, all_of in results().items()
    for name, found in all_of.items()
}
DRAWN = [
    name
    for name, found in RECORDED.items()
    if hasattr(bench_command._module(found.phase), "draw")
]


@pytest.fixture
def figure(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> Figure:
    """What `ladder plot` saves, with warnings as errors: an empty legend is one."""
    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *arguments: object, **options: object) -> None:
        saved.append(self)
        original(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    evidence = RECORDED[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench_command._module(evidence.phase).draw(evidence, tmp_path / "figure.png")
    (one,) = saved
    one.draw_without_rendering()  # at its own resolution again
    return one


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(name, marks=pytest.mark.long) if name.startswith("cpu/") else name
        for name in DRAWN
    ],
    indirect=True,
)
def test_titles_say_something_and_nothing_is_cut_or_covered(figure: Figure) -> None:
    whole = figure.bbox
    titles = [axes.title if axes.get_title() else axes._left_title for axes in figure.axes]
    for axes, title in zip(figure.axes, titles, strict=True):
        assert title.get_text(), "a panel has no title"
        assert axes.lines or axes.patches or axes.collections, (
            f"{title.get_text()!r}: the panel is empty"
        )
        if legend := axes.get_legend():
            box = legend.get_window_extent()
            covered = [bar for bar in axes.patches if bar.get_window_extent().overlaps(box)]
            assert not covered, f"{title.get_text()!r}: the legend covers a bar"
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    ticks = [
        label
        for axes in figure.axes
        for at, (low, high), labels in (
            (0, sorted(axes.get_xlim()), axes.get_xticklabels()),
            (1, sorted(axes.get_ylim()), axes.get_yticklabels()),
        )
        for label in labels
        if low <= label.get_position()[at] <= high  # others are not drawn
    ]
    texts = [*titles, *(text for axes in figure.axes for text in axes.texts), *ticks]
    for text in (
        *(text for text in texts if text.get_text() and text.get_visible()),
        *legends,
    ):
        box = text.get_window_extent()
        name = text.get_text() if isinstance(text, Text) else "the legend"
        inside = (
            box.x0 >= -1 and box.x1 <= whole.x1 + 1 and box.y0 >= -1 and box.y1 <= whole.y1 + 1
        )
        assert inside, f"{name!r} is cut: it spans {box} of {whole}"
    for one, other in combinations(titles, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent()), (
            f"the titles {one.get_text()!r} and {other.get_text()!r} run into each other"
        )


def test_every_figure_is_a_click_from_a_document() -> None:
    texts = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    hidden = [name for name in DRAWN if f"figures/{name}.png)" not in texts]
    assert not hidden, f"figures that nobody sees: {hidden}"


def test_every_figure_in_the_repository_is_of_evidence() -> None:
    found = {f"{path.parent.name}/{path.stem}" for path in FIGURES.glob("*/*.png")}
    assert found == set(DRAWN), (
        "run `ladder plot`, and remove the figures of evidence that is gone"
    )

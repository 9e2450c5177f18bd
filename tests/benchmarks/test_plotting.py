"""Figures: every value of the evidence is in them, and the same evidence gives the same file."""

from __future__ import annotations

import pytest
import torch

from benchmarks.evidence import Metric, Roofline, Run, collect
from benchmarks.plotting import bars, caption, lines, panels, reference_line, save


def run(variant: str, rate: float, **options: object) -> Run:
    metrics = {
        "output_tokens_per_s": Metric((rate, rate * 1.1, rate * 0.9)),
        "peak_memory_bytes": Metric((2e9,)),
    }
    roofline = Roofline(1.0, rate / 200)
    return Run(variant, "w", "hash", "smollm2", "real", "float32", metrics, options, roofline)


RUNS = [
    run("01_forward", 10.0, batch=1),
    run("02_kv_cache", 50.0, batch=1),
    run("02_kv_cache", 80.0, batch=4),
]


def texts(axes) -> str:
    return " | ".join(text.get_text() for text in axes.texts)


def test_bars_say_value_gain_and_roofline():
    _, axes = bars(RUNS[:2], "output_tokens_per_s")
    assert [bar.get_width() for bar in axes.patches] == [10.0, 50.0]
    assert texts(axes) == "10  5% | 50  (5.00× the one above)  25%"
    assert axes.get_xlabel() == "output tokens per second; %: of the roofline |"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["01_forward", "02_kv_cache"]
    _, axes = bars(RUNS, "peak_memory_bytes")
    assert axes.patches[0].get_width() == pytest.approx(2.0)
    assert axes.get_yticklabels()[2].get_text() == "02_kv_cache\nbatch 4"


def test_lines_are_sorted_and_separate():
    _, axes = lines([*reversed(RUNS)], "batch", "output_tokens_per_s", roofline=True)
    by_label = {line.get_label(): line for line in axes.lines}
    assert list(by_label["02_kv_cache"].get_xdata()) == [1.0, 4.0]
    assert list(by_label["02_kv_cache"].get_ydata()) == [50.0, 80.0]
    assert list(by_label["roofline"].get_ydata()) == [200.0, 200.0]
    reference_line(axes, 60.0, "a peer")
    assert "a peer" in texts(axes)


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.slow
def test_the_same_evidence_gives_the_same_bytes(tmp_path, ending):
    evidence = collect("02_kv_cache", RUNS, torch.device("cpu"))
    files = []
    for name in ("one", "two"):
        figure, (left, right) = panels(2)
        bars(evidence.runs, "output_tokens_per_s", axes=left)
        lines(evidence.runs, "batch", "output_tokens_per_s", axes=right, log_x=True)
        files.append(save(figure, tmp_path / "new" / f"{name}.{ending}", evidence).read_bytes())
    assert files[0] == files[1]
    assert "smollm2 (real weights, float32)" in caption(evidence)

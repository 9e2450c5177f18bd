"""Figures: every value of the evidence is in them, and the same evidence gives the same file."""

from __future__ import annotations

import pytest
import torch

from benchmarks.evidence import Metric, Roofline, Run, collect
from benchmarks.plotting import bars, caption, lines, panels, save


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

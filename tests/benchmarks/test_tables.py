"""Tables in Markdown files say what the evidence says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.evidence import Metric, Roofline, Run, collect, results
from benchmarks.gains import factor_text, gain, gain_words
from benchmarks.tables import fill, fill_all
from common.errors import UserError
from phases import find_phase


def run(variant: str, rate: float, **options: object) -> Run:
    metrics = {"output_tokens_per_s": Metric((rate,)), "ttft_ms_p50": Metric((1000 / rate,))}
    roofline = Roofline(1.0, rate / 1000)
    return Run(variant, "w", "hash", "m", "real", "float32", metrics, options, roofline)


def evidence(*runs: Run):
    return collect("02_kv_cache", runs, torch.device("cpu"))


def test_tables_in_the_repository_are_up_to_date():
    assert [str(path) for path in fill_all(write=False)] == [], "run `python -m benchmarks.tables`"


def test_evidence_in_the_repository_is_complete():
    """Every file can be read, lies where it belongs, and names commit, workload hash and samples."""
    for folder, by_phase in results().items():
        for name, found in by_phase.items():
            assert (found.folder, found.phase) == (folder, name)
            assert len(found.git["commit"]) == 40
            assert found.runs
            assert all(run.workload_sha256 and run.metrics for run in found.runs)


def test_a_table_is_made_from_the_evidence(tmp_path):
    runs = [
        run("01_forward", 10.0, batch=1),
        run("02_kv_cache", 55.0, batch=1),
        run("02_kv_cache", 5.0, batch=2),
    ]
    evidence(*runs).write(tmp_path / "benchmarks" / "results" / "cpu" / "02_kv_cache.json")
    marks = "<!-- table: cpu/02_kv_cache {} -->\n{}<!-- /table -->"
    words = "batch=1 columns=output_tokens_per_s,gain,roofline rows=batch"
    filled = fill("before\n" + marks.format(words, "old\n") + "\nafter", tmp_path)
    assert (
        filled
        == "before\n"
        + marks.format(
            words,
            "| variant | batch | output tokens per second | gain | share of roofline |\n"
            "| --- | ---: | ---: | ---: | ---: |\n"
            "| 01_forward | 1 | 10 | 1.00× | 1% |\n"
            "| 02_kv_cache | 1 | 55 | 5.50× | 6% |\n",
        )
        + "\nafter"
    )
    assert fill(filled, tmp_path) == filled
    example = f"```\n{marks.format(words, '')}\n```\n"
    assert fill(example, tmp_path) == example
    assert "| 01_forward | 10 |" in fill(marks.format('"workload=w" "variant=01_forward"', ""), tmp_path)
    with pytest.raises(UserError, match="variant=a"):
        fill(marks.format('"variant=a variant"', ""), tmp_path)
    with pytest.raises(UserError, match="no run of the evidence matches"):
        fill(marks.format("batch=3", ""), tmp_path)
    with pytest.raises(UserError, match="'nonsense'"):
        fill(marks.format("nonsense", ""), tmp_path)


def test_gain_compares_the_same_work_with_the_phase_below():
    phase = find_phase("02")
    other_model = Run(
        "01_forward", "w", "hash", "other", "real", "float32", {"output_tokens_per_s": Metric((1.0,))}
    )
    found = evidence(other_model, run("01_forward", 10.0, batch=1), run("02_kv_cache", 52.0, batch=1))
    known = gain(phase, found)
    assert (factor_text(known), gain_words(known.metric)) == ("5.2×", "output tokens per second")
    assert gain(phase, evidence(other_model, run("02_kv_cache", 52.0))) is None
    assert gain(phase, None) is None
    assert factor_text(None) == ""

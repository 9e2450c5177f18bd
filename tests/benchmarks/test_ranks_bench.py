"""Phase 14's benchmark: a part that fails is told and does not stop the next, and its figure can be drawn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from phases.commands.benches import _module

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return _module("14_parallel")


def made_up(bench: ModuleType, counts: Mapping[int, float]) -> list[Run]:
    """Evidence as it might come from GPUs: so many ranks, so many times the rate of one."""
    runs = []
    for ranks, times in counts.items():
        variant = bench.BEFORE if ranks == 1 else bench.PHASE
        for part, value in {"single": 260.0, "offline": 9900.0, "prefill": 44_000.0}.items():
            metric = "prompt_tokens_per_s" if part == "prefill" else "output_tokens_per_s"
            metrics = {"output_tokens_per_s": Metric((10.0,)), metric: Metric((value * times,) * 3)}
            facts = {"ranks": ranks, "part": part}
            runs.append(Run(variant, bench.WORK[part], "", "qwen3-8b", "random", "bfloat16", metrics, facts))
        for way in bench.WAYS if ranks > 1 else ():
            for size in bench.BYTES:
                microseconds = Metric((5.0 + size / 1e5,))
                facts = {"ranks": ranks, "way": way, "bytes": size}
                metrics = {"all_reduce_us": microseconds}
                runs.append(Run(bench.PHASE, bench.SUMS, "", "", "random", "bfloat16", metrics, facts))
    return runs


def failed(bench: ModuleType, part: str) -> Run:
    said = {"ranks": 2, "part": part, "error": "no answer within 300 s"}
    found: Run = bench.facts(BenchOptions(CPU, torch.bfloat16), bench.FAILED, {}, said)
    return found


def test_where_a_tokens_time_goes(bench: ModuleType) -> None:
    runs = made_up(bench, {1: 1.0, 2: 1.7})
    evidence = collect(bench.PHASE, runs, CPU)
    (one,) = evidence.find(part="single", ranks=1)
    (two,) = evidence.find(part="single", ranks=2)
    assert bench.sums_of_a_token(evidence, one) == 0.0, "one rank has nothing to add up"
    # Two sums for each of 36 layers and one for the embedding, of 5.08 µs each.
    assert bench.sums_of_a_token(evidence, two) == pytest.approx(73 * (5.0 + 8192 / 1e5) / 1e3)


def test_a_file_keeps_what_is_not_measured_again(bench: ModuleType, tmp_path: Path) -> None:
    runs = [*made_up(bench, {1: 1.0, 2: 1.7}), failed(bench, "reduce one-shot")]
    path = collect(bench.PHASE, runs, CPU).write(tmp_path / "found.json")
    left = bench.others(path, CPU, [2], ["reduce", "prefill"])
    kept = {(run.options["ranks"], bench.part_of(run)) for run in left}
    assert kept == {(1, "single"), (1, "offline"), (1, "prefill"), (2, "single"), (2, "offline")}
    assert bench.others(tmp_path / "nowhere.json", CPU, [2], ["reduce"]) == []
    other = Evidence.load(path)
    other.git["commit"] = "another"  # type: ignore[index]
    assert bench.others(other.write(path), CPU, [2], ["reduce"]) == [], "parts of two commits are mixed"


class Scripted:
    """A child that answers as it is told: parts in `wrong` fail."""

    wrong: tuple[str, ...] = ()
    asked: list[str]
    limits: dict[str, float]
    ended = 0

    def __init__(self, options: BenchOptions, ranks: int, more: Mapping[str, Any]) -> None:
        self.ranks, self.more = ranks, more

    def ask(self, part: str, seconds: float) -> list[Run]:
        type(self).asked.append(" ".join([str(self.ranks), part, *self.more.values()]))
        type(self).limits[part] = seconds
        if part in self.wrong and "all_reduce" not in self.more:
            raise sys.modules["bench_14_parallel"].Failure("it hangs")
        return [Run("14_parallel", part, "", "", "", "", {}, {"ranks": self.ranks, "part": part})]

    def end(self) -> None:
        type(self).ended += 1


def script(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Parts are measured by `Scripted`, of which one fails."""
    monkeypatch.setattr(bench, "Child", Scripted)
    monkeypatch.setattr(Scripted, "wrong", (wrong,))
    monkeypatch.setattr(Scripted, "asked", [], raising=False)
    monkeypatch.setattr(Scripted, "limits", {}, raising=False)


@pytest.mark.parametrize("wrong", ["single", "startup", "reduce nccl"])
def test_a_part_that_fails_does_not_stop_the_next(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    script(bench, monkeypatch, wrong)
    kept: list[int] = []
    options = BenchOptions(CPU, torch.float32)
    runs = bench.measure(options, [1, 2], bench.PARTS, 1.0, lambda runs: kept.append(len(runs)))
    lost = [(run.options["ranks"], run.options["part"]) for run in runs if run.workload == bench.FAILED]
    assert lost == ([] if wrong == "reduce nccl" else [(1, wrong)]) + [(2, wrong)]
    assert kept == list(range(1, len(runs) + 1)), "the file is not written after each part"
    told = [run for run in runs if run.workload == bench.FAILED]
    assert all(run.workload_sha256 and run.metrics for run in told), "what failed cannot be kept as evidence"
    if wrong == "single":
        again = ["startup", "offline", "prefill"]
        assert Scripted.asked[:5] == ["1 startup", "1 single", *(f"1 {part}" for part in again)], (
            "after a part that failed the engine is made again"
        )
    assert (2, "same") in {(run.options["ranks"], run.options["part"]) for run in runs}


@pytest.mark.long
def test_a_part_that_takes_too_long_ends_with_its_processes(bench: ModuleType) -> None:
    options = BenchOptions(CPU, torch.float32, quick=True, repeats=1)
    child = bench.Child(options, 2, {})
    with pytest.raises(bench.Failure, match="no answer within 0 s"):
        child.ask("reduce nccl", 0.01)
    child.end()
    assert child.process.returncode == -9
    child = bench.Child(options, 2, {"all_reduce": "no way"})
    with pytest.raises(bench.Failure, match="UserError: all_reduce is 'no way'"):
        child.ask("startup", 100)
    child.end()

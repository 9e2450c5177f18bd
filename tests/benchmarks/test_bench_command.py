"""`ladder bench`: where its results go, and what stands beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_command
from benchmarks.evidence import Evidence, Metric, Run, collect, device_folder
from common.device import device_name, pick_device
from common.errors import UserError

CPU = pick_device("cpu")
HERE = device_folder("cpu", device_name(CPU))


def evidence(rate: float) -> Evidence:
    metrics = {"output_tokens_per_s": Metric((rate,))}
    return collect(
        "01_forward",
        [Run("01_forward", "a-work", "0" * 64, "m", "real", "float32", metrics)],
        CPU,
    )


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A checkout and a cache folder, and a benchmark that measures 20 where 10 is recorded."""
    checkout, cache = tmp_path / "checkout", tmp_path / "cache"
    monkeypatch.setenv("LADDER_GIT_COMMIT", "f" * 40)
    monkeypatch.setattr(bench_command, "ROOT", checkout)
    monkeypatch.setattr(bench_command, "RESULTS", checkout / "benchmarks" / "results")
    monkeypatch.setattr(bench_command, "FIGURES", checkout / "figures")
    monkeypatch.setattr(bench_command, "cache_home", lambda: cache)
    recorded = replace(evidence(10.0), seconds=300.0)
    monkeypatch.setattr(bench_command, "results", lambda: {HERE: {"01_forward": recorded}})
    module = SimpleNamespace(
        run=lambda options: evidence(20.0), draw=lambda _, out: out.write_bytes(b"png")
    )
    monkeypatch.setattr(bench_command, "_module", lambda name: module)
    return checkout, cache


def bench(**changed: Any) -> int:
    asked = {"quick": False, "record": False, "repeats": None} | changed
    given = {"what": "01", "device": "cpu", "dtype": "auto", "model": None}
    return bench_command.bench(SimpleNamespace(**given, **asked))


def written(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*.*") if path.is_file())


def test_a_benchmark_leaves_the_checkout_alone(
    homes: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkout, cache = homes
    assert bench() == 0
    assert written(checkout) == [], "a benchmark without --record wrote into the checkout"
    assert written(cache / "bench") == [
        f"benchmarks/results/{HERE}/01_forward.json",
        f"figures/{HERE}/01_forward.png",
    ]
    shown = capsys.readouterr()
    assert "recorded run took 5 min" in shown.err, "how long it takes is said before it starts"
    row = next(line for line in shown.out.splitlines() if line.startswith("01_forward "))
    assert row.split()[1:] == ["20", "10", "2.00×"], (
        "the result stands beside the recorded one"
    )


def test_only_record_replaces_evidence(homes: tuple[Path, Path]) -> None:
    checkout, cache = homes
    assert bench(record=True) == 0
    assert written(checkout) == [
        f"benchmarks/results/{HERE}/01_forward.json",
        f"figures/{HERE}/01_forward.png",
    ]
    assert written(cache) == [], "--record writes to the checkout, not to the cache"
    kept = Evidence.load(checkout / "benchmarks" / "results" / HERE / "01_forward.json")
    assert kept.seconds is not None, "evidence says how long it took to measure"


def test_what_belongs_to_no_commit_and_a_quick_look_are_no_evidence(
    homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--record keeps what was measured with care"):
        bench(quick=True, record=True)
    with pytest.raises(UserError, match="--repeats is 2, but --record keeps at least 3"):
        bench(repeats=2, record=True)
    monkeypatch.setenv("LADDER_GIT_COMMIT", f"{'f' * 40}:{'0' * 16}")
    with pytest.raises(UserError, match="no copy of that commit"):
        bench(record=True)
    monkeypatch.delenv("LADDER_GIT_COMMIT")
    with pytest.raises(UserError, match="LADDER_GIT_COMMIT is not set"):
        bench(record=True)
    assert bench(quick=True) == 0, "only what is recorded needs a commit"
    assert written(homes[0]) == []


def test_bytes_are_printed_as_the_gigabytes_that_their_label_says() -> None:
    assert bench_command._number(5_004_656_640.0, "kv_cache_bytes") == "5.005"
    assert bench_command._number(5_004.4, "output_tokens_per_s") == "5,004"
    assert bench_command._number(None, "kv_cache_bytes") == ""

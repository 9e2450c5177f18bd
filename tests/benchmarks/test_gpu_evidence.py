"""`ladder bench gpu_tests`: what it keeps of a run of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_tests
from benchmarks.evidence import ROOT, BenchOptions, Evidence
from common import device

OPTIONS = BenchOptions(torch.device("cuda"), torch.bfloat16)
REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="4">
<testcase classname="tests.a.test_one" name="test_x[1]" file="tests/a/test_one.py" time="0.5" />
<testcase classname="tests.a.test_one" name="test_x[2]" file="tests/a/test_one.py" time="0.25">
<failure message="AssertionError">text</failure></testcase>
<testcase classname="tests.a.test_one" name="test_y" file="tests/a/test_one.py" time="0.0">
<skipped type="pytest.skip" message="no" /></testcase>
<testcase classname="tests.test_two.TestZ" name="test_z" file="tests/test_two.py" time="2.0">
<error message="fixture">text</error></testcase>
<testcase classname="tests.test_two.TestZ" name="test_w" file="tests/test_two.py" time="1.0" />
</testsuite></testsuites>"""


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_name", lambda device: "NVIDIA Fake 1")


def report_of(arguments: Sequence[str]) -> Path:
    (path,) = [word.removeprefix("--junitxml=") for word in arguments if word.startswith("--junitxml=")]
    return Path(path)


def fake(arguments: Sequence[str]) -> int:
    assert arguments[:2] == ["-m", "gpu"]
    report_of(arguments).write_text(REPORT, encoding="utf-8")
    return 1


def test_outcomes_by_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "SELECTIONS", gpu_tests.SELECTIONS[:1])
    evidence = gpu_tests.run(OPTIONS, fake)
    one, two = evidence.runs
    counts = [[int(run.median(f"tests_{name}")) for name in gpu_tests.OUTCOMES] for run in (one, two)]
    assert counts == [[1, 1, 1], [1, 1, 0]]
    assert (one.median("seconds"), two.median("seconds")) == (0.75, 3.0)
    assert one.options == {"file": "tests/a/test_one.py", "failed_tests": ["test_x[2]"]}
    assert evidence.folder == "fake-1" and evidence.git and evidence.versions["torch"]
    assert "2 passed, 2 failed, 1 skipped in 3.8 s; failed: test_x[2], test_z" in capsys.readouterr().err
    assert Evidence.load(evidence.write(tmp_path / "gpu_tests.json")) == evidence


def test_the_kernels_tests_run_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def runner(arguments: Sequence[str]) -> int:
        asked.append(arguments)
        second = REPORT.replace("tests/a/test_one.py", "tests/a/test_three.py")
        report_of(arguments).write_text(REPORT if len(asked) == 1 else second, encoding="utf-8")
        return 0

    runs = gpu_tests.run(OPTIONS, runner).runs
    assert [run.variant for run in runs] == ["test_one", "test_three", "test_two"]
    assert asked[1][:2] == ["-m", "not gpu"]
    assert all((ROOT / file).is_file() for file in asked[1][2:4])

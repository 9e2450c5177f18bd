"""The tests that need a GPU, run on one: `ladder bench gpu_tests`.

Runs what `make test-gpu` runs, and the tests of the kernels that run in Triton's interpreter elsewhere and
natively here. Shows their output, and keeps what came of them as evidence: one run for each test file, with
the tests that passed, failed and were skipped, and the seconds they took. A failed test fails no benchmark:
it stands in the evidence, by name, and so does a file that cannot be imported.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.evidence import ROOT, BenchOptions, Evidence, Metric, Run, collect
from common.console import err
from common.errors import UserError

NAME = "gpu_tests"
TOGETHER = ("-n", "8", "--dist", "worksteal")
"""Eight processes: what compiles kernels waits for a processor, not for the GPU."""
SELECTIONS = (
    (*TOGETHER, "-m", "gpu and not alone", "--continue-on-collection-errors", "tests"),
    ("-m", "gpu and alone", "--continue-on-collection-errors", "tests"),
    (
        *TOGETHER,
        "-m",
        "not gpu",
        "tests/phases/test_06_formats.py",
        "tests/phases/test_06_head_sizes.py",
        "tests/phases/test_06_triton_paged_attention.py",
        "tests/phases/test_09_cuda_graphs.py",
        "tests/phases/test_09_sampling.py",
        "tests/appendix/test_latency.py",
    ),
)
"""What pytest is asked for, in one call after the other."""
OUTCOMES = ("passed", "failed", "skipped")

Runner = Callable[[Sequence[str]], int]
"""Runs pytest with these arguments and returns its exit code."""


@dataclass(frozen=True)
class Outcome:
    """What came of one test. file: `tests/phases/test_06_....py`. result: one of `OUTCOMES`."""

    file: str
    name: str
    result: str
    seconds: float


def pytest(arguments: Sequence[str]) -> int:
    """Run pytest in a process of its own, its output on the terminal."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False
    ).returncode


def run(options: BenchOptions, runner: Runner = pytest) -> Evidence:
    """Run the tests and collect their outcomes.

    Raises:
        UserError: there is no GPU to run on, or pytest ran no test.
    """
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but the GPU's tests run on 'cuda' only"
        )
    with tempfile.TemporaryDirectory() as folder:
        outcomes: list[Outcome] = []
        for selection in SELECTIONS:
            report = Path(folder) / f"report{len(outcomes)}.xml"
            code = runner(
                [*selection, "-q", f"--junitxml={report}", "-o", "junit_family=xunit1"]
            )
            found = read_report(report) if report.exists() else []
            if not found:
                raise UserError(
                    f"pytest ended with code {code} and ran no test: its output says why"
                )
            outcomes += found
    evidence = collect(NAME, runs_of(outcomes), options.device)
    err.print(summary(evidence), soft_wrap=True)
    return evidence


def read_report(path: Path) -> list[Outcome]:
    """The outcomes in a JUnit report, as pytest writes it with `junit_family=xunit1`."""
    found = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        result = "passed"
        if case.find("skipped") is not None:
            result = "skipped"
        if case.find("failure") is not None or case.find("error") is not None:
            result = "failed"
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        found.append(Outcome(file, case.get("name", ""), result, float(case.get("time", 0))))
    return found


def runs_of(outcomes: Sequence[Outcome]) -> list[Run]:
    """One run a test file. The hash names the tests that ran, so that two files can be compared."""
    by_file: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_file[outcome.file].append(outcome)
    runs = []
    for file, mine in sorted(by_file.items()):
        counts = {
            result: sum(outcome.result == result for outcome in mine) for result in OUTCOMES
        }
        failed = [outcome.name for outcome in mine if outcome.result == "failed"]
        names = "\n".join(sorted(outcome.name for outcome in mine))
        runs.append(
            Run(
                variant=Path(file).stem,
                workload="pytest on a GPU",
                workload_sha256=hashlib.sha256(names.encode()).hexdigest(),
                model="small shapes",
                weights="random",
                dtype="float32, float16, bfloat16",
                options={"file": file} | ({"failed_tests": failed} if failed else {}),
                metrics={
                    f"tests_{result}": Metric((float(count),))
                    for result, count in counts.items()
                }
                | {"seconds": Metric((sum(outcome.seconds for outcome in mine),))},
            )
        )
    return runs


def summary(evidence: Evidence) -> str:
    """One line: how many tests passed, failed and were skipped, and which failed."""
    totals = {
        result: sum(int(run.median(f"tests_{result}")) for run in evidence.runs)
        for result in OUTCOMES
    }
    seconds = sum(run.median("seconds") for run in evidence.runs)
    failed = [name for run in evidence.runs for name in run.options.get("failed_tests", ())]
    text = ", ".join(f"{count} {result}" for result, count in totals.items())
    return f"{text} in {seconds:,.1f} s" + (f"; failed: {', '.join(failed)}" if failed else "")

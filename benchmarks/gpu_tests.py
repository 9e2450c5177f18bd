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
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from benchmarks.evidence import ROOT, BenchOptions, Evidence, Metric, Run, collect
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


def run(options: BenchOptions) -> Evidence:
    """Run the tests and collect their outcomes.

    Raises:
        UserError: there is no GPU to run on, or pytest ran no test.
    """
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but the GPU's tests run on 'cuda' only"
        )
    by_file: dict[str, list[Element]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number, selection in enumerate(SELECTIONS):
            report = Path(folder) / f"report{number}.xml"
            how = ("-q", f"--junitxml={report}", "-o", "junit_family=xunit1")
            command = [sys.executable, "-m", "pytest", *selection, *how]
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
            cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
            found = list(cases)
            if not found:
                raise UserError(
                    f"pytest ended with code {code} and ran no test: its output says why"
                )
            for case in found:
                name = case.get("classname", "").replace(".", "/") + ".py"
                by_file[case.get("file") or name].append(case)
    runs = [run_of(file, cases) for file, cases in sorted(by_file.items())]
    return collect(NAME, runs, options.device)


def outcome(case: Element) -> str:
    """What came of one test, as pytest reports it with `junit_family=xunit1`."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def run_of(file: str, cases: Sequence[Element]) -> Run:
    """Count the outcomes of a test file. The hash names the tests, so that two files can be compared."""
    said = [outcome(case) for case in cases]
    counts = {f"tests_{name}": float(said.count(name)) for name in OUTCOMES}
    counts["seconds"] = sum(float(case.get("time", 0)) for case in cases)
    failed = [
        case.get("name") for case, one in zip(cases, said, strict=True) if one == "failed"
    ]
    names = "\n".join(sorted(case.get("name", "") for case in cases))
    return Run(
        variant=Path(file).stem,
        workload="pytest on a GPU",
        workload_sha256=hashlib.sha256(names.encode()).hexdigest(),
        model="small shapes",
        weights="random",
        dtype="float32, float16, bfloat16",
        options={"file": file} | ({"failed_tests": failed} if failed else {}),
        metrics={name: Metric((count,)) for name, count in counts.items()},
    )

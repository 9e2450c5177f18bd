"""A rung needs the rungs below it, and nothing above: not their modules, not their syntax."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phases import PHASES, ROOT, Phase, appendix, phase_named, registry
from tests import flags

LOADED = """
import json, sys
from common.sampling.params import SamplingParams
from phases import phase_named
from phases.registry import load_engine, missing_for
import phases.commands.run
engine = load_engine(phase_named(sys.argv[1]), "random:tiny", device="cpu", dtype="float32")
(*_, last) = engine.stream([[1, 2, 3]], SamplingParams(max_tokens=2))
print(json.dumps(list(sys.modules)))
"""


def loaded(program: str, *arguments: str, root: Path = ROOT) -> list[str]:
    """The modules that a process has at the end of a program, which prints them last."""
    paths = [root, *(phase_folder(root, phase) for phase in PHASES)]
    start = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}"
    ran = subprocess.run(
        [sys.executable, "-c", f"{start}\n{program}", *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    modules: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return modules


def phase_folder(root: Path, phase: Phase) -> Path:
    return root / "phases" / phase.name


def above(modules: list[str], number: int) -> list[str]:
    """Those of the modules that belong to phases above a number, or to entries for such phases."""
    later = {phase.package for phase in PHASES if phase.number > number}
    entries = {
        f"phases.appendix.{place.partition(':')[0]}"
        for place, extends in appendix.FEATURES.items()
        if extends > number
    }
    return [name for name in modules if name.split(".")[0] in later or name in entries]


@pytest.mark.parametrize(
    "number",
    [
        "01",
        "05",
        *(pytest.param(other, marks=pytest.mark.slow) for other in ("03", "04", "09")),
    ],
)
def test_running_a_rung_imports_nothing_above_it(number: str) -> None:
    modules = loaded(LOADED, number)
    assert not above(modules, int(number))
    if number == "01":
        packages = {phase.package for phase in PHASES}
        assert {name.split(".")[0] for name in modules} & packages == {"forward"}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_measuring_a_rung_imports_nothing_above_it(phase: Phase) -> None:
    program = (
        "import json, sys\n"
        "from benchmarks.bench_command import _module\n"
        "_module(sys.argv[1])\nprint(json.dumps(list(sys.modules)))"
    )
    assert not above(loaded(program, phase.name), phase.number)


@pytest.mark.slow
def test_a_students_error_in_the_next_rung_breaks_no_rung_below(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.ipynb", "__pycache__", "weights", "*.safetensors")
    for name in ("common", "phases", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for later in ("paged_cache", "speculative", "hybrid_cache"):
        folder = phase_folder(tmp_path, phase_named(later)) / later
        for file in folder.glob("*.py"):
            file.write_text("def (:\n", encoding="utf-8")
    modules = loaded(LOADED, "04", root=tmp_path)
    assert not above(modules, 4)


def test_the_table_of_flags_is_what_the_features_say() -> None:
    says = "the table is old: run `python -m tests.flags`"
    assert flags.TABLE.read_text(encoding="utf-8") == flags.text(), says


def test_the_appendix_names_the_phase_of_each_of_its_features() -> None:
    for number in range(len(PHASES) + 1):
        kinds = appendix.features(number)
        expected = [phase for phase in appendix.FEATURES.values() if phase <= number]
        assert [kind.phase for kind in kinds] == expected


def test_a_rung_has_its_own_features_and_those_below() -> None:
    for phase in PHASES[registry.BLOCKS - 1 :]:
        assert all(kind.phase <= phase.number for kind in registry.features(phase))

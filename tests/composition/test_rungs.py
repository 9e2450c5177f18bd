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


MEASURED = """
import json, sys
from benchmarks.bench_command import _module
_module(sys.argv[1])
print(json.dumps(list(sys.modules)))
"""

FORKED = """
import os
import matplotlib.figure, torch  # nobody's here, and most of what the start of a process takes
program, *names = sys.argv[1:]
for name in names:
    if not (child := os.fork()):
        sys.argv[1:] = [name]
        exec(program, {})
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""


def loaded(program: str, *names: str, root: Path = ROOT) -> dict[str, list[str]]:
    """The modules that a process has at the end of a program about a name, which prints them: for each name.

    Each runs in a fork of its own of one process that holds none of this checkout's modules.
    """
    paths = [root, *(phase_folder(root, phase) for phase in PHASES)]
    start = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}"
    ran = subprocess.run(
        [sys.executable, "-c", f"{start}\n{FORKED}", program, *names],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(zip(names, map(json.loads, ran.stdout.splitlines()), strict=True))


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


RUN = ("01", "03", "04", "05", "09")


@pytest.fixture(scope="module")
def running() -> dict[str, list[str]]:
    return loaded(LOADED, *RUN)


@pytest.mark.parametrize("number", RUN)
def test_running_a_rung_imports_nothing_above_it(
    running: dict[str, list[str]], number: str
) -> None:
    modules = running[number]
    assert not above(modules, int(number))
    if number == "01":
        packages = {phase.package for phase in PHASES}
        assert {name.split(".")[0] for name in modules} & packages == {"forward"}


@pytest.fixture(scope="module")
def measuring() -> dict[str, list[str]]:
    return loaded(MEASURED, *(phase.name for phase in PHASES))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=str)
def test_measuring_a_rung_imports_nothing_above_it(
    measuring: dict[str, list[str]], phase: Phase
) -> None:
    assert not above(measuring[phase.name], phase.number)


@pytest.mark.slow
def test_a_students_error_in_the_next_rung_breaks_no_rung_below(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.ipynb", "__pycache__", "weights", "*.safetensors")
    for name in ("common", "phases", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for later in ("paged_cache", "speculative", "hybrid_cache"):
        folder = phase_folder(tmp_path, phase_named(later)) / later
        for file in folder.glob("*.py"):
            file.write_text("def (:\n", encoding="utf-8")
    modules = loaded(LOADED, "04", root=tmp_path)["04"]
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

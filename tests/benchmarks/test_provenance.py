"""The commit of evidence: checked against the code that ran, with history and without, in every file."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks.evidence import ROOT, Evidence, results
from benchmarks.gains import gain
from benchmarks.provenance import clean, combined, committed, differing, git_state, sources
from common.errors import UserError
from phases import PHASES

HASHED = "2026-11-28"
"""From this day on evidence without `sources` counts as dirty."""


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit of two packages and a lesson."""
    root = tmp_path / "checkout"
    for name in ("common/a.py", "phases/01_forward/bench.py", "phases/01_forward/README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    git(tmp_path, "init", "checkout")
    git(root, "add", ".")
    git(root, "commit", "-m", "x")
    return root


@pytest.fixture
def copied(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its files without its history."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    copy = checkout.parent / "copy"
    for path in checkout.rglob("*.*"):
        if path.is_file() and ".git" not in path.parts:
            (copy / path.relative_to(checkout)).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(checkout)).write_bytes(path.read_bytes())
    return copy


def test_a_package_that_differs_is_dirty_and_named(checkout: Path) -> None:
    state = git_state(checkout)
    assert state == {
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
        "sources": sources(checkout),
    }
    assert list(state["sources"]) == ["common", "phases/01_forward"]
    for harmless in (
        "benchmarks/results/e.json",
        "phases/01_forward/README.md",
        "common/__pycache__/a.py",
    ):
        (checkout / harmless).parent.mkdir(parents=True, exist_ok=True)
        (checkout / harmless).write_text("new", encoding="utf-8")
    clean(checkout)
    (checkout / "phases/01_forward/more.py").write_text("untracked", encoding="utf-8")
    assert git_state(checkout)["dirty"] is True
    with pytest.raises(UserError, match=r"but phases/01_forward differ from"):
        clean(checkout)


def test_a_copy_has_the_hashes_of_its_commit(
    checkout: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    given = f"{commit}:{combined(committed(checkout, commit))}"
    monkeypatch.setenv("LADDER_GIT_COMMIT", given)
    assert git_state(copied) == git_state(checkout)
    clean(copied)
    (copied / "common/a.py").write_text("other", encoding="utf-8")
    assert git_state(copied)["dirty"] is True
    with pytest.raises(UserError, match="no copy of that commit"):
        clean(copied)
    monkeypatch.setenv("LADDER_GIT_COMMIT", commit)
    state = git_state(copied)
    assert state["dirty"] is None, "by a commit alone a copy cannot tell"
    assert differing(state["sources"], committed(checkout, commit)) == ["common"], (
        "but its history can"
    )


@pytest.mark.parametrize("text", ["main", "f" * 39, f"{'f' * 40}:1", f"{'f' * 40} "])
def test_what_is_no_commit_is_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("LADDER_GIT_COMMIT", text)
    with pytest.raises(
        UserError, match=r"LADDER_GIT_COMMIT is .* not what `python -m benchmarks.provenance`"
    ):
        git_state(copied)


def recorded() -> dict[str, Evidence]:
    return {
        f"{device}/{name}": found
        for device, files in results().items()
        for name, found in files.items()
    }


@pytest.fixture(scope="module")
def history() -> Path:
    """The checkout, where it has its whole history."""
    try:
        if git(ROOT, "rev-parse", "--is-shallow-repository") == "false":
            return ROOT
    except (OSError, subprocess.CalledProcessError):
        pass
    pytest.skip("this copy has no history, or a part of it")


def is_ancestor(commit: str) -> bool:
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_every_commit_is_an_ancestor_that_was_there_before(history: Path) -> None:
    unknown, later = set(), set()
    for name, evidence in recorded().items():
        commit = evidence.git["commit"]
        if not is_ancestor(commit):
            unknown.add(name)
        elif datetime.fromisoformat(
            git(history, "show", "-s", "--format=%cI", commit)
        ) > datetime.fromisoformat(evidence.when):
            later.add(name)
    assert not unknown, f"evidence of commits that are not in this history: {unknown}"
    assert not later, f"evidence from before its commit: {later}"


def test_no_evidence_is_dirty(history: Path) -> None:
    """The hashes that a file has are its commit's; what knows no hashes says that it was clean."""
    dirty = {}
    for name, evidence in recorded().items():
        found = evidence.git.get("sources")
        if found is not None:
            dirty[name] = differing(found, committed(history, evidence.git["commit"]))
        elif evidence.git["dirty"] is not False or evidence.when > HASHED:
            dirty[name] = ["not known"]
    assert not any(dirty.values()), f"what differs: {dirty}"


def test_phases_on_a_cpu_were_measured_alone() -> None:
    """Another program on two cores halves what is measured, and not of all variants alike."""
    beside = {name: one.beside for name, one in recorded().items() if name.startswith("cpu/")}
    phases = {name: found for name, found in beside.items() if name[4:6].isdigit()}
    assert len(phases) == len(PHASES) - 1, "phase 06 alone has no bench on a CPU"
    busy = {name: found for name, found in phases.items() if not found or found["busy"]}
    assert not busy, f"recorded beside other programs, or it is not known: {busy}"


def test_a_headline_has_three_samples_a_side() -> None:
    few = set()
    for name, evidence in recorded().items():
        phase = next((phase for phase in PHASES if phase.name == evidence.phase), None)
        found = gain(phase, evidence) if phase else None
        if found is not None:
            counts = [
                len(run.metrics[found.metric].samples) for run in (found.before, found.after)
            ]
            if min(counts) < 3:
                few.add(name)
    assert not few, "a headline of fewer than three samples"

"""The rows of the page of evidence: our files with their commits, other engines with their versions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.evidence import PEERS_FILE, RESULTS, ROOT, Evidence, results
from benchmarks.recorded_peers import load

Lines = list[list[str]]


def evidence_lines(root: Path) -> Lines:
    """Return the rows of all evidence files: when, commit, age, machine and samples, under a heading.

    The age counts the commits from the one that was measured to the newest that any file was measured at, so
    that it changes when something is recorded and not with every commit.
    """
    lines = [
        ["file", "recorded", "commit", "machine", "host", "commits behind", "runs", "samples"]
    ]
    files = {
        f"{device}/{name}": evidence
        for device, found in results(root / RESULTS.relative_to(ROOT)).items()
        for name, evidence in found.items()
    }
    behind = _behind(root, {evidence.git["commit"] for evidence in files.values()})
    for name, evidence in files.items():
        commit = evidence.git["commit"]
        age = behind.get(commit)
        lines.append(
            [
                f"[{name}](../{figure})"
                if (root / (figure := f"figures/{name}.png")).exists()
                else name,
                evidence.when[:10],
                f"`{commit[:8]}`",
                _machine(evidence),
                str(evidence.machine.get("host", "not kept")),
                "not in this history" if age is None else str(age),
                str(len(evidence.runs)),
                _samples(evidence),
            ]
        )
    return lines


def peer_lines(root: Path) -> Lines:
    """Return the rows of all recordings of other engines, under a heading."""
    folder = root / RESULTS.relative_to(ROOT)
    heading = ["device", "engine", "measured", "beside phase", "log", "flags", "ran without"]
    lines = [[*heading, "samples"]]
    for path in sorted(folder.glob(f"*/{PEERS_FILE}")):
        for peer in load(path.parent.name, folder):
            counts = [
                len(values.samples) for run in peer.runs for values in run.metrics.values()
            ]
            phases = ", ".join(dict.fromkeys(name.split("_")[0] for name in peer.beside))
            cells = [
                path.parent.name,
                peer.name,
                peer.when,
                phases,
                f"`{peer.log}`",
                f"`{peer.flags}`".replace("|", "\\|"),
                peer.lacks,
            ]
            lines.append([*cells, _range(counts)])
    return lines


ROWS = {
    "ready_s": "seconds until it answers",
    "memory_mb": "memory, MB",
    "output_tokens_per_s": "tokens a second",
    "ttft_ms_p50": "first token, ms",
    "prompt_tokens_per_s": "prompt tokens a second",
}
"""Metrics of the comparison of servers, in words."""
FEWER_IS_BETTER = ("ready_s", "memory_mb", "ttft_ms_p50")


def server_lines(evidence: Evidence) -> Lines:
    """Return the rows of `llama_cpp_server`: both servers side by side, and ours over theirs.

    Beside a busy program our rows are one for each way of waiting, the default first.
    """
    peer = next(run.variant for run in evidence.runs if run.variant.startswith("llama"))
    ours = [run for run in evidence.runs if run.variant != peer]
    lines = [["", "this", peer, "this over it"]]
    for run in ours:
        busy = run.options.get("neighbours", 0)
        other = next(
            each
            for each in evidence.runs
            if (each.variant, each.workload, each.options) == (peer, run.workload, run.options)
        )
        way = run.variant.partition(", ")[2]
        beside = f", beside {busy} busy program" if busy else ""
        name = run.workload + beside + (f", waiting: {way}" if way else "")
        for metric in run.metrics:
            one, its = run.median(metric), other.median(metric)
            cells = [f"{name}: {ROWS[metric]}", f"{one:,.4g}", f"{its:,.4g}"]
            fewer = " (fewer is better)" if metric in FEWER_IS_BETTER else ""
            lines.append([*cells, f"{one / its:.2f}×{fewer}"])
    return lines


def has_history(root: Path) -> bool:
    """Return whether commits can be counted: not in a copy without history, nor in a shallow clone."""
    return _git(root, "rev-parse", "--is-shallow-repository") == "false"


def _machine(evidence: Evidence) -> str:
    gpus = evidence.machine.get("gpus", [])
    return (
        f"{len(gpus)} × {evidence.machine['name']}"
        if len(gpus) > 1
        else str(evidence.machine["name"])
    )


def _samples(evidence: Evidence) -> str:
    return _range(
        len(metric.samples) for run in evidence.runs for metric in run.metrics.values()
    )


def _range(counts: Iterable[int]) -> str:
    found = set(counts)
    return str(*found) if len(found) == 1 else f"{min(found)} to {max(found)}"


def _behind(root: Path, commits: set[str]) -> dict[str, int]:
    """Return how many commits each is behind the newest of them; without what this history does not have."""
    counts = {
        commit: count for commit in commits if (count := _count(root, commit)) is not None
    }
    newest = max(counts, key=counts.__getitem__, default="")
    return {commit: _count(root, newest, f"^{commit}") or 0 for commit in counts}


def _count(root: Path, *revisions: str) -> int | None:
    said = _git(root, "rev-list", "--count", *revisions, "--")
    return int(said) if said else None


def _git(root: Path, *arguments: str) -> str:
    """Return what git says, or nothing where it fails."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""

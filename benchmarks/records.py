"""The rows of the page of evidence: our files with their commits, other engines with their versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError

from benchmarks.evidence import PEERS_FILE, RESULTS, ROOT, Evidence, results
from benchmarks.provenance import git
from benchmarks.recorded_peers import PeerRun, load

Lines = list[list[str]]


def evidence_lines(root: Path) -> Lines:
    """Return the rows of all evidence files: when, commit, age, machine and samples, under a heading.

    The age counts the commits from the one that was measured to the one that is checked out.
    """
    heads = ["file", "recorded", "commit", "machine", "beside", "runs", "samples"]
    lines = [[*heads, "commits behind"]]
    for device, files in results(root / RESULTS.relative_to(ROOT)).items():
        for phase, evidence in files.items():
            name, commit = f"{device}/{phase}", evidence.git["commit"]
            figure = f"figures/{name}.png"
            age = _git(root, "rev-list", "--count", "HEAD", f"^{commit}", "--")
            counts = (
                len(one.samples) for run in evidence.runs for one in run.metrics.values()
            )
            cells = [
                f"[{name}](../{figure})" if (root / figure).exists() else name,
                evidence.when[:10],
                f"`{commit[:8]}`",
                _machine(evidence),
                _beside(evidence),
                str(len(evidence.runs)),
                _range(counts),
                age or "not in this history",
            ]
            lines.append(cells)
    return lines


def peer_lines(root: Path) -> Lines:
    """Return the rows of all recordings of other engines, under a heading."""
    folder = root / RESULTS.relative_to(ROOT)
    heading = ["device", "engine", "measured", "beside phase", "log", "flags", "ran without"]
    lines = [[*heading, "samples"]]
    for path in sorted(folder.glob(f"*/{PEERS_FILE}")):
        device = path.parent.name
        peers: dict[tuple[str, ...], list[PeerRun]] = defaultdict(list)
        for run in load(device, folder):
            flags = f"`{run.flags}`".replace("|", "\\|")
            name = f"{run.engine} {run.version}"
            peers[name, run.when, f"`{run.log}`", flags, run.lacks].append(run)
        for (name, when, *more), runs in peers.items():
            counts = (len(one.samples) for run in runs for one in run.metrics.values())
            phases = ", ".join(dict.fromkeys(run.beside[:2] for run in runs))
            lines.append([device, name, when, phases, *more, _range(counts)])
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
    """Return the rows of `llama_cpp_server`: both servers, and ours over theirs with the same file.

    Beside a busy program our rows are one for each way of waiting, the default first. The peer's other files
    have a column each.
    """
    peers = dict.fromkeys(r.variant for r in evidence.runs if r.variant.startswith("llama"))
    ours = [run for run in evidence.runs if run.variant not in peers]
    peer, *files = peers
    lines = [
        ["", "this", peer, "this over it", *(f"it, {f.partition(', ')[2]}" for f in files)]
    ]
    for run in ours:
        busy = run.options.get("neighbours", 0)
        same_work = {
            each.variant: each
            for each in evidence.runs
            if (each.workload, each.options) == (run.workload, run.options)
        }
        columns = [run, *(same_work[name] for name in peers)]
        way = run.variant.partition(", ")[2]
        beside = f", beside {busy} busy program" if busy else ""
        name = run.workload + beside + (f", waiting: {way}" if way else "")
        for metric in run.metrics:
            one, its, *others = (each.median(metric) for each in columns)
            cells = [f"{name}: {ROWS[metric]}", f"{one:,.4g}", f"{its:,.4g}"]
            fewer = " (fewer is better)" if metric in FEWER_IS_BETTER else ""
            lines.append(
                [*cells, f"{one / its:.2f}×{fewer}", *(f"{its:,.4g}" for its in others)]
            )
    return lines


def has_history(root: Path) -> bool:
    """Return whether commits can be counted: not in a copy without history, nor in a shallow clone."""
    return _git(root, "rev-parse", "--is-shallow-repository") == "false"


def _machine(evidence: Evidence) -> str:
    """Name the device, how many of it there are, and the processor of its host."""
    facts = evidence.machine
    count = len(facts.get("gpus", []))
    name = f"{count} × {facts['name']}" if count > 1 else str(facts["name"])
    host = facts.get("host", facts["name"])
    return name if host == facts["name"] else f"{name}, {host}"


def _beside(evidence: Evidence) -> str:
    """Say what else ran: the load average at both ends, and programs with their share of a processor."""
    if not evidence.beside:
        return "not kept"
    begin, end = evidence.beside["load"]
    busy = (f"{name} {share:.0%}" for name, share in evidence.beside["busy"].items())
    return ", ".join([f"load {begin} to {end}", *busy])


def _range(counts: Iterable[int]) -> str:
    found = set(counts)
    return str(*found) if len(found) == 1 else f"{min(found)} to {max(found)}"


def _git(root: Path, *arguments: str) -> str:
    """Return what git says, or nothing where it fails."""
    with suppress(OSError, CalledProcessError):
        return git(root, *arguments)
    return ""

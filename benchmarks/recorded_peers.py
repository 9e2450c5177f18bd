"""Other engines' numbers: `benchmarks/results/<device>/peers.json`, beside our evidence and never in it.

A peer has its own date, machine, versions, flags and log. It has no commit of ours and no hash of our
workload: it ran scripts of its own (`benchmarks/other_engines`), with requests of the same lengths. The file
of the H200 is made from what those scripts printed, by `benchmarks/other_engines/record.py`.

A table or figure of a phase shows the best that was measured of each engine, in any of its versions. It says
what that installation lacked of what the engine requires; a difference within the runs' spread is level.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence import PEERS_FILE, RESULTS, Evidence, Metric, Run
from common.errors import UserError

LEVEL = 0.02
"""Two rates that differ by no more than this share are level."""


@dataclass(frozen=True)
class PeerRun(Run):
    """A run of an engine in one version, on one machine on one day.

    machine: name of the processor or GPU.
    way: how the engine ran, if not with its defaults (`batch-invariant`).
    lacks: what its installation had not of what the engine requires, or had in another version.
    beside: the phase whose evidence it stands beside.
    spread: of its first metric, where only the best sample is left.
    """

    engine: str = ""
    version: str = ""
    machine: str = ""
    way: str = ""
    when: str = ""
    flags: str = ""
    log: str = ""
    lacks: str = ""
    beside: str = ""
    spread: float = 0.0


def load(device: str, folder: Path = RESULTS) -> list[PeerRun]:
    """Return the runs of peers on a device, or none.

    Raises:
        UserError: the file is no file of peers, or a peer carries what only our evidence has.
    """
    path = folder / device / PEERS_FILE
    if not path.exists():
        return []
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return [run for found in raw["peers"] for run in _runs(found, path)]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no file of peers: {type(error).__name__} {error}"
        ) from None


def beside(evidence: Evidence, folder: Path = RESULTS, **facts: Any) -> list[PeerRun]:
    """Return the best run of each engine on each work of the evidence, on its processor, with these facts.

    facts: `model`, `workload` or an option. A run counts by the best sample of its first metric, the most
        of a rate and the least of a time. Of each metric that sample alone is returned; our median has to
        stand against it.
    """
    best: dict[tuple[Any, ...], PeerRun] = {}
    works = {run.workload for run in evidence.runs}
    for run in load(evidence.folder, folder):
        same = run.machine == evidence.machine.get("name") and run.workload in works
        if run.beside != evidence.phase or not same or not facts.items() <= run.facts.items():
            continue
        key = run.engine, run.way, run.model, run.workload, *sorted(run.options.items())
        metric = first_metric(run)
        values = run.metrics[metric]
        choose = min if better(metric, 0.0, 1.0) else max
        at = values.samples.index(choose(values.samples))
        kept = {name: Metric(each.samples[at : at + 1]) for name, each in run.metrics.items()}
        found = replace(run, spread=values.spread, metrics=kept)
        if key not in best or better(metric, found.median(metric), best[key].median(metric)):
            best[key] = found
    return [*best.values()]


def first_metric(run: Run) -> str:
    """Return the metric that a run of a peer is about."""
    return next(iter(run.metrics))


def better(metric: str, one: float, other: float) -> bool:
    """Return whether a value is better than another: more of a rate, less of a time."""
    return one < other if metric.startswith("ttft") else one > other


def versus(ours: Run, theirs: PeerRun, metric: str) -> str:
    """Return the factor over a peer as tables print it: `1.34×`, or `level`.

    Level is a difference within 2 %, or within the spread of our samples or of theirs.
    """
    factor = ours.median(metric) / theirs.median(metric)
    if better(metric, 0.0, 1.0):
        factor = 1 / factor
    apart = max(LEVEL, theirs.spread, ours.metrics[metric].spread)
    return "level" if round(abs(factor - 1), 9) <= apart else f"{factor:.2f}×"


def _runs(raw: dict[str, Any], path: Path) -> Iterator[PeerRun]:
    """Return the runs of one peer as they stand in the file."""
    if ours := {"git", "commit", "workload_sha256", "noise", "roofline"} & {
        *raw,
        *(k for r in raw["runs"] for k in r),
    }:
        raise UserError(
            f"{path}: {raw['engine']} has {', '.join(sorted(ours))}, which only our evidence has"
        )
    about = {name: raw[name] for name in ("engine", "version", "when", "flags", "log")}
    about |= {"lacks": raw.get("lacks", ""), "machine": raw["machine"]["name"]}
    for run in raw["runs"]:
        way = run.get("way", "")
        kept = {
            name: run[name] for name in ("workload", "model", "weights", "dtype", "beside")
        }
        yield PeerRun(
            variant=f"{raw['engine']} {raw['version']}{way}",
            workload_sha256="",
            metrics={name: Metric(tuple(values)) for name, values in run["metrics"].items()},
            options=run.get("options", {}),
            way=way.strip(", "),
            **kept,
            **about,
        )

"""Other engines' numbers: `benchmarks/results/<device>/peers.json`, beside our evidence and never in it.

A peer has its own date, machine, versions, flags and log. It has no commit of ours and no hash of our
workload: it ran scripts of its own (`benchmarks/other_engines`), with requests of the same lengths. The file
of the H200 is made from what those scripts printed, by `benchmarks/other_engines/record.py`.

A table or figure of a phase shows the best that was measured of each engine, in any of its versions. It says
what that installation lacked of what the engine requires; a difference within the runs' spread is level.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence import PEERS_FILE, RESULTS, Evidence, Metric, Run
from common.errors import UserError

LEVEL = 0.02
"""Two rates that differ by no more than this share are level."""


@dataclass(frozen=True)
class Peer:
    """One engine in one version, on one machine on one day.

    lacks: what its installation had not of what the engine requires, or had in another version.
    beside: for each run the phase whose evidence it stands beside.
    """

    engine: str
    version: str
    when: str
    machine: str
    flags: str
    log: str
    lacks: str
    beside: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        """Engine and version, as tables show them."""
        return f"{self.engine} {self.version}"


@dataclass(frozen=True)
class Best(Run):
    """The best run of an engine: with its first metric's spread, its day, and what was lacking.

    way: how the engine ran, if not with its defaults (`batch-invariant`).
    """

    engine: str = ""
    version: str = ""
    way: str = ""
    spread: float = 0.0
    when: str = ""
    lacks: str = ""


def load(device: str, folder: Path = RESULTS) -> list[Peer]:
    """Return the peers that were measured on a device, or none.

    Raises:
        UserError: the file is no file of peers, or a peer carries what only our evidence has.
    """
    path = folder / device / PEERS_FILE
    if not path.exists():
        return []
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return [_peer(found, path) for found in raw["peers"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no file of peers: {type(error).__name__} {error}"
        ) from None


def beside(evidence: Evidence, folder: Path = RESULTS, **facts: Any) -> list[Best]:
    """Return the best run of each engine on each work of a phase, among those with these facts.

    facts: `model`, `workload` or an option. A run counts by the best sample of its first metric, the most
        of a rate and the least of a time; if it has no other, that is the sample which is returned, against
        which our median has to stand.
    """
    best: dict[tuple[Any, ...], tuple[float, Best]] = {}
    for peer in load(evidence.folder, folder):
        for phase, run in zip(peer.beside, peer.runs, strict=True):
            said = {"model": run.model, "workload": run.workload, **run.options}
            if phase != evidence.phase or any(
                said.get(name) != value for name, value in facts.items()
            ):
                continue
            way = run.variant.removeprefix(peer.name)
            key = peer.engine, way, run.model, run.workload, *sorted(run.options.items())
            found = _at_best(run, peer)
            value = found.median(first_metric(run))
            if key not in best or better(first_metric(run), value, best[key][0]):
                best[key] = value, found
    return [run for _, run in best.values()]


def first_metric(run: Run) -> str:
    """Return the metric that a run of a peer is about."""
    return next(iter(run.metrics))


def better(metric: str, one: float, other: float) -> bool:
    """Return whether a value is better than another: more of a rate, less of a time."""
    return one < other if metric.startswith("ttft") else one > other


def versus(ours: Run, theirs: Best, metric: str) -> str:
    """Return the factor over a peer as tables print it: `1.34×`, or `level`.

    Level is a difference within 2 %, or within the spread of our samples or of theirs.
    """
    factor = ours.median(metric) / theirs.median(metric)
    if better(metric, 0.0, 1.0):
        factor = 1 / factor
    apart = max(LEVEL, theirs.spread, ours.metrics[metric].spread)
    return "level" if round(abs(factor - 1), 9) <= apart else f"{factor:.2f}×"


def _at_best(run: Run, peer: Peer) -> Best:
    metric = first_metric(run)
    values = run.metrics[metric]
    best = min(values.samples) if better(metric, 0.0, 1.0) else max(values.samples)
    metrics = {metric: Metric((best,))} if len(run.metrics) == 1 else run.metrics
    return Best(
        **{**vars(run), "metrics": metrics},
        engine=peer.engine,
        version=peer.version,
        way=run.variant.removeprefix(peer.name).strip(", "),
        spread=values.spread,
        when=peer.when,
        lacks=peer.lacks,
    )


def _peer(raw: dict[str, Any], path: Path) -> Peer:
    if ours := {"git", "commit", "workload_sha256", "noise", "roofline"} & {
        *raw,
        *(k for r in raw["runs"] for k in r),
    }:
        raise UserError(
            f"{path}: {raw['engine']} has {', '.join(sorted(ours))}, which only our evidence has"
        )
    name = f"{raw['engine']} {raw['version']}"
    runs = tuple(
        Run(
            variant=f"{name}{run.get('way', '')}",
            workload=run["workload"],
            workload_sha256="",
            model=run["model"],
            weights=run["weights"],
            dtype=run["dtype"],
            metrics={
                metric: Metric(tuple(values)) for metric, values in run["metrics"].items()
            },
            options=run.get("options", {}),
        )
        for run in raw["runs"]
    )
    return Peer(
        engine=raw["engine"],
        version=raw["version"],
        when=raw["when"],
        machine=raw["machine"]["name"],
        flags=raw["flags"],
        log=raw["log"],
        lacks=raw.get("lacks", ""),
        beside=tuple(run["beside"] for run in raw["runs"]),
        runs=runs,
    )

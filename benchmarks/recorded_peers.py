"""Other engines' numbers: `benchmarks/results/<device>/peers.json`, beside our evidence and never in it.

A peer has its own date, machine, versions, flags and log. It has no commit of ours and no hash of our
workload: it ran scripts of its own (`benchmarks/other_engines`), with requests of the same lengths. The file
of the H200 is made from what those scripts printed, by `benchmarks/other_engines/record.py`.

A table or figure of a phase shows the best that was measured of each engine, in any of its versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.evidence import PEERS_FILE, RESULTS, Evidence, Metric, Run
from common.errors import UserError

LEVEL = 0.02
"""Two rates that differ by no more than this share are level."""


@dataclass(frozen=True)
class Peer:
    """One engine in one version, on one machine on one day.

    beside: for each run the phase whose evidence it stands beside.
    """

    engine: str
    version: str
    when: str
    machine: str
    flags: str
    log: str
    beside: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        """Engine and version, as tables show them."""
        return f"{self.engine} {self.version}"


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


def beside(evidence: Evidence, folder: Path = RESULTS, **facts: Any) -> list[Run]:
    """Return the best run of each engine on each work of a phase, among those with these facts.

    facts: `model`, `workload` or an option. A run counts by the best sample of its first metric; if it has
        no other, that is the sample which is returned, against which our median has to stand.
    """
    best: dict[tuple[Any, ...], tuple[float, Run]] = {}
    for peer in load(evidence.folder, folder):
        for phase, run in zip(peer.beside, peer.runs, strict=True):
            if phase != evidence.phase or not facts.items() <= run.facts.items():
                continue
            way = run.variant.removeprefix(peer.name)
            key = peer.engine, way, run.model, run.workload, *sorted(run.options.items())
            rate = max(next(iter(run.metrics.values())).samples)
            if key not in best or rate > best[key][0]:
                best[key] = rate, run
    return [_at_best(run, rate) for rate, run in best.values()]


def versus(ours: float, theirs: float) -> str:
    """Return the factor over a peer as tables print it: `1.34×`, or `level` within 2 %."""
    return "level" if round(abs(ours / theirs - 1), 9) <= LEVEL else f"{ours / theirs:.2f}×"


def _at_best(run: Run, rate: float) -> Run:
    return (
        replace(run, metrics={next(iter(run.metrics)): Metric((rate,))})
        if len(run.metrics) == 1
        else run
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
        beside=tuple(run["beside"] for run in raw["runs"]),
        runs=runs,
    )

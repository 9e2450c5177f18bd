"""Evidence: what a benchmark measured, as one JSON file that every figure and table is drawn from.

A phase's `bench.py` is two functions, which `ladder bench` and `ladder plot` find by name:

    def run(options: BenchOptions) -> Evidence: ...       # measure this phase against the one before it
    def draw(evidence: Evidence, out: Path) -> None: ...  # draw the figure from that file alone

`benchmarks/README.md` shows a whole one. The evidence of phase `05_paged_cache` on an H200 lies in
`benchmarks/results/h200/05_paged_cache.json`, its figure in `figures/h200/05_paged_cache.png`.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.provenance import git_state
from common.errors import UserError
from common.files import whole
from common.neighbours import processors

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "figures"
PEERS_FILE = "peers.json"
"""Other engines, beside the evidence of a device (`benchmarks.recorded_peers`)."""
APPENDIX = ", with the appendix"
"""How a variant's name ends whose engine has features of the appendix; see `benchmarks.engines`."""
SERVED = f"13_serving{APPENDIX}"
"""The engine that `ladder serve` starts."""
PERCENTILES = ("p50", "p95", "p99")
SAMPLES = 3
"""Timed samples of each variant, unless said otherwise; the fewest that are recorded."""
MOST_SHARE = 1.05
"""Of the roofline: its ceilings are good to 3 %."""


@dataclass(frozen=True)
class BenchOptions:
    """What `ladder bench` was asked for. `repeats` is the number of timed samples of each variant."""

    device: torch.device
    dtype: torch.dtype
    model: str | None = None
    quick: bool = False
    repeats: int = SAMPLES


@dataclass(frozen=True)
class Metric:
    """One metric's samples, in the order they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Largest minus smallest sample, as a share of the median."""
        return (
            (max(self.samples) - min(self.samples)) / abs(self.median) if self.median else 0.0
        )


@dataclass(frozen=True)
class Roofline:
    """The least time that the work could take on this machine, and the share of it that was reached.

    seconds: time for the work's bytes and FLOPs at the measured ceilings.
    fraction: `seconds` over the median measured seconds; 1 means that nothing is left to gain.
    """

    seconds: float
    fraction: float


@dataclass(frozen=True)
class Run:
    """One variant on one workload: the unit that figures and tables are made of.

    variant: the phase's name, a variant of it (`03_batching+compact`), or a peer with its version.
    weights: "real" or "random".
    options: what distinguishes runs of one variant on one workload: batch size, context, budget.
    noise: how idle the machine was (see `benchmarks.measure.Noise`), worst sample that was kept.
    """

    variant: str
    workload: str
    workload_sha256: str
    model: str
    weights: str
    dtype: str
    metrics: Mapping[str, Metric]
    options: Mapping[str, Any] = field(default_factory=dict)
    roofline: Roofline | None = None
    noise: Mapping[str, float] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Everything by which a run is chosen, its options included."""
        names = ("variant", "workload", "model", "dtype", "weights")
        return {name: getattr(self, name) for name in names} | dict(self.options)

    @property
    def roofline_share(self) -> float | None:
        """Share of the roofline that was reached; None without one, or where accepted drafts beat it."""
        if self.roofline is None or self.roofline.fraction >= MOST_SHARE:
            return None
        return self.roofline.fraction

    def median(self, metric: str) -> float:
        """Median of one metric. Raises `UserError` when it was not measured."""
        if metric not in self.metrics:
            raise UserError(
                f"{self.variant} on {self.workload} has no {metric}, only {', '.join(self.metrics)}"
            )
        return self.metrics[metric].median


@dataclass(frozen=True)
class Evidence:
    """Everything one call of a benchmark measured, with what is needed to judge and repeat it."""

    phase: str
    when: str
    git: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    runs: tuple[Run, ...]
    seconds: float | None = None
    """How long measuring took, all in all."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What else ran on the host meanwhile; see `benchmarks.measure.Beside`. Empty: of before 2026-11-29."""
    appendix: str = ""
    """Which engines have features of the appendix. "named": those whose variants end with `APPENDIX`. "all":
    every one, in files of before 2026-12-01. Empty: of before 2026-11-29, when names hid it."""

    @property
    def folder(self) -> str:
        """Name of the device's folder under `benchmarks/results` and `figures`."""
        return device_folder(str(self.machine["device"]), str(self.machine["name"]))

    def find(
        self, variant: str | None = None, workload: str | None = None, **options: Any
    ) -> list[Run]:
        """The runs with this variant and workload (None: any), and these values in `options`.

        `model`, `dtype` and `weights` may be given among the options too.
        """
        named = {"variant": variant, "workload": workload}
        options |= {name: value for name, value in named.items() if value is not None}
        return [
            run
            for run in self.runs
            if all(run.facts.get(name) == value for name, value in options.items())
        ]

    def one(
        self, variant: str | None = None, workload: str | None = None, **options: Any
    ) -> Run:
        """The only run that `find` returns. Raises `UserError` when there is none, or several."""
        found = self.find(variant, workload, **options)
        if len(found) != 1:
            wanted = f"variant {variant}, workload {workload}, {options}"
            raise UserError(
                f"{self.phase} has {len(found)} runs with {wanted}, but exactly 1 was asked for"
            )
        return found[0]

    def own(self) -> dict[str, str]:
        """The phase's variants by what tables call them: alone, with the appendix, and what is served."""
        phase, both = f"ours, phase {self.phase[:2]}", "ours, with the appendix"
        names = {phase: self.phase, both: f"{self.phase}{APPENDIX}", "ours, as served": SERVED}
        return {name: variant for name, variant in names.items() if self.find(variant)}

    def write(self, path: Path | None = None) -> Path:
        """Write the file (by default to its place in `benchmarks/results`) and return where.

        Raises:
            UserError: it cannot be written. A file that was there before is still there.
        """
        path = path or RESULTS / self.folder / f"{self.phase}.json"
        # Only what was measured appears: no roofline, no key.
        seconds = None if self.seconds is None else round(self.seconds, 1)
        kept = {**vars(self), "seconds": seconds, "runs": [*map(_run_to_json, self.runs)]}
        kept = {name: value for name, value in kept.items() if value not in (None, "", {})}
        with whole(path) as scratch:
            content = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
            scratch.write_text(content, encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Evidence:
        """Read a file that `write` made. Raises `UserError` naming the file when it is not one."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            runs = tuple(_run_from_json(run) for run in raw["runs"])
            return cls(**{**raw, "runs": runs})
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: no evidence was written there") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is no evidence file: {type(error).__name__} {error}"
            ) from None


def collect(
    phase: str,
    runs: Sequence[Run],
    device: torch.device,
    ceilings: Mapping[str, float] | None = None,
) -> Evidence:
    """Put runs together with the time, the commit, the machine and the versions they belong to."""
    return Evidence(
        phase=phase,
        when=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        git=git_state(ROOT),
        machine=machine_facts(device, ceilings),
        versions=versions(),
        runs=tuple(runs),
        appendix="named",
    )


def sample_metrics(samples: Sequence[Mapping[str, float]]) -> dict[str, Metric]:
    """Turn one mapping a sample into one `Metric` a name; only names that every sample has."""
    if not samples:
        return {}
    names = [name for name in samples[0] if all(name in sample for sample in samples)]
    return {name: Metric(tuple(float(sample[name]) for sample in samples)) for name in names}


def results(folder: Path = RESULTS) -> dict[str, dict[str, Evidence]]:
    """All evidence in the checkout: device folder -> phase -> evidence; the CPU first."""
    found: dict[str, dict[str, Evidence]] = {}
    files = (path for path in folder.glob("*/[!.]*.json") if path.name != PEERS_FILE)
    for path in sorted(files, key=lambda path: (path.parent.name != "cpu", path)):
        found.setdefault(path.parent.name, {})[path.stem] = Evidence.load(path)
    return found


def machine_facts(
    device: torch.device, ceilings: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Device and host by name, its GPUs and their driver, cores, torch's threads, measured ceilings."""
    import torch

    from common.device import device_name

    count = torch.cuda.device_count() if device.type == "cuda" else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    return {
        "device": device.type,
        "name": device_name(device),
        "host": device_name(torch.device("cpu")),
        **({"gpus": gpus, "driver": _driver()} if gpus else {}),
        "cores": len(processors()),
        "threads": torch.get_num_threads(),
        "ceilings": dict(ceilings or {}),
    }


def _driver() -> str:
    """Version of NVIDIA's driver, or an empty string where its tool is absent."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.split("\n", 1)[0].strip()


def versions() -> dict[str, str]:
    """Versions of Python and of what decides speed; an absent package has an empty one."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    return found


def _run_to_json(run: Run) -> dict[str, Any]:
    metrics = {
        name: {
            "median": metric.median,
            "spread": round(metric.spread, 4),
            "samples": metric.samples,
        }
        for name, metric in run.metrics.items()
    }
    roofline = None if run.roofline is None else vars(run.roofline)
    raw = {**vars(run), "metrics": metrics, "roofline": roofline}
    return {name: value for name, value in raw.items() if value is not None}


def _run_from_json(raw: Mapping[str, Any]) -> Run:
    metrics = {name: Metric(tuple(found["samples"])) for name, found in raw["metrics"].items()}
    roofline = Roofline(**raw["roofline"]) if raw.get("roofline") else None
    return Run(**{**raw, "metrics": metrics, "roofline": roofline})


def device_folder(device: str, name: str) -> str:
    """Return the name of a device's folder of evidence: `cpu`, or a GPU's short name: `NVIDIA H200` ->
    `h200`.

    device: `cpu` or `cuda`. name: the vendor's name.
    """
    if device == "cpu":
        return "cpu"
    short = re.sub(r"\b(nvidia|geforce|amd|apple|graphics)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-") or device


def check_folder(folder: Path, name: str = "") -> None:
    """Create a folder and write a temporary file of 64 KB to it.

    name: the option that it was given by, such as `--output`.

    Raises:
        UserError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 16))
    except OSError as error:
        raise UserError(
            f"{name} {folder} cannot be written: {error.strerror}".lstrip()
        ) from None

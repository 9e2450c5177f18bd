"""What phase 13's bench asks of its own server, asked of vLLM's: 256 requests at once, and one user.

python -m benchmarks.other_engines.ask_server URL OUT.json

OUT.json was begun by `vllm_run.py MODEL OUT.json --serve PORT`; runs are added when the server has answered.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.loadtest.user import Target
from benchmarks.measure import Sample
from benchmarks.other_engines.record import SAMPLES
from benchmarks.server import STARTS_WITHIN, measured
from benchmarks.workloads import Workload, uniform, workload

METRICS = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


def sample(target: Target, work: Workload, users: int) -> Sample:
    """Send requests, without seeds: with a seed each vLLM would draw their tokens one after the other."""
    return measured(target, work, users=users, processes=min(users, 4), seed=None)


def wait(target: Target) -> None:
    """Return once a server answers. Raises `RuntimeError` if it never does."""
    until = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until:
        with suppress(RuntimeError):
            sample(target, uniform("first", 1, 4, 2), 1)
            return
        time.sleep(0.5)
    raise RuntimeError(f"{target.host}:{target.port} does not answer")


def main(url: str, out: str) -> None:
    """Ask, once to warm up and then as often as a recording has to, with other tokens each time."""
    target, path = Target.of(url), Path(out)
    wait(target)
    said = json.loads(path.read_text(encoding="utf-8"))
    for work, users in ((workload("offline-256"), 256), (uniform("one-user-16x128+32", 16, 128, 32), 1)):
        _, *samples = [sample(target, work.cold(at), users) for at in range(SAMPLES + 1)]
        metrics = {name: [one[name] for one in samples] for name in METRICS}
        facts = {"temperature": work.temperature, "options": {"users": users}}
        said["runs"].append({"workload": work.name, **facts, "metrics": metrics})
        print(users, metrics, flush=True)
    path.write_text(json.dumps(said | {"ended": True}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that has imported what takes long to import, and forks for every run of pytest.

PyTorch takes longer to import than most bugs take to be found. Started as a script of its own, it holds none
of this checkout's modules, so that each fork imports them from the copy that it is given.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

SLOW = ("torch", "torch._dynamo", "hypothesis", "transformers")
"""What the tests of some phase import; random weights import `torch._dynamo`."""

WAITING = 10
"""How many seconds a run may take for each second of processor time: a busy machine is slow, not hanging."""

OUT_OF_TIME = -signal.SIGXCPU


class Nursery:
    """The process, from the beginning to the end of a ``with``."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._answer()  # everything is imported: what follows may be timed
        return self

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def pytest(self, folder: Path, arguments: list[str], limit: float) -> tuple[int, str]:
        """Exit status and output of pytest in ``folder``; `OUT_OF_TIME` after ``limit`` seconds of work."""
        assert self._process.stdin is not None
        job = {"folder": str(folder), "arguments": arguments, "limit": limit}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = self._answer()
        return status, (folder / "output").read_text(encoding="utf-8", errors="replace")


def main() -> None:
    """Say 0 when ready; then take a job a line on standard input, and answer each with its exit status."""
    sys.path.remove(str(Path(__file__).resolve().parent))
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, as `conftest.py` does
    for name in SLOW:
        import_module(name)
    print(0, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(Path(job["folder"]), job["arguments"], job["limit"]))
        print(wait(child, WAITING * job["limit"]), flush=True)


def run(folder: Path, arguments: list[str], limit: float) -> int:
    """Run pytest in this process, which nothing else will need; its output goes to a file in the folder."""
    import pytest

    os.setsid()  # a group of its own, so that nothing that a test started stays behind
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # For what tests start; pytest's own `pythonpath` does the same here. COLUMNS is how much of a message
    # fits the summary's one line.
    places = [folder, *sorted((folder / "phases").glob("[0-9]*"))]
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "COLUMNS": "300"}
    status = int(pytest.main(arguments))
    sys.stdout.flush()
    return status


def wait(child: int, seconds: float) -> int:
    """The exit status of a child, which is killed with all that it started when it takes too long."""
    end = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return OUT_OF_TIME
        time.sleep(0.02)


if __name__ == "__main__":
    main()

"""A process that has imported what takes long to import, and forks for every run of a student's functions.

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
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

WAITING = 4.0
"""Seconds that a run may take for each of processor time: other programs may run beside."""

LARGEST = 1 << 26
"""Bytes of a file that a run may write; what it prints is in a file, too."""

MEMORY = 12 << 30
"""Bytes that a run may take, where there is no GPU. One that takes all would end other programs."""

SHOWN = 100_000
"""Bytes of what a run has printed that are looked at: the last."""

OUT_OF_TIME = -signal.SIGXCPU


class Nursery:
    """The process, from the beginning to the end of a ``with``.

    seconds: of processor time that all runs took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",  # a set's order is the same for all students, and tomorrow
            },
            start_new_session=True,  # Ctrl-C is for this program, which then ends that one
        )
        self._answer()  # everything is imported: what follows may be timed
        return self

    def _answer(self) -> int:
        assert self._process.stdout is not None
        status, seconds = self._process.stdout.readline().split()
        self.seconds += float(seconds)
        return int(status)

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._process.stdin is not None
        if kind is not None:  # perhaps in the middle of a run
            self._process.terminate()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def run(self, folder: Path, job: dict[str, Any], limit: float) -> tuple[int, str]:
        """Return status and output of `inside.main` in a folder; `OUT_OF_TIME` after `limit` seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), job, limit]) + "\n")
        self._process.stdin.flush()
        status = self._answer()
        with (folder / "output").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN))
            return status, file.read().decode("utf-8", errors="replace")


def main() -> None:
    """Say 0 when ready; then take a job a line on standard input, and answer each with its exit status."""
    sys.path.remove(str(Path(__file__).resolve().parent))
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault(
            "TRITON_INTERPRET", "1"
        )  # before Triton is imported, as `conftest.py` does
    import hypothesis  # noqa: F401  (a fork has it, as it has PyTorch)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(0, 0, flush=True)
    for line in sys.stdin:
        folder, job, limit = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
            if not torch.cuda.is_available():
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            os._exit(run(Path(folder), job, limit))
        print(*wait(child, WAITING * limit), flush=True)


def run(folder: Path, job: dict[str, Any], limit: float) -> int:
    """Run `inside.main` of the copy in a process of no further use; its output goes to a file."""
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
    sys.path[:0] = map(str, places)
    status = int(import_module("phases.course.inside").main(job))
    sys.stdout.flush()
    return status


def wait(child: int, seconds: float) -> tuple[int, float]:
    """A child's exit status, and seconds of processor time. It is killed when it takes too long.

    What it has started is killed in any case.
    """
    end = time.monotonic() + seconds
    try:
        while True:
            found, status, used = os.wait4(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, _, used = os.wait4(child, 0)
    return OUT_OF_TIME, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

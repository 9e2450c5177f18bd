"""A server process that has imported PyTorch, and forks for every run of a student's functions.

To import PyTorch takes longer than to find most bugs. Started as a script of its own, the server
holds none of this checkout's modules, so that each fork imports them from the copy that it is given.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

WAITING = 4.0
"""Seconds that a run may take for each of processor time: other programs may run beside."""
SHOWN = 100_000
"""Bytes of what a run has printed that are looked at: the last."""
OUT_OF_TIME = -signal.SIGXCPU
OUTPUT = "output"
RESULT = "course-result.json"
SCRATCH = "scratch"
"""In a run's folder: what it prints, its record, and the folder that it may write in."""
INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV")
"""Variables of the environment that a run sees; others may hold secrets."""


@dataclass
class ForkServer:
    """Runs grading jobs in forks of a server process, which lives as long as a ``with`` block.

    The server has imported PyTorch once, so a fork starts at once.

    seed: seed of all random numbers that tests draw, so that a grade can be repeated.
    seconds: processor time of all runs so far.
    gaps: one line about sandboxing (namespaces, Landlock) that this system lacks, or "".
    """

    seed: int = 0
    seconds: float = 0.0
    gaps: str = ""

    def __enter__(self) -> ForkServer:
        environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",  # every student's functions are judged on a CPU
            "TRITON_INTERPRET": "1",
            "LADDER_TEST_SEED": str(self.seed),
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # a set's order is the same for all students, and tomorrow
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this program, which then ends that one
        )
        jobs, results = self._process.stdin, self._process.stdout
        assert jobs is not None and results is not None
        self._jobs, self._results = jobs, results
        try:
            self.gaps = json.loads(results.readline())  # what follows may be timed
        except BaseException as error:
            # Ctrl-C: a `with` block that has not begun does not end.
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # perhaps in the middle of a run
            self._process.terminate()
        with suppress(BrokenPipeError):
            self._jobs.close()
        self._process.wait()

    def run(self, folder: Path, job: dict[str, Any], limit: float) -> tuple[int, str]:
        """Run a grading job in `folder`, a copy of the checkout; return its exit status and its last output.

        job: the argument `job` of `grading_process.main`. limit: seconds of processor time.
        The status is negative for a signal, and `OUT_OF_TIME` after the limit.
        """
        print(json.dumps([str(folder), job, limit]), file=self._jobs, flush=True)
        status, seconds = json.loads(self._results.readline())
        self.seconds += seconds
        with (folder / OUTPUT).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN))
            return status, file.read().decode("utf-8", errors="replace")


def main() -> None:
    """Run the server process: for each line of stdin run a job; print its exit status and seconds as JSON.

    A line is a JSON list: folder, job, and limit in seconds of processor time. The first line that the server
    prints says which means of sandboxing this system lacks.
    """
    sandbox = import_module("sandbox")  # from this folder, which is no place for other imports
    sys.path.remove(str(Path(__file__).resolve().parent))
    import hypothesis  # noqa: F401  (a fork has it, as it has PyTorch)
    import torch  # noqa: F401

    home = Path.cwd()
    namespaces = sandbox.works(partial(sandbox.enter_namespaces, home))
    landlock = sandbox.works(partial(sandbox.restrict_files, home, home))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(sandbox.describe_gaps(namespaces, landlock)), flush=True)
    for line in sys.stdin:
        name, job, limit = json.loads(line)
        folder = Path(name)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            prepare(folder)
            sandbox.limit_resources(limit)
            record = os.open(RESULT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            if namespaces:
                sandbox.enter_namespaces(folder / SCRATCH)
            if landlock:
                sandbox.restrict_files(folder, folder / SCRATCH)
            os._exit(run(job, record))
        print(json.dumps(wait(child, WAITING * limit)), flush=True)


def prepare(folder: Path) -> None:
    """Set up this process, a fork, for a job in `folder`: process group, working directory, files, imports.

    Standard output and error go to a file, temporary files to a folder of the job, and imports come from
    `folder`.
    """
    os.setsid()  # a group of its own, so that nothing that a test started stays behind
    os.chdir(folder)
    scratch = folder / SCRATCH
    scratch.mkdir(exist_ok=True)
    output = os.open(OUTPUT, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # For what tests start; pytest's own `pythonpath` does the same here. COLUMNS is how much of a message
    # fits the summary's one line.
    import_roots = [folder, *sorted((folder / "phases").glob("[0-9]*"))]
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, import_roots)), "COLUMNS": "300"}
    for name in ("HOME", "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY", "TRITON_CACHE_DIR"):
        os.environ[name] = str(scratch)
    sys.path[:0] = map(str, import_roots)


def run(job: dict[str, Any], record: int) -> int:
    """Run `grading_process.main` of the checkout's copy in the working directory; return its exit status.

    record: number of an open file (descriptor), which gets the outcomes as JSON.
    """
    tempfile.tempdir = os.environ["TMPDIR"]  # a library may have asked for it before
    status = int(import_module("phases.course.grading_process").main(job, record))
    sys.stdout.flush()
    return status


def wait(child: int, seconds: float) -> tuple[int, float]:
    """Wait for a child process; return its exit status and its seconds of processor time.

    After `seconds` (by the clock) the child is killed, and the status is `OUT_OF_TIME`. When the child ends,
    processes that it has started are killed.
    """
    end = time.monotonic() + seconds
    try:
        while time.monotonic() <= end:
            found, status, used = os.wait4(child, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                # Processes between that one and this say a signal as a shell does.
                return (128 - code if code > 128 else code), used.ru_utime + used.ru_stime
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, _, used = os.wait4(child, 0)
    return OUT_OF_TIME, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()

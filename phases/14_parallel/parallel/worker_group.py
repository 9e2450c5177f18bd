"""The worker group: processes of the other ranks, which rank 0 starts, sends messages to, and watches."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from typing import Any

from common.errors import EngineLost
from parallel.ranks import ENVIRONMENT

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from parallel.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
LOSS_SECONDS = 2.0
"""Most seconds from the moment that a process's connections break until the system reports its end."""
REPLY_SECONDS = 0.05
LAST_RESORT = 8.0
"""Seconds after a loss when rank 0 ends its own process if that still waits on a device for the lost rank."""


class WorkerLostError(EngineLost):
    """Raised if a rank has ended, so that the engine cannot go on."""


class WorkerProcess:
    """The process of one rank other than rank 0.

    rank: from 1 on.
    lost: called with a sentence, from another thread, when the process has ended.

    The process is a plain program, not a child of multiprocessing: the caller's main module is not run again,
    and a server's engine process, which may have no such children, can have ranks too.
    """

    def __init__(self, rank: int, lost: Callable[[str], None]) -> None:
        self.connection, theirs = Pipe()
        self.rank = rank
        command = [
            sys.executable,
            "-P",
            "-c",
            PROGRAM,
            json.dumps(sys.path),
            str(theirs.fileno()),
            str(rank),
        ]
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env={**os.environ, **ENVIRONMENT}
        )
        theirs.close()
        threading.Thread(
            target=self._watch, args=(lost,), name=f"rank {rank}", daemon=True
        ).start()

    def _watch(self, lost: Callable[[str], None]) -> None:
        code = self.process.wait()
        lost(f"rank {self.rank} has ended (exit code {code})")

    def kill(self) -> None:
        """End the process now."""
        self.process.kill()
        self.connection.close()


class WorkerGroup:
    """The processes of ranks 1 to `size - 1`, with which rank 0 exchanges messages.

    reason: a sentence about which rank was lost and how; empty while none is.
    on_loss: called, from another thread, when a rank is lost.
    on_end: called when all processes have been ended.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reason = ""
        self.on_loss: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._ending = False
        self._waiting = 0
        self._done = threading.Event()
        self.members = [WorkerProcess(rank, self.lose) for rank in range(1, size)]
        atexit.register(self.kill)

    def broadcast(self, message: Any) -> None:
        """Send a message, pickled, to all these ranks.

        A broken connection raises nothing here: another thread notices that the process has ended.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for member in self.members:
            with suppress(OSError):
                member.connection.send_bytes(data)

    def collect_replies(self) -> list[tuple[int, Any]]:
        """Return the ranks' replies that have come, as (rank, reply) pairs; possibly none.

        Waits up to `REPLY_SECONDS` for each rank in turn until a reply has come; then takes only what is
        there.
        """
        found: list[tuple[int, Any]] = []
        for member in self.members:
            with suppress(OSError, EOFError):  # see `broadcast`
                while member.connection.poll(0.0 if found else REPLY_SECONDS):
                    found.append((member.rank, member.connection.recv()))
        return found

    def lose(self, reason: str) -> None:
        """End the other ranks' processes, since a rank is lost; set `self.reason`. Later calls do nothing."""
        if self._ending or self.reason:
            return
        self.reason = reason
        for member in self.members:
            member.process.kill()  # its connection stays: another thread may be reading it
        threading.Thread(target=self._last_resort, daemon=True).start()
        if self.on_loss is not None:  # it may not return: NCCL waits for graphs that it is in
            threading.Thread(target=self.on_loss, daemon=True).start()

    def check(self) -> None:
        """Raise `WorkerLostError` if a rank is lost."""
        if self.reason:
            self._done.set()
            raise WorkerLostError(self.reason)

    def wait_for_loss(self) -> None:
        """Wait until a rank is known to be lost, at most `LOSS_SECONDS`."""
        end = time.monotonic() + LOSS_SECONDS
        while not self.reason and time.monotonic() < end:
            time.sleep(0.01)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Mark a `with` block that may wait for other ranks; a loss of one may then end this process."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _last_resort(self) -> None:
        """End this process if it still waits for a lost rank after `LAST_RESORT` seconds.

        A wait for a device cannot be interrupted in another way.
        """
        if not self._done.wait(LAST_RESORT) and self._waiting:
            print(
                f"error: {self.reason}, and this process still waits for it",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def kill(self) -> None:
        """End all processes of the group."""
        self._ending = True
        self._done.set()
        for member in self.members:
            member.kill()
        if self.on_end is not None:
            self.on_end()
        atexit.unregister(self.kill)


_idle: dict[int, WorkerGroup] = {}
"""By size, a group that no engine uses: starting a process and importing torch takes seconds."""


def take(size: int) -> WorkerGroup:
    """Return a worker group for an engine of `size` ranks: an idle one, or a new one."""
    workers = _idle.pop(size, None)
    if workers is not None and workers.reason:  # one of its processes has ended meanwhile
        workers.kill()
        workers = None
    return workers or WorkerGroup(size)


def give_back(workers: WorkerGroup) -> None:
    """Keep the worker group of a closed engine for the next engine of its size.

    If a rank is lost, or such a group is kept already, end its processes instead.
    """
    if not workers.reason and workers.size not in _idle:
        workers.on_loss = workers.on_end = None
        _idle[workers.size] = workers
    else:
        workers.kill()

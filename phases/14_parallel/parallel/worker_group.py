"""The other ranks as rank 0 sees them: processes that it starts, talks to, and watches."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from common.errors import EngineLost
from parallel.ranks import ENVIRONMENT

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from parallel.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
NOTICE = 2.0
"""Seconds in which the system tells of a process that has ended, after its connections have broken."""
LAST_RESORT = 8.0
"""Seconds after which a process ends itself that still waits, on its device, for a rank that is gone."""


class WorkerLostError(EngineLost):
    """A rank has ended or does not agree with the others: the engine cannot go on."""


class WorkerProcess:
    """One of the other ranks.

    A plain program, not a child of multiprocessing: the caller's main module is not run again, and a server's
    engine process, which may have no such children, can have ranks too.
    """

    def __init__(self, rank: int, lost: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        command = [
            sys.executable,
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
        self.connection = Connection(ours.detach())
        threading.Thread(
            target=self._watch, args=(lost,), name=f"rank {rank}", daemon=True
        ).start()

    def _watch(self, lost: Callable[[str], None]) -> None:
        code = self.process.wait()
        lost(f"rank {self.rank} has ended (exit code {code})")

    def kill(self) -> None:
        """End it now."""
        self.process.kill()
        self.connection.close()


class WorkerGroup:
    """Ranks 1 to `size - 1`.

    reason: why it can do nothing more; empty while all is well.
    on_loss: called, from another thread, when a rank is lost.
    on_end: called when all of them are ended.
    """

    def __init__(self, size: int) -> None:
        self.size, self.reason = size, ""
        self.on_loss: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._ending, self._waiting = False, 0
        self._done = threading.Event()
        self.members = [WorkerProcess(rank, self.lose) for rank in range(1, size)]
        atexit.register(self.kill)

    def tell(self, message: Any) -> None:
        """Send a message to all. That one is gone is told by its process, not by its connection."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for member in self.members:
            with suppress(OSError):
                member.connection.send_bytes(data)

    def collect_replies(self, *, wait: float = 0.0) -> list[tuple[int, Any]]:
        """Return the messages of the ranks, `(rank, message)`; wait for one so many seconds a rank."""
        found: list[tuple[int, Any]] = []
        for member in self.members:
            with suppress(OSError, EOFError):  # see `tell`
                while member.connection.poll(wait if not found else 0.0):
                    found.append((member.rank, pickle.loads(member.connection.recv_bytes())))
        return found

    def lose(self, reason: str) -> None:
        """The ranks are of no use any more: the first reason counts. All others end, and none waits."""
        if self._ending or self.reason:
            return
        self.reason = reason
        for (
            member
        ) in self.members:  # connections stay: another thread may be reading, or closing them
            member.process.kill()
        threading.Thread(target=self._last_resort, daemon=True).start()
        if self.on_loss is not None:  # it may not return: NCCL waits for graphs that it is in
            threading.Thread(target=self.on_loss, daemon=True).start()

    def check(self, *, patient: bool = False) -> None:
        """Raise `WorkerLostError` if a rank is lost; `patient`: something has failed, so perhaps one is."""
        if patient:
            self.notice()
        if self.reason:
            self._done.set()
            raise WorkerLostError(self.reason)

    def notice(self) -> None:
        """Wait until a rank is lost, for as long as it may take to hear of one that has ended."""
        end = time.monotonic() + NOTICE
        while not self.reason and time.monotonic() < end:
            time.sleep(0.01)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Inside, this process may wait for the others; outside, it hears of a loss when it next asks."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _last_resort(self) -> None:
        """A device that waits for another one cannot be interrupted, only its process ended."""
        if not self._done.wait(LAST_RESORT) and self._waiting:
            print(
                f"error: {self.reason}, and this process still waits for it",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def kill(self) -> None:
        """End all of them."""
        self._ending = True
        self._done.set()
        for member in self.members:
            member.kill()
        if self.on_end is not None:
            self.on_end()
        atexit.unregister(self.kill)


_idle: dict[int, WorkerGroup] = {}
"""Crews that no engine has at the moment: starting a process and importing torch takes seconds."""


def take(size: int) -> WorkerGroup:
    """A crew for an engine of `size` ranks."""
    workers = _idle.pop(size, None)
    return WorkerGroup(size) if workers is None or workers.reason else workers


def give_back(workers: WorkerGroup) -> None:
    """Its engine is closed: another one may have the crew."""
    if not workers.reason and workers.size not in _idle:
        workers.on_loss = workers.on_end = None
        _idle[workers.size] = workers
    else:
        workers.kill()

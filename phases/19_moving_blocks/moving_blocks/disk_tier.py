"""Threads that read and write the files of blocks, so that no step waits for a disk."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from time import monotonic

from moving_blocks.disk import BlockFiles
from moving_blocks.host import HostBlock
from moving_blocks.names import BlockName

log = logging.getLogger(__name__)

READERS = 2
"""Threads that read. They copy from the file cache and make checksums, both without Python's lock."""

MOST_CALLS = 1000
"""Calls that wait for the writing thread, beyond which ages of files are not noted."""
STOP_SECONDS = 5.0
"""How long the end of an engine waits for each thread, one after the other."""


@dataclass
class DiskJob:
    """The job to read a block of host memory from its file, or to write the block to its file.

    reading: True for a read. ok: True if it went well. seconds: how long it took. `ok` and `seconds` are set
        once the job has finished.
    """

    block: HostBlock
    reading: bool
    ok: bool = False
    seconds: float = 0.0


Queue = SimpleQueue[Callable[[], None] | None]
"""What a thread is to do, one call after the other; None ends the thread."""


class DiskTier:
    """Reads and writes the files of blocks in threads of its own, beside the engine's.

    files: the folder. pending: number of jobs that `take_finished` has not returned yet.
    """

    def __init__(self, files: BlockFiles) -> None:
        self.files = files
        self.pending = 0
        self._finished: deque[DiskJob] = deque()
        self._reads: Queue = SimpleQueue()
        self._writes: Queue = SimpleQueue()
        threads = []
        for queue in [self._reads] * READERS + [self._writes]:
            # Python ends without waiting for a disk that does not answer.
            thread = Thread(target=work_on, args=(queue,), daemon=True)
            thread.start()
            threads.append((queue, thread))
        weakref.finalize(self, stop, threads)

    def start(
        self, name: BlockName, block: HostBlock, view: memoryview, *, reading: bool
    ) -> None:
        """Begin to read the block `name` from its file into `view`, or to write `view` to the file.

        name: of the block, and so of its file. block: the block in host memory. view: the bytes of its slot,
            which must not change until the job is done. reading: True to read, False to write.
        """
        # Not `self`, which a queue would keep alive.
        files, finished = self.files, self._finished
        job = DiskJob(block, reading)

        def run() -> None:
            started = monotonic()
            try:
                job.ok = files.read(name, view) if reading else files.write(name, view)
            finally:
                job.seconds = monotonic() - started
                finished.append(job)

        self.pending += 1
        (self._reads if reading else self._writes).put(run)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Record that one sequence's blocks, by digest, were used just now, after the writes that are queued.

        Do nothing if too many writes are queued.
        """
        if self._writes.qsize() < MOST_CALLS:
            self._writes.put(partial(self.files.touch, digests))

    def take_finished(self) -> list[DiskJob]:
        """Return the jobs (reads and writes of blocks) that have finished since the last call; none: `[]`."""
        jobs = [self._finished.popleft() for _ in range(len(self._finished))]
        self.pending -= len(jobs)
        return jobs


def work_on(queue: Queue) -> None:
    """Call the functions of the queue one after the other, until it gives None; a thread's main function.

    Exceptions are logged.
    """
    while (call := queue.get()) is not None:
        try:
            call()
        except Exception:  # a thread that ended would leave all later jobs undone
            log.exception("a block could not be moved")


def stop(threads: Sequence[tuple[Queue, Thread]]) -> None:
    """End threads once they have done the jobs in their queues, or give up on a disk that does not answer.

    threads: (queue of a thread, the thread) pairs.
    """
    for queue, _ in threads:
        queue.put(None)
    for _, thread in threads:
        if thread is not current_thread():
            thread.join(STOP_SECONDS)

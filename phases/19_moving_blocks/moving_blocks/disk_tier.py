"""Threads that read and write the files of blocks, so that no step waits for a disk."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread, current_thread
from time import monotonic

from moving_blocks.disk import BlockFiles
from moving_blocks.host import HostBlock
from moving_blocks.names import BlockName

log = logging.getLogger(__name__)

READERS = 2
"""Threads that read. They copy from the file cache and make checksums, both without Python's lock."""

STOP_SECONDS = 5.0
"""How long the end of an engine waits for files that are still to be written."""


class DiskJob:
    """A block that is read into its slot, or written from it.

    ok: whether that went well. seconds: how long it took. Both count once the job has been taken out of
    `DiskTier.finished`.
    """

    __slots__ = ("block", "name", "ok", "reading", "seconds", "view")

    def __init__(
        self, name: BlockName, block: HostBlock, view: memoryview, reading: bool
    ) -> None:
        self.name = name
        self.block = block
        self.view = view
        self.reading = reading
        self.ok = False
        self.seconds = 0.0


class DiskTier:
    """Reads and writes blocks beside the engine's thread.

    finished: jobs that the engine's thread has not looked at. pending: how many there are besides.
    """

    def __init__(self, files: BlockFiles) -> None:
        self.files = files
        self.finished: deque[DiskJob] = deque()
        self.pending_reads = self.pending_writes = 0
        self._reads: SimpleQueue[DiskJob | None] = SimpleQueue()
        self._writes: SimpleQueue[DiskJob | None] = SimpleQueue()
        self._threads: list[tuple[SimpleQueue[DiskJob | None], Thread]] = []
        for queue, action in [(self._reads, files.read)] * READERS + [
            (self._writes, files.write)
        ]:
            # Python ends without waiting for a disk that does not answer.
            thread = Thread(target=work_on, args=(queue, action, self.finished), daemon=True)
            thread.start()
            self._threads.append((queue, thread))
        weakref.finalize(self, stop, self._threads)

    def read(self, name: BlockName, block: HostBlock, view: memoryview) -> None:
        """Begin to read a block into its slot."""
        self.pending_reads += 1
        self._reads.put(DiskJob(name, block, view, reading=True))

    def write(self, name: BlockName, block: HostBlock, view: memoryview) -> None:
        """Begin to write a block, whose slot must not change until the job is finished."""
        self.pending_writes += 1
        self._writes.put(DiskJob(name, block, view, reading=False))

    def take_finished(self) -> list[DiskJob]:
        """Return the jobs that have finished since the last call."""
        jobs: list[DiskJob] = []
        while self.finished:
            job = self.finished.popleft()
            self.pending_reads -= job.reading
            self.pending_writes -= not job.reading
            jobs.append(job)
        return jobs


def work_on(
    queue: SimpleQueue[DiskJob | None],
    action: Callable[[BlockName, memoryview], bool],
    finished: deque[DiskJob],
) -> None:
    """Do one job after the other until None comes."""
    while (job := queue.get()) is not None:
        started = monotonic()
        try:
            job.ok = action(job.name, job.view)
        except Exception as error:  # a thread that ended would leave all later jobs undone
            log.error("a block could not be moved", exc_info=error)
        job.seconds = monotonic() - started
        finished.append(job)


def stop(threads: Sequence[tuple[SimpleQueue[DiskJob | None], Thread]]) -> None:
    """End threads behind the jobs that they still have, or leave them to a disk that does not answer."""
    for queue, _ in threads:
        queue.put(None)
    until = monotonic() + STOP_SECONDS
    for _, thread in threads:
        if thread is not current_thread():
            thread.join(max(0.0, until - monotonic()))

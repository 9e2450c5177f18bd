"""The connector's scheduler half: host memory as a second tier behind the GPU, and files as a third.

Only host memory is copied to and from the GPU. A block on a disk is read into a slot of host memory first,
by a thread, and only the request that needs it waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import monotonic

from common.request import Request
from continuous.scheduler import Scheduler
from moving_blocks.cache import OffloadingCache
from moving_blocks.connector import ConnectorScheduler, ConnectorWorker, Transfer
from moving_blocks.disk_tier import READERS, DiskJob, DiskTier
from moving_blocks.host import HostBlock, HostTier
from moving_blocks.names import BlockName, chain
from moving_blocks.rule import LoadRule


@dataclass
class TierStats:
    """Counts since the start, in blocks, but for `expired_requests`.

    saved, loaded: copied from the GPU to host memory, and back.
    read, unread: read from files, or wanted from files but not readable.
    written: to files.
    expired_requests: requests that stopped waiting because computing would have been as fast.
    """

    saved: int = 0
    loaded: int = 0
    read: int = 0
    unread: int = 0
    written: int = 0
    expired_requests: int = 0


@dataclass(eq=False)
class Load:
    """Blocks that are being loaded from host memory into the cache.

    cursor: position in the prefix index after the request's cached blocks, which it pins.
    cached: numbers of these cached blocks. names, blocks, sources: of each loaded block its name, its
        number, and its block in host memory.
    transfer: the copy. finished: True once the cache has the blocks.
    """

    cursor: object
    cached: list[int]
    names: list[BlockName]
    blocks: list[int]
    sources: list[HostBlock]
    transfer: Transfer
    finished: bool = False


@dataclass(eq=False)
class Save:
    """Blocks that are being saved to host memory.

    names, blocks, targets: of each block its name, its number, and its block in host memory. transfer: the
        copy.
    """

    names: list[BlockName]
    blocks: list[int]
    targets: list[HostBlock]
    transfer: Transfer


@dataclass(eq=False)
class WaitingRequest:
    """A request that waits for its blocks before it enters the scheduler's waiting line.

    names: of its full blocks, from the first on, as far as they are in the cache, host memory or files.
    pinned: its blocks in host memory, also those that are still being read from files.
    since: clock time in seconds when it began to wait for files, also for files that another process writes.
    waited: seconds that it has waited for files.
    deadline: clock time when it stops waiting for files, and later for its load; 0: it waits for free blocks.
    load: the copy of its blocks to the GPU; None: not started.
    expected: its last full block, while it waits until another process has written that block to a file.
    """

    request: Request
    names: list[BlockName]
    pinned: list[HostBlock] = field(default_factory=list)
    since: float = 0.0
    waited: float = 0.0
    deadline: float = 0.0
    load: Load | None = None
    expected: BlockName | None = None


@dataclass(eq=False)
class TieredConnector(ConnectorScheduler):
    """Saves KV blocks to host memory and files, and loads them before a request enters the waiting line.

    cache: whose blocks they are. scheduler: says whether a request would be admitted now.
    worker: copies blocks. host: host memory. disk: the files; None: there are none.
    rule: says when loading is faster than computing.
    save_computed: save blocks as soon as they are computed, not only when they are evicted.
    clock: returns the time in seconds.
    stats: counts of blocks. waiting: requests that wait for blocks. loads, saves: unfinished copies.
    """

    cache: OffloadingCache
    scheduler: Scheduler
    worker: ConnectorWorker
    host: HostTier
    disk: DiskTier | None
    rule: LoadRule
    save_computed: bool = False
    clock: Callable[[], float] = monotonic
    stats: TierStats = field(default_factory=TierStats)
    waiting: dict[Request, WaitingRequest] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    _need_room: list[WaitingRequest] = field(default_factory=list)  # by rank
    _name_of: dict[int, BlockName] = field(default_factory=dict)  # of cached blocks
    _to_save: dict[int, BlockName] = field(default_factory=dict)  # since the last step
    _overwritten: set[int] = field(default_factory=set)  # blocks that the next step may write

    @property
    def busy(self) -> bool:
        """Return True while copies are unfinished, or saves have not been started."""
        return bool(self.loads or self.saves or self._to_save)

    @property
    def _shared(self) -> bool:
        """Return True while requests run or wait in line: copies must not delay their steps."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # Admission.

    def ready(self, request: Request) -> bool:
        """Start or continue a request's load; return True once the request need not wait, else False.

        A request waits for its blocks no longer than they would take to compute. Then it enters the waiting
        line, and tokens whose blocks have not come are computed.
        """
        now = self.clock()
        wait = self.waiting.get(request) or self._begin(request)
        if wait.expected:
            if now < wait.deadline and not self._is_on_disk(wait.expected):
                return False
            earlier = wait
            wait = self._begin(request)
            wait.since = earlier.since
            wait.deadline = min(wait.deadline, earlier.deadline)
        if wait.load:
            if not wait.load.finished and now < wait.deadline:
                return False
            self.stats.expired_requests += not wait.load.finished
            return self._enter_line(wait)
        if wait.deadline:
            missing = any(not (block.loadable or block.failed) for block in wait.pinned)
            if missing and now < wait.deadline:
                return False
            self.stats.expired_requests += missing
            wait.waited, wait.deadline = now - wait.since, 0.0
        if self._need_room and self._need_room[0].request.rank < request.rank:
            return False  # no request overtakes one that waits for room
        found = self._num_cached(request)
        count = self._num_loadable(wait, found)
        if not count:
            return self._enter_line(wait)
        if any(wait.names[found] in load.names for load in self.loads):
            return False  # it comes with another request's blocks
        if not self._has_room(request):
            if wait not in self._need_room:
                insort(self._need_room, wait, key=lambda each: each.request.rank)
            return False
        wait.load = self._start_load(wait, found, count)
        # While it waited for room, the cache may have evicted blocks of it.
        start = found * self.cache.block_size
        seconds = self.rule.compute_seconds(start, len(request.tokens))
        wait.deadline = now + seconds - wait.waited
        if not self._shared:  # no other request has to wait with it
            self.worker.wait_for(wait.load.transfer)
        elif not wait.load.transfer.done():
            return False
        self._finish_load(wait.load)
        return self._enter_line(wait)

    def expect(self, request: Request) -> None:
        """Let a new request wait for its last full block, which another process is about to write to a file.

        It waits no longer than computing takes, and not at all if loading would be slower.
        """
        names = [*chain(self.cache.namespace, request.salt, self.cache.keys_of(request))]
        start = self._num_cached(request) * self.cache.block_size
        seconds = self.rule.compute_seconds(start, len(request.tokens))
        if names and self.rule.load_seconds(len(names), len(names)) < seconds:
            wait = self.waiting[request] = WaitingRequest(request, names, expected=names[-1])
            wait.since = self.clock()
            wait.deadline = wait.since + seconds

    def _begin(self, request: Request) -> WaitingRequest:
        """Find a request's blocks in host memory and files, and begin to read files if loading is faster.

        Returns:
            Its entry in `waiting`.
        """
        self._start_saves()  # what is evicted, but not copied yet, is found as well
        found = self._num_cached(request)
        names, from_disk = self._find_names(request, found)
        request.rank = self.scheduler.policy(request)
        wait = self.waiting[request] = WaitingRequest(request, names)
        size, end = self.cache.block_size, len(request.tokens)
        start, loaded = found * size, len(names) * size
        count = len(names) - found
        if not self.rule.should_load(start, loaded, end, count, from_disk, self._shared):
            return wait
        for name in names[found:]:
            if block := self.host.get(name.digest):
                self.host.pin([block])
            elif self.disk and (block := self.host.allocate(name.digest)):
                block.loadable = False
                self.host.pin([block])  # once more: the thread outlives the request
                self.disk.start(name, block, self.host.view(block), reading=True)
            else:
                break
            wait.pinned.append(block)
        wait.since = self.clock()
        wait.deadline = wait.since + self.rule.compute_seconds(start, end)
        return wait

    def _enter_line(self, wait: WaitingRequest) -> bool:
        """Remove a request from those that wait for blocks; unpin its blocks in host memory. Return True."""
        self.host.unpin(wait.pinned)
        if wait in self._need_room:
            self._need_room.remove(wait)
        del self.waiting[wait.request]
        return True

    def _num_cached(self, request: Request) -> int:
        """Return how many blocks of a request's prompt the cache has."""
        return self.cache.lookup(request) // self.cache.block_size

    def _find_names(self, request: Request, found: int) -> tuple[list[BlockName], int]:
        """Find a request's full blocks, up to the first that is in no memory and no file.

        found: how many blocks the cache has; all others must be in host memory or files.

        Returns:
            The names of the blocks, and how many of them must still be read from a disk.
        """
        names = []
        from_disk = 0
        for name in chain(self.cache.namespace, request.salt, self.cache.keys_of(request)):
            if name.position >= found:
                block = self.host.get(name.digest)
                if block is None and not self._is_on_disk(name):
                    break
                from_disk += block is None or not block.loadable
            names.append(name)
        return names, from_disk

    def _is_on_disk(self, name: BlockName) -> bool:
        return self.disk is not None and self.disk.files.contains(name.digest)

    def _num_loadable(self, wait: WaitingRequest, found: int) -> int:
        """Return how many blocks of a waiting request to load from host memory now; 0 if computing is faster.

        found: how many of its blocks the cache has; those after them are loaded.
        """
        blocks = (self.host.get(name.digest) for name in wait.names[found:])
        count = len([*takewhile(lambda block: block and block.loadable, blocks)])
        size = self.cache.block_size
        start, end = found * size, len(wait.request.tokens)
        loaded = start + count * size
        return count * self.rule.should_load(start, loaded, end, count, 0, self._shared)

    def _has_room(self, request: Request) -> bool:
        """Return True if there are a row and blocks for the request, besides those of requests before it.

        These are the requests whose blocks are being loaded, and at most one in the scheduler's waiting line;
        if more wait in that line, return False.
        """
        line = self.scheduler.waiting
        if len(line) > 1 or self.scheduler.rows.free <= len(self.loads) + len(line):
            return False
        needed = sum(self.cache.blocks_for(len(each.tokens)) for each in [*line, request])
        if line and needed > self.cache.free - self.cache.reserve_blocks:
            return False
        return self.cache.fits(request)

    # Loads.

    def _start_load(self, wait: WaitingRequest, found: int, count: int) -> Load:
        names = wait.names[found : found + count]
        sources = [block for name in names if (block := self.host.get(name.digest))]
        self.host.pin(sources)
        keys = [name.key for name in wait.names[:found]]
        cursor, cached, blocks = self.cache.begin_load(keys, wait.request.salt, count)
        self._start_saves()  # of what has just been evicted: the load writes there
        transfer = self.worker.start_copy(
            blocks,
            [block.slot for block in sources],
            to_host=False,
            after=self._saves_of({*blocks, *sources}),
            gently=self._shared,
        )
        load = Load(cursor, cached, names, blocks, sources, transfer)
        self.loads.append(load)
        return load

    def _finish_load(self, load: Load) -> None:
        """Put loaded blocks into the cache's prefix index, where every request finds them.

        If the device makes later steps wait for the copy, the copy may not have ended yet. Then its slots in
        host memory stay pinned (nothing else is stored in them) until it has.
        """
        load.finished = True
        keys = [name.key for name in load.names]
        new = self.cache.end_load(load.cursor, keys, load.blocks)
        for name, block in zip(load.names, load.blocks, strict=True):
            if block in new:
                self._name_of[block] = name
        self.cache.allocator.release([*load.cached, *load.blocks])
        self.stats.loaded += len(load.blocks)

    def held_blocks(self) -> list[int]:
        """Return the numbers of the cached and the loaded blocks of unfinished loads."""
        return [
            block
            for load in self.loads
            if not load.finished
            for block in [*load.cached, *load.blocks]
        ]

    # Saves.

    def save_blocks(self, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Record newly computed blocks; with `save_computed` on, save them before the next step.

        names, blocks: the name and the number of each.
        """
        for name, block in zip(names, blocks, strict=True):
            self._name_of[block] = name
            if self.save_computed:
                self._to_save[block] = name

    def blocks_evicted(self, blocks: Sequence[int]) -> None:
        """Record evicted blocks: they are copied to host memory before the next step, unless `save_computed`
        is on (then they were copied when they were computed).

        blocks: their numbers, the last block of a sequence first.
        """
        for block in reversed(blocks):  # from a sequence's beginning on
            name = self._name_of.pop(block, None)
            if name and not self.save_computed:
                self._to_save[block] = name

    def blocks_allocated(self, blocks: Sequence[int]) -> None:
        """Let the next step, which may write to these blocks (numbers), wait for saves that read them."""
        self._overwritten.update(blocks)

    def before_step(self) -> None:
        """Start the recorded saves, and let the next step wait for those whose blocks it may overwrite."""
        self._start_saves()
        for save in self._saves_of(self._overwritten):
            self.worker.wait_for(save)
        self._overwritten.clear()

    def _saves_of(self, used: Container[int | HostBlock]) -> list[Transfer]:
        """Return the copies of unfinished saves that read or write a block in `used`.

        used: numbers of GPU blocks (which are read), and host blocks (which are written).
        """
        return [
            save.transfer
            for save in self.saves
            if any(block in used for block in (*save.blocks, *save.targets))
        ]

    def request_finished(self, names: Sequence[BlockName]) -> None:
        """Mark the blocks with these names, of a finished request, as just used in host memory and files."""
        digests = [name.digest for name in names]
        self.host.touch(digests)
        if self.disk and digests:
            self.disk.touch(digests)

    def _start_saves(self) -> None:
        """Start to copy to host memory, in one launch, the blocks recorded since the last call (as computed
        or evicted) that are neither there nor in files.

        A block for which host memory has no slot is not saved.
        """
        if not self._to_save:
            return
        names = []
        blocks = []
        targets = []
        for block, name in self._to_save.items():
            if self.host.get(name.digest) or self._is_on_disk(name):
                continue
            if target := self.host.allocate(name.digest):
                names.append(name)
                blocks.append(block)
                targets.append(target)
        self._to_save.clear()
        if blocks:
            transfer = self.worker.start_copy(
                blocks,
                [block.slot for block in targets],
                to_host=True,
                # A step that writes to evicted blocks waits for their save.
                gently=self.save_computed and self._shared,
            )
            self.saves.append(Save(names, blocks, targets, transfer))
            self.stats.saved += len(blocks)

    # What has finished.

    def poll(self) -> None:
        """Start recorded saves, and process the copies and the file jobs that have finished."""
        self._start_saves()
        for load in [each for each in self.loads if each.transfer.done()]:
            self.loads.remove(load)
            self.host.unpin(load.sources)
            if not load.finished:
                self._finish_load(load)
        for save in [each for each in self.saves if each.transfer.done()]:
            self._finish_save(save)
        for job in self.disk.take_finished() if self.disk else ():
            self._finish_job(job)
        for wait in [*self.waiting.values()]:
            if wait.request.finish_reason:  # aborted
                self._enter_line(wait)

    def _finish_save(self, save: Save) -> None:
        self.saves.remove(save)
        for name, block in zip(save.names, save.targets, strict=True):
            # Blocks that are still to be written must leave room for others.
            if self.disk and self.disk.pending <= len(self.host.memory) // 2:
                self.host.pin([block])
                self.disk.start(name, block, self.host.view(block), reading=False)
        self.host.unpin(save.targets)

    def _finish_job(self, job: DiskJob) -> None:
        if not job.reading:
            self.stats.written += job.ok
        elif job.ok:
            job.block.loadable = True
            self.stats.read += 1
            self.rule.on_read(1, job.seconds / READERS)
        else:
            self.host.fail(job.block)
            self.stats.unread += 1
        self.host.unpin([job.block])

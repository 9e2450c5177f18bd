"""Compile grammars in threads, each once, and keep the compiled ones that were used last."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.matcher import Backend, Compiled

NICENESS = 10
"""Added to the niceness of threads that compile, so that the engine's thread goes first."""
ENTRY_BYTES = 1024
"""Estimated memory of an entry of the pool, without its grammar."""


class Compilation:
    """The compilation of one grammar: waiting for a thread, running, or done.

    grammar: what is compiled.
    seconds: processor time that it may take before requests that wait for it fail.
    used: returns the processor time, in seconds, that its thread has taken so far.
    future: gets the compiled grammar, or the error.
    bytes: an estimate of the memory of this entry, the compiled grammar included.
    """

    def __init__(self, grammar: Grammar, seconds: float) -> None:
        self.grammar, self.seconds = grammar, seconds
        self.used: Callable[[], float] = float  # 0.0: it waits for a thread
        self.future: Future[Compiled] = Future()
        self.bytes = ENTRY_BYTES + 2 * len(grammar.source)

    def get(self) -> Compiled | None:
        """Return the compiled grammar, or None if it is not done yet.

        Raises:
            UserError: the grammar was refused, or its compilation has taken more than `seconds`. Its thread
                goes on then: no thread can be stopped, and backends limit their own work.
        """
        if self.future.done():
            if error := self.future.exception():
                error.__traceback__ = None  # it would keep the requests that have asked
            return self.future.result()
        if self.used() > self.seconds:
            raise UserError(
                f"grammar ({self.grammar}) takes longer to compile than grammar_seconds, {self.seconds:g}"
            )
        return None

    def wait(self) -> Compiled:
        """Wait for the compiled grammar and return it.

        Raises `UserError` if it was refused or takes longer than `seconds` of processor time.
        """
        while not (found := self.get()):
            wait([self.future], 0.05)
        return found


class GrammarPool:
    """Compiles grammars in threads, and keeps the most recently used ones.

    make_backend: makes the backend; called in a thread when the first grammar comes, since preparing a
        tokenizer takes a while.
    cache_bytes: most bytes of compiled grammars to keep; a grammar that a request uses lives on with the
        request.
    seconds: most processor time to compile one grammar. threads: how many grammars are compiled at a time.
    bytes: estimated memory of all compiled grammars that are kept.
    compiled: number of compilations that were begun.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        *,
        cache_bytes: int,
        seconds: float,
        threads: int = 2,
    ) -> None:
        self.make_backend = make_backend
        self.cache_bytes = cache_bytes
        self.seconds = seconds
        self._backend: Backend | None = None
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="grammar", initializer=lower_priority
        )
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._known: OrderedDict[Grammar, Compilation] = OrderedDict()
        self.bytes = self.compiled = 0

    @property
    def backend(self) -> Backend:
        """Return the grammar backend; the first call makes it."""
        with self._making:
            self._backend = self._backend or self.make_backend()
            return self._backend

    def ask(self, grammar: Grammar) -> Compilation:
        """Return the compilation of a grammar, which may be waiting, running or done; begin it if it is new.

        Any thread may call this.
        """
        with self._lock:
            found = self._known.get(grammar)
            if found is None:
                found = self._known[grammar] = Compilation(grammar, self.seconds)
                self.compiled += 1
                self._threads.submit(self._compile, found)
            self._known.move_to_end(grammar)
            return found

    def _compile(self, entry: Compilation) -> None:
        """Compile the grammar of `entry` in the current thread, and store the result or the error there.

        Then drop the least recently used grammars while more than `cache_bytes` are kept.
        """
        try:
            backend = self.backend
            entry.used = processor_clock()
            made = backend.compile(entry.grammar)
            entry.bytes += made.bytes
            entry.future.set_result(made)
        except BaseException as error:
            if not isinstance(error, UserError):
                error = UserError(f"grammar ({entry.grammar}) cannot be compiled: {error}")
            entry.future.set_exception(error)
        with self._lock:
            # Another thread may have dropped the entry already, and subtracted its bytes.
            self.bytes += entry.bytes
            while self.bytes > self.cache_bytes:
                # The search stops at the first: thousands are known, and requests wait for the lock.
                done = (one for one in self._known.values() if one.future.done())
                if not (oldest := next(done, None)):
                    break
                self.bytes -= self._known.pop(oldest.grammar).bytes


def processor_clock() -> Callable[[], float]:
    """Return a clock, a function that returns the seconds of processor time that this thread has taken.

    They count from this call on, and any thread may call the clock. On a busy machine a thread of low
    priority gets little processor time, so by a wall clock a small grammar would take long.
    """
    clock: Callable[[], float] = time.monotonic
    with suppress(AttributeError):  # macOS has no clocks of threads
        clock = partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))
    begun = clock()
    return lambda: clock() - begun


def lower_priority() -> None:
    """Let the current thread run only when threads of normal priority leave it processor time."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

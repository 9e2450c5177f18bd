"""Grammars on their way: compiled by threads, once each, and remembered as long as there is room."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.matcher import Backend, Compiled

NICE = 10
"""By how much threads that compile step back behind those that compute."""
REFUSED_BYTES = 1024
"""What it costs to remember that a grammar was refused."""


class Compilation:
    """One grammar, from the moment a request asked for it.

    started: `time.monotonic()` when a thread took it up; None: it waits for a thread.
    """

    def __init__(self, grammar: Grammar, seconds: float) -> None:
        self.grammar, self.seconds = grammar, seconds
        self.started: float | None = None
        self.future: Future[Compiled] = Future()
        self.bytes = 0

    @property
    def late(self) -> bool:
        """Its thread is at it for longer than it may be."""
        return self.started is not None and time.monotonic() - self.started > self.seconds

    def get(self) -> Compiled | None:
        """Return the compiled grammar; None: not yet.

        Raises:
            UserError: it is refused, or has taken too long. Its thread is let go on: backends have limits
                on their work, and no request waits for it any more.
        """
        if self.future.done():
            return self.future.result()
        if self.late:
            raise UserError(
                f"grammar ({self.grammar}) takes longer to compile than grammar_seconds, {self.seconds:g}"
            )
        return None

    def wait(self) -> Compiled:
        """Return the compiled grammar as soon as it is there. Raises `UserError` as `get` does."""
        while (found := self.get()) is None:
            with suppress(TimeoutError):
                self.future.exception(timeout=0.05)
        return found


class GrammarPool:
    """Compiles grammars in threads and keeps the most recently used.

    Args:
        make_backend: called once, in the first thread that needs it: a tokenizer takes a while to prepare.
        cache_bytes: most bytes of compiled grammars that are kept, as far as no request uses them.
        seconds: most time for one.
        threads: how many are compiled at a time.
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
            threads, thread_name_prefix="grammar", initializer=step_back
        )
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._known: OrderedDict[Grammar, Compilation] = OrderedDict()
        self.bytes = 0  # of all that are kept
        self.compiled = 0  # how often there was something to do

    @property
    def backend(self) -> Backend:
        """The backend, made when it is first needed."""
        with self._making:
            if self._backend is None:
                self._backend = self.make_backend()
            return self._backend

    def ask(self, grammar: Grammar) -> Compilation:
        """Return a grammar's compilation, begun now if none has asked before. Any thread may call this."""
        with self._lock:
            found = self._known.get(grammar)
            if found is not None and not found.future.done() and found.late:
                found = None  # its thread may hang for a while yet; the next to ask has another try
            if found is None:
                found = self._known[grammar] = Compilation(grammar, self.seconds)
                self.compiled += 1
                self._threads.submit(self._compile, found)
            self._known.move_to_end(grammar)
            return found

    def _compile(self, entry: Compilation) -> None:
        try:
            backend = self.backend
            entry.started = time.monotonic()
            made = backend.compile(entry.grammar)
            entry.bytes = made.bytes + 2 * len(entry.grammar.source)
            entry.future.set_result(made)
        except BaseException as error:
            if not isinstance(error, UserError):
                error = UserError(f"grammar ({entry.grammar}) cannot be compiled: {error}")
            entry.bytes = REFUSED_BYTES + 2 * len(entry.grammar.source)
            entry.future.set_exception(error)
        with self._lock:
            if self._known.get(entry.grammar) is entry:  # else it was asked again meanwhile
                self.bytes += entry.bytes
            while self.bytes > self.cache_bytes:
                # Not a list of all: thousands are known, and that would take as long as a third of a step.
                done = (
                    grammar for grammar, known in self._known.items() if known.future.done()
                )
                if (oldest := next(done, None)) is None:
                    break
                self.bytes -= self._known.pop(oldest).bytes


def step_back() -> None:
    """Let this thread have only what processor time others leave: no step waits for a grammar."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)

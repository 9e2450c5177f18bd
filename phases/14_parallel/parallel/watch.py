"""Rank 0's watch over the other ranks: an engine that has lost a rank ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from continuous.engine import Engine
from continuous.seams import Loop
from parallel.worker_group import WorkerGroup, WorkerLostError


@dataclass(eq=False)
class WatchedLoop:
    """Rank 0's loop of steps `inner`, watched: it raises `WorkerLostError` if another rank is lost.

    workers: the processes of the other ranks. closed: True if they have been released.
    """

    inner: Loop
    workers: WorkerGroup
    closed: bool = False
    _release: Callable[[], Any] = lambda: None

    def close_with(self, release: Callable[[], Any]) -> None:
        """Set the function that releases the other ranks; called by `close`, or when a rank is lost."""
        self._release = release

    @property
    def idle(self) -> bool:
        """Return True if no step is in flight and no rank is lost.

        After a loss it is False, so that `advance` is called once more and raises.
        """
        return self.inner.idle and not self.workers.reason

    def advance(self, engine: Engine) -> None:
        """Start the next step, on all ranks, and collect the results that are ready.

        Raises:
            WorkerLostError: a rank has ended, or the engine is closed; nothing can be computed any more.
        """
        try:
            self.workers.check()
            if self.closed:  # another engine may have the worker group by now
                raise WorkerLostError("the engine is closed, and its ranks are released")
            with self.workers.awaited():
                self.inner.advance(engine)
            self.workers.check()
        except WorkerLostError:
            self._release()
            raise

    def on_step_failed(self, error: BaseException) -> None:
        """End all ranks, since a step has failed with `error`, perhaps because one of them has ended."""
        self.workers.wait_for_loss()
        self.workers.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")

    def close(self) -> None:
        """Release the other ranks' processes, which the engine otherwise keeps as long as it exists."""
        self.closed = True
        self._release()

"""The engine of phase 04 with a ledger and a check."""

from __future__ import annotations

import time

from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from continuous.messages import Output
from continuous.seams import NO_MASKS, Masks
from paged_cache.memory import Ledger
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler

CHECK_SECONDS = 60.0
"""An engine that falls idle checks its books, but not more often than this."""


class PagedEngine(Engine):
    """An engine over a block pool.

    ledger: how the memory was divided at the start.
    rehearsal_seconds: how long it took to make it ready for its first request.
    """

    rehearsal_seconds: float = 0.0

    scheduler: PagedScheduler

    def __init__(
        self,
        scheduler: PagedScheduler,
        runner: PagedRunner,
        ledger: Ledger,
        tokenizer: Tokenizer | None = None,
        *,
        masks: Masks = NO_MASKS,
    ) -> None:
        super().__init__(scheduler, runner, tokenizer, masks=masks)
        self.ledger = ledger
        self.cache = scheduler.cache
        self._last_check = time.monotonic()

    def drain(self) -> list[Output]:
        """See `Engine.drain`. An engine that has fallen idle has the time to look whether a block is lost."""
        if self.scheduler.idle and time.monotonic() - self._last_check >= CHECK_SECONDS:
            self.check_integrity()
        return super().drain()

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block has exactly the users that hold it.

        It reads all tables: not for every step.
        """
        self._last_check = time.monotonic()
        self.cache.check()
        if self.scheduler.idle and self.cache.free != self.cache.allocator.count:
            raise AssertionError(
                f"idle, but {self.cache.allocator.count - self.cache.free} blocks are not free"
            )

"""The engine of phase 04 with a ledger and a check."""

from __future__ import annotations

from common.tokenizer import Tokenizer
from continuous.engine import Engine
from paged_cache.memory import Ledger
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler


class PagedEngine(Engine):
    """An engine over a block pool.

    ledger: how the memory was divided at the start.
    """

    scheduler: PagedScheduler

    def __init__(
        self,
        scheduler: PagedScheduler,
        runner: PagedRunner,
        ledger: Ledger,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(scheduler, runner, tokenizer)
        self.ledger = ledger
        self.cache = scheduler.cache

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every block has exactly the users that hold it.

        It reads all tables, so call it when the engine is idle, or in tests.
        """
        self.cache.check()
        if self.scheduler.idle and self.cache.free != self.cache.allocator.count:
            raise AssertionError(
                f"idle, but {self.cache.allocator.count - self.cache.free} blocks are not free"
            )

"""The free list of blocks that several managers share, and the order in which idle blocks are evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_cache.allocator import BlockAllocator

if TYPE_CHECKING:
    from hybrid_cache.windows.manager import SingleTypeManager


class LruPool:
    """The free list of blocks `0 .. count - 1`, shared by the managers of several types of layers.

    A block is free, pinned (a running request needs it), or idle (cached for a prefix hit until its memory
    is needed).

    count: number of blocks.
    allocator: the free list.
    null: number of the null block, which is all zeros and stands for a block that was freed.
    pinned: number of pinned blocks.
    skipped: pages (ranges of tokens) whose idle blocks lie before a sliding window, oldest first.
    finished: pages with idle blocks whose last request has ended, oldest first.
    fresh: numbers of the blocks that were taken since the runner asked last.
    """

    def __init__(self, count: int) -> None:
        self._reserve = count // 100  # the watermark
        self.allocator = BlockAllocator(count)
        self.null, self.pinned = count, 0
        self.skipped: dict[tuple[SingleTypeManager, int], None] = {}
        self.finished: dict[tuple[SingleTypeManager, int], None] = {}
        self.fresh: list[int] = []

    @property
    def available(self) -> int:
        """Return the number of blocks that are free or idle (cached, and needed by no running request)."""
        return self.allocator.count - self.pinned

    @property
    def admissible(self) -> int:
        """Return how many blocks a new request may take: the available ones, less 1 % of `count` if any
        block is pinned.
        """
        return self.available - (self._reserve if self.pinned else 0)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks and return their numbers.

        Raises:
            AssertionError: fewer blocks are free.
        """
        blocks = self.allocator.allocate(count)
        self.fresh += blocks
        return blocks

    @staticmethod
    def evict_oldest(idle: dict[tuple[SingleTypeManager, int], None]) -> None:
        """Free the blocks of the oldest page in `idle`, which is this pool's `skipped` or `finished`.

        idle: (manager, page number) of pages whose blocks no running request needs, oldest first.
        """
        manager, page = next(iter(idle))
        manager.evict(page)

"""The blocks of one pool, which several managers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_cache.allocator import BlockAllocator

if TYPE_CHECKING:
    from hybrid_cache.managers import Manager


class LruPool:
    """Blocks `0 .. count - 1`, in one numbering for all managers that take from here.

    Args:
        count: blocks.
        watermark: share of them that admission leaves free, see `PagedCache`.

    null: the number of one block more, of zeros, that stands for a block which was given back.
    pinned: blocks that running requests need. All others are free, or can be freed.
    slid: pages whose blocks no running request needs, since windows have slid past them, oldest first. They
        stay for a prefix hit that ends there until their room is needed.
    ends: the same for pages whose last request has ended.
    fresh: blocks that have got a new owner since the runner asked last.
    """

    def __init__(self, count: int, *, watermark: float = 0.01) -> None:
        self._reserve = int(watermark * count)
        self.books = BlockAllocator(count)
        self.null, self.pinned = count, 0
        self.slid: dict[tuple[Manager, int], None] = {}
        self.ends: dict[tuple[Manager, int], None] = {}
        self.fresh: list[int] = []

    @property
    def available(self) -> int:
        """Blocks that are free or can be freed."""
        return self.books.count - self.pinned

    @property
    def spare(self) -> int:
        """Blocks that admission may pin."""
        return self.available - (self._reserve if self.pinned else 0)

    def take(self, count: int) -> list[int]:
        """Take blocks that are free."""
        blocks = self.books.allocate(count)
        self.fresh += blocks
        return blocks

    @staticmethod
    def evict_oldest(idle: dict[tuple[Manager, int], None]) -> None:
        """Free the blocks of the page that has been longest in `slid` or `ends`."""
        manager, page = next(iter(idle))
        manager.lose(page)

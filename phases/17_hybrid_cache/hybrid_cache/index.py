"""The index of an engine without a prefix cache."""

from __future__ import annotations

from prefix_cache.index import Key, Match


class NoIndex:
    """A `PrefixIndex` that keeps nothing."""

    evictable = 0

    def match(self, keys: list[Key], salt: str) -> Match:
        """Nothing is known."""
        return Match([], 0)

    def attach(self, keys: list[Key], salt: str) -> object:
        """A cursor that pins nothing."""
        return self

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[object, list[int], list[int]]:
        """The blocks stay their owner's."""
        return cursor, blocks, []

    def fork(self, cursor: object) -> object:
        """The same cursor."""
        return cursor

    def detach(self, cursor: object) -> None:
        """Nothing is pinned."""

    def evict(self, count: int) -> list[int]:
        """Nothing can be evicted."""
        return []

    def blocks(self) -> list[int]:
        """None."""
        return []

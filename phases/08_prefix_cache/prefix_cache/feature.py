"""The prefix cache as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.options import option
from paged_cache import EngineBuilder, Feature
from prefix_cache.cache import PrefixCache
from prefix_cache.hash_chain import HashIndex
from prefix_cache.radix import RadixIndex

INDEXES: dict[str, type[RadixIndex] | type[HashIndex]] = {
    "radix": RadixIndex,
    "hash": HashIndex,
}
"""Indexes by the name of the option."""


@dataclass(frozen=True)
class Prefix(Feature):
    """Keep KV blocks of ended requests, and share them between requests with the same first tokens."""

    name = "prefix_cache"
    phase = 8

    index: str = option(
        "radix",
        "how blocks are found again: radix (a tree) or hash (a chain of hashes)",
        choices=INDEXES,
    )

    def install(self, builder: EngineBuilder) -> None:
        """Replace the engine's KV cache by a `PrefixCache`."""
        builder.cache.replace(self, self._cache)

    def _cache(self, rows: int, max_len: int, blocks: int, block_size: int) -> PrefixCache:
        return PrefixCache(rows, max_len, blocks, block_size, INDEXES[self.index]())

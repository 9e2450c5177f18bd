"""Phase 02: keep every token's keys and values, so that each token is computed once."""

from __future__ import annotations

from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache
from kv_cache.generator import CachedGenerator

__all__ = ["CachedAttention", "CachedGenerator", "KVCache", "load"]

load = CachedGenerator.load

"""Phase 17: the hybrid KV cache. Layers with a sliding window free old blocks; Gated DeltaNet has states."""

from __future__ import annotations

from experts import PRESET as BELOW
from hybrid_cache.cache import HybridCache
from hybrid_cache.feature import Hybrid
from hybrid_cache.groups import LayerGroups
from hybrid_cache.pool import HybridPool

__all__ = ["LLM", "PRESET", "Hybrid", "HybridCache", "HybridPool", "LayerGroups", "load"]

PRESET = BELOW.plus(on=[Hybrid])
"""Everything below, and the hybrid cache, which leaves a model of one kind of layers as it was."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model."""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""

"""Phase 17: the hybrid cache. Layers that remember differently share one pool of blocks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.text import llm
from forward.model import Model
from hybrid_cache.cache import HybridCache
from hybrid_cache.feature import Hybrid
from hybrid_cache.layout import Layout
from hybrid_cache.managers import FullManager, Manager, WindowManager
from hybrid_cache.pool import HybridPool
from hybrid_cache.stock import Stock
from paged_cache import PagedEngine
from parallel import PRESET as BELOW

__all__ = [
    "LLM",
    "PRESET",
    "FullManager",
    "Hybrid",
    "HybridCache",
    "HybridPool",
    "Layout",
    "Manager",
    "Stock",
    "WindowManager",
    "load",
]

PRESET = BELOW.plus(on=[Hybrid])
"""Everything below, and the hybrid cache, which leaves a model of one kind of layers as it was."""


def load(model: str | Path | Model, **options: Any) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model: see `forward.load_model`.
        options: those of the phases below.

    Raises:
        UserError: an option is unknown or out of its limits, or features do not go together.
    """
    return PRESET.load(model, **options)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""

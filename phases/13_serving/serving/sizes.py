"""The sizes of an engine, which the API process has to know."""

from __future__ import annotations

from continuous.engine import Engine
from continuous.policies import POLICY_NAMES
from paged_cache import PagedCache
from serving.messages import Ready


def ready(engine: Engine) -> Ready:
    """Return an engine's sizes, such as its context length, as the report that it is ready."""
    found = Ready(engine.max_len, engine.config.vocab_size)
    if isinstance(engine.cache, PagedCache):
        found.max_rows = engine.scheduler.rows.count
        found.memory_plan = str(engine.memory_plan)
        found.blocks = engine.cache.allocator.count
        found.block_size = engine.cache.block_size
        found.device = engine.runner.model.device.type
        found.policy = POLICY_NAMES[engine.scheduler.policy]
    return found

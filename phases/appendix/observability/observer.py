"""Pictures from the engine's process: owners of blocks, and the requests that run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.request import Request
from continuous.engine import Engine
from paged_cache import PagedCache
from serving.messages import Command, DrawEngine, StepReport
from serving.worker import Observer

MOST_CELLS = 1024
"""Blocks that are drawn; of a larger pool, every so many-th."""
MOST_ROWS = 64
FREE, CACHED, SHARED = -1, -2, -3
"""Owners that are no row: nobody, only the prefix cache, several requests."""


def picture(engine: object) -> dict[str, Any]:
    """Owners of blocks (a row, or one of the constants above) and the requests that run.

    It reads the tables between two steps, at most ten times a second, and only while somebody watches.
    """
    if not isinstance(engine, Engine) or not isinstance(engine.cache, PagedCache):
        return {"blocks": [], "stride": 1, "rows": []}
    cache, running = engine.cache, engine.scheduler.running
    count = cache.allocator.count
    owners = np.where(np.asarray(cache.allocator.refs) > 0, CACHED, FREE)  # [N]
    for request in running:
        blocks = cache.blocks_of(request.row)
        owners[blocks] = np.where(
            owners[blocks] >= 0, SHARED, np.where(owners[blocks] == SHARED, SHARED, request.row)
        )
    stride = -(-count // MOST_CELLS)
    rows = [
        {
            "row": request.row,
            "id": request.id,
            "prompt": request.prompt_len,
            "computed": min(request.num_computed_tokens, len(request.tokens)),
            "tokens": len(request.tokens),
            "limit": request.limit,
            "cached": request.cached_tokens,
        }
        for request in running[:MOST_ROWS]
    ]
    return {"blocks": owners[::stride].tolist(), "stride": stride, "rows": rows}


log = logging.getLogger(__name__)


class EngineObserver(Observer):
    """Writes pictures into the reports of those who asked; nothing else costs anything."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        log_late_kernels()
        self._draws = False

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        self._draws |= isinstance(command, DrawEngine)

    def due(self) -> bool:
        """Tell if a picture is asked for."""
        return self._draws

    def write(self, step: StepReport, now: float) -> None:
        """See `Observer`."""
        if self._draws:
            self._draws, step.picture = False, picture(self.engine)


def log_late_kernels() -> None:
    """Log each kernel that is compiled from now on: the rehearsal has left it out, and requests wait."""

    def note(**facts: Any) -> None:
        log.warning("a kernel was compiled while requests waited: %s", facts.get("repr"))

    triton: Any = sys.modules.get("triton")  # an engine without kernels does without
    if triton is not None:
        triton.knobs.runtime.jit_post_compile_hook = note

"""A picture of an engine: who owns which blocks, who runs and how far everybody is."""

from __future__ import annotations

from typing import Any

import numpy as np

from paged_cache import PagedEngine

MOST_CELLS = 1024
"""Blocks that are drawn; of a larger pool, every so many-th."""
MOST_ROWS = 64
FREE, CACHED, SHARED = -1, -2, -3
"""Owners that are no row: nobody, only the prefix cache, several requests."""


def picture(engine: object) -> dict[str, Any]:
    """Owners of blocks (a row, or one of the constants above) and the requests that run.

    It reads the tables between two steps, at most ten times a second, and only while somebody watches.
    """
    if not isinstance(engine, PagedEngine):
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

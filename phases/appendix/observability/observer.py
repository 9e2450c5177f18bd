"""Describe an engine's blocks, running requests and prefix tree for a drawing, in the engine's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nlargest
from typing import Any

import numpy as np

from common.request import Request
from continuous.engine import Engine
from paged_cache import PagedCache
from prefix_cache.cache import PrefixCache
from prefix_cache.radix import RadixIndex
from serving.messages import Command, DrawEngine, StepReport

MOST_CELLS = 1024
"""Blocks that are drawn at most; of a larger pool every second, every third, ... block is."""
MOST_ROWS = 64
MOST_NODES = 48
"""Nodes of the prefix tree that are drawn: those nearest to the roots, and of one node's children those
in use
and those used last.
"""
FREE = -1
CACHED = -2
SHARED = -3
"""Owners of a block that are no row: no owner, the prefix cache alone, several requests."""


def picture(engine: object) -> dict[str, Any]:
    """Return an engine's state as JSON data for a drawing: owners of KV blocks, requests, prefix tree.

    Must be called between two steps, when no block table changes. An engine without a paged cache has no
    blocks.

    Returns: `blocks` (owner of every `stride`-th block: a request's row, or `FREE`, `CACHED`, `SHARED`),
        `stride`, `rows` (a dictionary for each running request), and `tree`, None without a prefix tree.
    """
    if not isinstance(engine, Engine) or not isinstance(engine.cache, PagedCache):
        return {"blocks": [], "stride": 1, "rows": [], "tree": None}
    cache, running = engine.cache, engine.scheduler.running
    count = cache.allocator.count
    owners = np.where(np.asarray(cache.allocator.refs) > 0, CACHED, FREE)  # [N]
    for request in running:
        blocks = cache.blocks_of(request.row)
        taken = (owners[blocks] >= 0) | (owners[blocks] == SHARED)
        owners[blocks] = np.where(taken, SHARED, request.row)
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
    index = cache.index if isinstance(cache, PrefixCache) else None
    found = tree(index) if isinstance(index, RadixIndex) else None
    return {"blocks": owners[::stride].tolist(), "stride": stride, "rows": rows, "tree": found}


def tree(index: RadixIndex) -> dict[str, Any]:
    """Return the prefix cache's radix tree as JSON data, without its tokens, which are users' prompts.

    Returns: `nodes`, a list with [index of its parent in this list or -1, number of blocks, number of
        requests that use it] for each node, and `more`, the number of nodes that are left out though their
        parents are shown.
    """
    nodes: list[list[int]] = []
    todo, more = deque((-1, root) for root in index.roots), 0
    while todo and len(nodes) < MOST_NODES:
        above, node = todo.popleft()
        if node.blocks:  # a root has none, and is not drawn
            nodes.append([above, len(node.blocks), node.pins])
            above = len(nodes) - 1
        kept = nlargest(
            MOST_NODES, node.children.values(), key=lambda child: (child.pins > 0, child.used)
        )
        more += len(node.children) - len(kept)
        todo += ((above, child) for child in kept)
    return {"nodes": nodes, "more": more + len(todo)}


class StepPictures:
    """Adds a picture of the engine (blocks, requests, prefix tree) to reports, if a client asks.

    A step report is the message that the engine's process sends to the API process after a step.

    engine: which is drawn. due: whether there is something to add to the next report.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.due = self._draws = False

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Receive a command to the engine; `DrawEngine` asks for a picture in the next step report.

        requests: those that the command has added to the engine, not used.
        """
        self.due = True
        self._draws |= isinstance(command, DrawEngine)

    def write(self, step: StepReport) -> None:
        """Add a picture of the engine to the report `step`, in place, if one was asked for."""
        self.due = False
        if self._draws:
            self._draws, step.picture = False, picture(self.engine)

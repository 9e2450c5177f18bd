"""What graphs need beside weights and cache, decided before the cache takes the rest."""

from __future__ import annotations

from cuda_graphs.buckets import chunk_sizes, decode_sizes
from cuda_graphs.decode_graph import KINDS
from forward.model import Model
from paged_cache.memory import activation_bytes

PER_GRAPH = 8 << 20
"""Nodes and their parameters, kept by the driver."""


def graph_bytes(model: Model, rows: int, tokens: int) -> int:
    """An estimate from above of what capturing takes.

    The graphs share one pool, so of the steps inside them only the largest counts.

    Args:
        rows: requests in the largest decode graph.
        tokens: tokens in the largest chunk graph, 0 if there are none.
    """
    step = max(activation_bytes(model, rows, rows), activation_bytes(model, tokens, rows))
    graphs = len(decode_sizes(rows)) * len(KINDS) + (2 * len(chunk_sizes(tokens)) if tokens else 0)
    return step + graphs * PER_GRAPH

"""The memory of graphs beside weights and cache, decided before the cache takes the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuda_graphs.buckets import chunk_sizes, decode_sizes, full_step
from cuda_graphs.decode_graph import KINDS
from forward.model import Model
from paged_cache.memory import activation_bytes


@dataclass(frozen=True)
class Startup:
    """The cost of capturing CUDA graphs: their number, the seconds, and the bytes of device memory.

    The seconds include compiling kernels.
    """

    graphs: int
    seconds: float
    bytes: int


PER_GRAPH = 8 << 20
"""Nodes and their parameters, kept by the driver."""


def graph_bytes(model: Model, rows: int, tokens: int, step_tokens: int) -> int:
    """Return an upper estimate of the device memory, in bytes, that an engine's CUDA graphs take.

    The graphs share one pool, so of the steps inside them only the largest counts.

    Args:
        rows: requests in the largest decode graph.
        tokens: tokens in the largest chunk graph (for steps with prompt tokens), 0 if there are none.
        step_tokens: most tokens that the scheduler puts into a step; such a step may have a graph, too.
    """
    full = full_step(model, step_tokens, tokens)
    step = max(activation_bytes(model, size, rows) for size in (rows, tokens, full))
    chunks = len(chunk_sizes(tokens)) + bool(full) if tokens else 0
    return step + (len(decode_sizes(rows)) * len(KINDS) + 2 * chunks) * PER_GRAPH


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU's memory, or 0 for a CPU.

    Memory that PyTorch's allocator keeps for later is returned to the GPU first, so it counts as free.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]

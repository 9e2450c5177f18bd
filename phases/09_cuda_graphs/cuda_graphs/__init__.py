"""Phase 09: CUDA graphs and overlap. A step is one launch, and the next is scheduled meanwhile."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

import prefix_cache
from common.errors import UserError, integer
from cuda_graphs.engine import OverlapEngine, RunAhead
from forward.loading import load_model
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.llm import LLM as PagedLLM

if not torch.cuda.is_available():  # Triton decides when it is imported, which nothing here has done yet
    os.environ.setdefault("TRITON_INTERPRET", "1")

__all__ = ["LLM", "OverlapEngine", "RunAhead", "load"]

USUAL_SIZE = {"max_rows": 64, "step_tokens": 256}
CUDA_SIZE = {"max_rows": 256, "step_tokens": 8192}
"""Defaults, as in the phases before, and where there is a GPU to fill."""
DEFAULT_GRAPH_ROWS = 256
"""Larger batches keep the device busy without graphs."""


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kernels: bool | None = None,
    graphs: bool | None = None,
    overlap: bool = True,
    compiled: bool = False,
    max_rows: int | None = None,
    graph_rows: int = DEFAULT_GRAPH_ROWS,
    graph_tokens: int = 1024,
    **options: Any,
) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model, device, dtype: see `forward.load_model`.
        kernels: use phase 06's kernels; by default on CUDA only.
        graphs: replay steps from graphs; by default on CUDA with the kernels' attention only.
        overlap: schedule each step while the one before is computed.
        compiled: for comparison, let `torch.compile` fuse the layers in the place of phase 06's kernels;
            attention and sampling stay.
        max_rows: requests that run at a time; by default 256 on CUDA, 64 elsewhere.
        graph_rows: the largest batch of decodes that has a graph.
        graph_tokens: the most tokens of a mixed step that has one; 0: none has.
        options: those of `prefix_cache.load` and, with kernels, of `triton_paged_attention.load`;
            `step_tokens` is by default 8,192 on CUDA, 256 elsewhere.

    Raises:
        UserError: an option is out of its limits.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    on_cuda = loaded.device.type == "cuda"
    kernels = on_cuda if kernels is None else kernels
    fixed = kernels and "torch" not in (options.get("attention_prefill"), options.get("attention_decode"))
    graphs = on_cuda and fixed if graphs is None else graphs
    if graphs and not fixed:
        raise UserError(
            "graphs is True, but must be False without phase 06's attention kernels: torch's attention "
            "chooses its calls by the lengths of the requests, which a graph cannot"
        )
    usual = CUDA_SIZE if on_cuda else USUAL_SIZE
    max_rows = integer("max_rows", usual["max_rows"] if max_rows is None else max_rows, low=1)
    graph_rows = min(integer("graph_rows", graph_rows, low=1), max_rows)
    graph_tokens = integer("graph_tokens", graph_tokens, low=0)
    options = {"step_tokens": usual["step_tokens"], **options}
    parts: dict[str, Any] = {"max_rows": max_rows}
    if overlap:
        parts["make_engine"] = OverlapEngine
    if not (kernels or compiled):
        return prefix_cache.load(loaded, **parts, **options)
    # Only from here on is Triton needed, which not every system has.
    import triton_paged_attention
    from cuda_graphs.compiled import load_compiled
    from cuda_graphs.latency import LatencyAttention, install
    from cuda_graphs.memory import graph_bytes
    from cuda_graphs.runner import GraphRunner

    if graphs:
        parts["reserved_bytes"] = graph_bytes(loaded, graph_rows, graph_tokens)
        parts["make_runner"] = partial(GraphRunner, most_rows=graph_rows, most_tokens=graph_tokens)
    if compiled:
        return load_compiled(loaded, below=prefix_cache.load, **parts, **options)
    return triton_paged_attention.load(
        loaded,
        attention_class=LatencyAttention,
        below=lambda model, **given: prefix_cache.load(install(model), **given),
        **parts,
        **options,
    )


class LLM(PagedLLM):
    """See `paged_cache.llm.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)

"""Every phase's engine under one name, small enough for a tiny model. Add a phase here to compare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import batch_invariance
import batching
import chunked_prefill
import continuous
import cuda_graphs
import experts
import forward
import hybrid_cache
import kv_cache
import moving_blocks
import paged_cache
import prefix_cache
import quant
import speculative
import structured
from common.events import Streams
from continuous.engine import Engine
from cuda_graphs.overlap import OverlappedLoop
from forward.model import Model
from paged_cache import BlockPool, PagedEngine

Make = Callable[[Model], Streams]


def blocks(model: Model, count: int, block_size: int = 16) -> int:
    """The bytes of so many blocks."""
    return count * BlockPool.bytes_per_block(model.config, block_size, model.dtype)


def overlapped(engine: Engine) -> Engine:
    """The same engine one step ahead of its results, as phase 09 runs it."""
    return Engine(engine.scheduler, engine.runner, engine.tokenizer, loop=OverlappedLoop())


def tight(load: Callable[..., PagedEngine], **options: Any) -> Make:
    """With so few blocks that requests are preempted all the time."""
    return lambda model: load(
        model, max_rows=6, block_size=16, cache_bytes=blocks(model, 36), **options
    )


SLOW: dict[str, Make] = {
    "01 forward": lambda model: forward.load(model),
    "02 kv_cache": lambda model: kv_cache.load(model),
    "03 batching": lambda model: batching.load(model, batch_size=5),
    "03 batching compact": lambda model: batching.load(model, batch_size=5, compact=True),
}
ENGINES: dict[str, Callable[[Model], Engine]] = {
    "04 continuous": lambda model: continuous.load(model, max_rows=5, max_len=600),
    "04 shortest first": lambda model: continuous.load(
        model, max_rows=5, policy="shortest_first"
    ),
    "04 overlapped": lambda model: overlapped(continuous.load(model, max_rows=5, max_len=600)),
    "05 paged_cache": lambda model: paged_cache.load(model, max_rows=8),
    "05 small blocks": lambda model: paged_cache.load(model, max_rows=8, block_size=3),
    "05 preempting": tight(paged_cache.load),
    "05 preempting overlapped": lambda model: overlapped(tight(paged_cache.load)(model)),
    "07 chunked_prefill": lambda model: chunked_prefill.load(
        model, max_rows=8, step_tokens=64
    ),
    "07 tiny budget": lambda model: chunked_prefill.load(
        model, max_rows=8, step_tokens=9, chunk_tokens=5
    ),
    "07 preempting": tight(chunked_prefill.load, step_tokens=50),
    "08 radix": lambda model: prefix_cache.load(model, max_rows=8, step_tokens=64),
    "08 hash": lambda model: prefix_cache.load(
        model, max_rows=8, step_tokens=64, index="hash"
    ),
    "08 radix preempting": tight(prefix_cache.load, step_tokens=50),
    "08 hash preempting": tight(prefix_cache.load, step_tokens=50, index="hash"),
    "08 radix overlapped": lambda model: overlapped(
        tight(prefix_cache.load, step_tokens=50)(model)
    ),
    "09 overlap": lambda model: cuda_graphs.load(model, max_rows=8, step_tokens=64),
    "09 overlap preempting": tight(cuda_graphs.load, step_tokens=50),
    "10 quant": lambda model: quant.load(model, max_rows=8, step_tokens=64),
    "11 ngram": lambda model: speculative.load(model, max_rows=8, step_tokens=64),
    "11 ngram always": lambda model: speculative.load(
        model, max_rows=8, step_tokens=64, draft_adaptive=False
    ),
    "11 ngram preempting": tight(speculative.load, step_tokens=50, draft_adaptive=False),
    "12 structured": lambda model: structured.load(model, max_rows=8, step_tokens=64),
    "16 experts": lambda model: experts.load(model, max_rows=8, step_tokens=64),
    "16 preempting": tight(experts.load, step_tokens=50),
    "17 hybrid_cache": lambda model: hybrid_cache.load(model, max_rows=8, step_tokens=64),
    "19 moving_blocks": tight(moving_blocks.load, step_tokens=50),
    "17 small blocks": lambda model: hybrid_cache.load(
        model, max_rows=8, step_tokens=50, block_size=3
    ),
    "18 batch_invariance": lambda model: batch_invariance.load(
        model, max_rows=8, step_tokens=64
    ),
}
"""Engines with `add`, `step` and `abort`."""

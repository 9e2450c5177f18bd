"""Phase 04: continuous batching. Requests join and leave the batch at every step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from common.device import free_memory
from common.errors import UserError, shown
from common.options import route
from common.text import llm
from common.text.tokenizer import Tokenizer
from continuous.attention import RowAttention
from continuous.cache import RowCache, RowStore
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from continuous.runner import Runner
from continuous.scheduler import Scheduler
from continuous.sizes import Sizes
from forward.loading import load_model
from forward.model import Model

__all__ = ["LLM", "Engine", "Runner", "load"]

DEFAULT_MAX_LEN = 2048
"""Tokens of a row. A row has memory for the longest request, and a model's whole context would take too
much.
"""
DEFAULT_ROWS = 16


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Engine:
    """Return this phase's engine (continuous batching) for a model's name or a loaded model.

    Args:
        model: a model's name, its folder, or a loaded `Model`.
        device, dtype: where and how to load the model; "auto" chooses.
        tokenizer: needed for stop strings only.
        options: fields of `Sizes`. By default at most 16 requests run at a time (`max_rows`), each of at
            most 2,048 tokens, or fewer if the model's context is shorter (`max_len`), and a step computes at
            most 2,048 tokens, or `max_len` if that is more (`step_tokens`). No prompt may be longer than
            `step_tokens`. With `cache_bytes`, as many requests run as fit into this many bytes of KV cache.

    Raises:
        UserError: an option is unknown or out of its limits.
    """
    sizes = Sizes(**route(options, [Sizes])[0])
    loaded = load_model(model, device=device, dtype=dtype)
    length = sizes.context(loaded, DEFAULT_MAX_LEN)
    steps = sizes.step_tokens or max(2048, length)
    each = length * loaded.config.kv_bytes_per_token(loaded.dtype)
    count = _rows(sizes, each, length, free_memory(loaded.device)[0])
    rows = RequestRows(count, length, loaded.device)
    store = RowStore(loaded.config, count, length, device=loaded.device, dtype=loaded.dtype)
    scheduler = Scheduler(rows, RowCache(), step_tokens=steps, policy=POLICIES[sizes.policy])
    return Engine(scheduler, Runner(loaded, RowAttention(store), rows), tokenizer)


def _rows(sizes: Sizes, row_bytes: int, length: int, free: int) -> int:
    """Return the number of cache rows, one for each request that may run at a time.

    It is `max_rows`, by default 16; with `cache_bytes`, as many as fit into that memory, at most
    `max_rows`.
    sizes: the engine's options. row_bytes: cache memory of a row. length: tokens of a row. free: bytes of
    free memory.

    Raises:
        UserError: there is not enough free memory, or `cache_bytes` does not hold one row.
    """
    if sizes.cache_bytes is None:
        count = sizes.max_rows or DEFAULT_ROWS
        if count * row_bytes > free:
            raise UserError(
                f"max_rows is {count}, which takes {count * row_bytes} bytes for rows of {length} tokens, "
                f"but only {free} bytes are free: lower max_rows or max_len"
            )
        return count
    if sizes.cache_bytes > free:
        raise UserError(
            f"cache_bytes is {shown(sizes.cache_bytes)}, but only {free} bytes are free"
        )
    fitting = sizes.cache_bytes // row_bytes
    if fitting < 1:
        raise UserError(
            f"cache_bytes is {sizes.cache_bytes}, but one row of {length} tokens takes {row_bytes}"
        )
    return min(sizes.max_rows or fitting, fitting)


LLM = partial(llm.LLM, load=load)
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""

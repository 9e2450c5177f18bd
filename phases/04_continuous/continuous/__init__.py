"""Phase 04: continuous batching. Requests join and leave the batch at every step."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError, integer
from common.text.tokenizer import Tokenizer
from continuous.attention import RowAttention
from continuous.cache import RowCache, RowStore
from continuous.engine import Engine, Output, Stats
from continuous.llm import LLM as BaseLLM
from continuous.policies import POLICIES, Policy
from continuous.rows import Rows
from continuous.runner import Pending, Runner
from continuous.scheduler import Scheduler, Work
from forward.loading import load_model
from forward.model import Model

__all__ = ["LLM", "Engine", "Output", "Pending", "Runner", "Scheduler", "Stats", "Work", "load"]

DEFAULT_MAX_LEN = 2048
"""A row has memory for the longest request, so a model's whole context is rarely what one wants."""


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    max_rows: int | None = None,
    cache_bytes: int | None = None,
    max_len: int | None = None,
    step_tokens: int | None = None,
    policy: str = "fcfs",
) -> Engine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model, device, dtype: see `forward.load_model`.
        tokenizer: needed for stop strings only.
        max_rows: requests that run at a time, 16 by default; each takes a row of `max_len` tokens.
        cache_bytes: instead of `max_rows`, as many rows as fit into so many bytes.
        max_len: most tokens of a request, prompt and output; by default the model's context, at most 2,048.
        step_tokens: most tokens computed in a step, which the longest prompt must fit; by default 2,048, or
            `max_len` if that is more.
        policy: `fcfs`, `shortest_first` or `priority`.

    Raises:
        UserError: an option is out of its limits.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    length = context(loaded, max_len, DEFAULT_MAX_LEN)
    if cache_bytes is not None:
        cache_bytes = integer("cache_bytes", cache_bytes, low=0)
        row = RowStore.bytes_needed(loaded.config, 1, length, loaded.dtype)
        max_rows = cache_bytes // row if max_rows is None else min(max_rows, cache_bytes // row)
        if max_rows < 1:
            raise UserError(f"cache_bytes is {cache_bytes}, but one row of {length} tokens takes {row}")
    count = integer("max_rows", 16 if max_rows is None else max_rows, low=1)
    rows = Rows(count, length, loaded.device)
    store = RowStore(loaded.config, count, length, device=loaded.device, dtype=loaded.dtype)
    steps = max(2048, length) if step_tokens is None else step_tokens
    scheduler = Scheduler(rows, RowCache(length), step_tokens=steps, policy=named_policy(policy))
    return Engine(scheduler, Runner(loaded, RowAttention(store), rows), tokenizer)


def context(model: Model, max_len: int | None, default: int | None = None) -> int:
    """The context length to serve: `max_len`, which the model must have, or `default` or the model's."""
    if max_len is None:
        return model.max_len if default is None else min(model.max_len, default)
    if not 2 <= integer("max_len", max_len) <= model.max_len:
        raise UserError(
            f"max_len is {max_len}, but must be between 2 and the model's context of {model.max_len}"
        )
    return max_len


def named_policy(name: str) -> Policy:
    """The policy called `name`, or a `UserError`."""
    if name not in POLICIES:
        raise UserError(f"policy is {name!r}, but must be one of {', '.join(POLICIES)}")
    return POLICIES[name]


class LLM(BaseLLM):
    """See `continuous.llm.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)

"""Phase 05: the paged cache. Requests grow a block at a time, in blocks from one pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.errors import integer
from common.text.tokenizer import Tokenizer
from continuous import context, named_policy
from continuous.rows import Rows
from forward.loading import load_model
from forward.model import Model
from paged_cache.allocator import BlockAllocator
from paged_cache.attention import PagedAttention, PagedBatch, TorchPagedAttention
from paged_cache.cache import PagedCache
from paged_cache.engine import PagedEngine
from paged_cache.llm import LLM as PagedLLM
from paged_cache.memory import Ledger, plan_cache
from paged_cache.pool import BlockPool, KVFormat, LayerCache
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler

__all__ = [
    "LLM",
    "BlockAllocator",
    "BlockPool",
    "KVFormat",
    "LayerCache",
    "Ledger",
    "PagedAttention",
    "PagedBatch",
    "PagedCache",
    "PagedEngine",
    "PagedRunner",
    "PagedScheduler",
    "TorchPagedAttention",
    "load",
]


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    max_rows: int = 64,
    max_len: int | None = None,
    step_tokens: int | None = None,
    policy: str = "fcfs",
    block_size: int = 16,
    cache_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    reserved_bytes: int = 0,
    make_cache: Callable[..., PagedCache] = PagedCache,
    make_scheduler: Callable[..., PagedScheduler] = PagedScheduler,
    make_attention: Callable[[BlockPool], PagedAttention] = TorchPagedAttention,
    make_runner: Callable[..., PagedRunner] = PagedRunner,
    make_engine: Callable[..., PagedEngine] = PagedEngine,
) -> PagedEngine:
    """This phase's engine for a model's name or a loaded model.

    Args:
        model, device, dtype, tokenizer, policy: see `continuous.load`.
        max_rows: requests that run at a time; a row costs next to nothing now.
        max_len: most tokens of a request, prompt and output; by default the model's context.
        step_tokens: most tokens computed in a step, which the longest request must fit in case it has to be
            computed again; by default 2,048, or `max_len` if that is more.
        block_size: tokens in a block.
        cache_bytes: the cache's size. Without it, the cache takes what weights and activations leave of
            `gpu_memory_utilization` of the device's memory.
        reserved_bytes: memory to leave free for somebody else (phase 09's graphs).
        make_cache, make_scheduler, make_attention, make_runner, make_engine: the parts that later phases
            replace.

    Raises:
        UserError: an option is out of its limits.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    length = context(loaded, max_len)
    steps = max(2048, length) if step_tokens is None else integer("step_tokens", step_tokens, low=1)
    rows = Rows(integer("max_rows", max_rows, low=1), length, loaded.device)
    ledger = plan_cache(
        loaded,
        block_size=block_size,
        step_tokens=steps,
        rows=max_rows,
        max_len=length,
        cache_bytes=cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        reserved=reserved_bytes,
    )
    cache = make_cache(max_rows, length, ledger.blocks, block_size)
    scheduler = make_scheduler(rows, cache, step_tokens=steps, policy=named_policy(policy))
    pool = BlockPool(loaded.config, ledger.blocks, block_size, device=loaded.device, dtype=loaded.dtype)
    runner = make_runner(loaded, make_attention(pool), rows, cache)
    return make_engine(scheduler, runner, ledger, tokenizer)


class LLM(PagedLLM):
    """See `paged_cache.llm.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)

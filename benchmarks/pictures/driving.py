"""The tracer: a tiny model, and engines that are driven by hand, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

from chunked_prefill import ChunkedScheduler
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.work import Work
from forward import load_model
from paged_cache import BlockPool


@cache
def tiny() -> Any:
    """Return the model that all pictures share."""
    return load_model("random:tiny", device="cpu", dtype="float32")


def exactly(tokens: int, **more: Any) -> SamplingParams:
    """Ask for so many tokens, whatever the model says."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def blocks(count: int, size: int) -> dict[str, Any]:
    """Return the sizes of a cache of so many blocks, each of `size` tokens of the tiny model."""
    each = BlockPool.bytes_per_block(tiny().config, size, tiny().dtype)
    return {"block_size": size, "cache_bytes": count * each}


def steps(engine: Any) -> Iterator[list[Work]]:
    """Drive an engine until it is idle; yields what each step has scheduled, before it is launched."""
    while not engine.idle:
        engine.process_inbox()
        works = engine.schedule()
        yield works
        engine.collect(engine.sample(engine.forward(works)))
        engine.take_outputs()


@contextmanager
def token_ids() -> Iterator[list[Tensor]]:
    """Yield a list that gets the token ids of each forward pass of the tiny model."""
    seen: list[Tensor] = []
    hook = tiny().embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0])
    )
    yield seen
    hook.remove()


def scheduled(
    scheduler: ChunkedScheduler, prompts: list[list[int]], output: int
) -> Iterator[tuple[list[Work], list[Request]]]:
    """Schedule requests with these prompts until all have ended, without a model.

    Yields each step's works, and all requests.
    """
    requests = [
        Request(at, tokens, len(tokens), len(tokens) + output, exactly(output))
        for at, tokens in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add([request])
    while not scheduler.idle:
        works = scheduler.schedule()
        yield works, requests
        for work in works:
            for request in work.sampled_requests:
                request.tokens.append(-1 - len(request.tokens))
            scheduler.finish_step(work)
            if len(work.request.tokens) == work.request.limit:
                work.request.finish_reason = "length"
                scheduler.leave(work.request)

"""A tiny model, and engines that are driven by hand, one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

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

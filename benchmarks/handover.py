"""Prefill here, decode there: a prompt's blocks leave one engine's cache and enter another's.

A long prompt computed beside decodes makes them wait (phase 07 bounds by how much). Two kinds of replicas do
not: one computes prompts, the other tokens, and between them go the keys and values. There is no new kind of
request. The prefix cache (phase 08) finds blocks by what they hold, so handing a prompt over is to put its
blocks into the other's cache; the request itself then comes like any other, and finds them.

Splitwise (arXiv 2311.18677), DistServe (arXiv 2401.09670).
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from common.sampling.params import SamplingParams
from paged_cache import PagedEngine
from paged_cache.pool import BlockPool
from paged_cache.runner import PagedRunner
from prefix_cache import PrefixCache
from prefix_cache.index import Key, block_keys

FILL = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Handover(NamedTuple):
    """A prompt's full blocks.

    keys: the tokens of each, in order.
    blocks: `[L, 2, n, P, KH, D]`, keys and values as they are stored.
    scales: what they are to be multiplied by, `[L, 2, KH]`, or None; see `paged_cache.KVFormat`.
    layout: see there.
    """

    keys: list[Key]
    salt: str
    blocks: Tensor
    scales: Tensor | None
    layout: Any


def prefill(engine: PagedEngine, prompt: Sequence[int], salt: str = "") -> Handover:
    """Compute a prompt and take its blocks along; they also stay. The engine may have others to serve."""
    (request,) = engine.add(prompt, FILL, salt=salt)
    while request.finish_reason is None:
        engine.step()
    if request.finish_reason == "error":
        raise RuntimeError(
            f"the prompt of {len(prompt)} tokens was not computed"
        ) from request.error
    return export(engine, prompt, salt)


def export(engine: PagedEngine, prompt: Sequence[int], salt: str = "") -> Handover:
    """A copy of the full blocks that the engine's cache has of this prompt, from the first without a gap."""
    cache, pool = _cache_of(engine), _pool_of(engine)
    keys = block_keys(prompt, cache.block_size)
    found = cache.index.match(keys, salt).blocks
    where = torch.tensor(found, dtype=torch.long, device=pool.data.device)
    return Handover(
        keys[: len(found)],
        salt,
        pool.data[:, :, where],
        _scales(engine),
        pool.layers[0].layout,
    )


def enter(engine: PagedEngine, handover: Handover) -> int:
    """Put blocks into an engine's cache, between two steps; returns how many are new there.

    Raises:
        UserError: the engine's blocks are of another size or kind.
    """
    cache, pool = _cache_of(engine), _pool_of(engine)
    _check(engine, handover)
    known = len(cache.index.match(handover.keys, handover.salt).blocks)
    cursor: object = cache.index.attach(handover.keys[:known], handover.salt)
    # What is full is full: the end of a prompt is left out, and computed.
    count = min(len(handover.keys) - known, cache.free)
    taken = cache.take_blocks(count)
    cursor, _, new = cache.index.extend(cursor, handover.keys[known : known + count], taken)
    places = [place for place, block in enumerate(taken) if block in set(new)]
    where = torch.tensor(
        [taken[place] for place in places], dtype=torch.long, device=pool.data.device
    )
    which = torch.tensor(
        [known + place for place in places], dtype=torch.long, device=handover.blocks.device
    )
    pool.data[:, :, where] = handover.blocks[:, :, which].to(pool.data.device)
    cache.index.detach(cursor)
    cache.allocator.release([block for block in taken if block not in set(new)])
    return len(new)


def _cache_of(engine: PagedEngine) -> PrefixCache:
    if not isinstance(engine.cache, PrefixCache):
        raise UserError(
            "prefix_cache is off, but blocks are handed over from one prefix cache to another"
        )
    return engine.cache


def _pool_of(engine: PagedEngine) -> BlockPool:
    assert isinstance(engine.runner, PagedRunner)
    return engine.runner.attention.pool


def _scales(engine: PagedEngine) -> Tensor | None:
    layers = _pool_of(engine).layers
    found = [
        scale
        for layer in layers
        for scale in (layer.k_scale, layer.v_scale)
        if scale is not None
    ]
    return torch.stack(found).view(len(layers), 2, -1) if found else None


def _check(engine: PagedEngine, handover: Handover) -> None:
    pool, blocks = _pool_of(engine), handover.blocks
    mine, theirs = (
        pool.data.shape[:2] + pool.data.shape[3:],
        blocks.shape[:2] + blocks.shape[3:],
    )
    if (
        mine != theirs
        or pool.data.dtype != blocks.dtype
        or pool.layers[0].layout != handover.layout
    ):
        raise UserError(
            f"blocks are {tuple(theirs)} of {blocks.dtype}, "
            f"but this engine's are {tuple(mine)} of {pool.data.dtype}"
        )
    scales = _scales(engine)
    if (scales is None) != (handover.scales is None) or (
        scales is not None
        and handover.scales is not None
        and not torch.equal(scales.cpu(), handover.scales.cpu())
    ):
        raise UserError(
            "blocks have other scales than this engine's: both must be quantized alike"
        )


# Between two processes of one host.


def to_shared_memory(handover: Handover) -> tuple[SharedMemory, Handover]:
    """A copy of the blocks that another process can open by the memory's name. The caller unlinks it.

    Returns the memory, and the handover whose blocks lie in it: a GPU's blocks are copied once, to there.
    """
    blocks = handover.blocks
    memory = SharedMemory(create=True, size=max(1, blocks.numel() * blocks.element_size()))
    shared = _tensor(memory, blocks.shape, blocks.dtype)
    shared.copy_(blocks)
    return memory, handover._replace(blocks=shared)


def _tensor(memory: SharedMemory, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory.buf, dtype=dtype, count=size).view(tuple(shape))

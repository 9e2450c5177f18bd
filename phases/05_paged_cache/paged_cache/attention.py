"""Attention over a paged KV cache: the interface of every backend, and the one in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from continuous.attention import avoid_plans_per_shape, prompt_attention
from continuous.batch import Batch
from continuous.groups import (
    PADDING_PER_CALL,
    Group,
    attend_masked,
    group,
    prompt_groups,
)
from forward.attention import LayerSpec
from paged_cache.pool import BlockPool, LayerBlocks, largest, scaled


def encode(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return keys or values `x [..., KH, D]` as stored: divided by `scale [KH]`, in the range of `dtype`.

    scale: None: only the dtype changes.
    """
    if scale is None:
        return x.to(dtype)
    x = x.float() / scale[:, None]
    if not dtype.is_floating_point:
        x = (x + 0.5).floor()
    return x.clamp(-largest(dtype), largest(dtype)).to(dtype)


@dataclass(frozen=True)
class PagedBatch(Batch):
    """A step's inputs on the device, with the KV cache blocks of its requests.

    block_tables: `[B, max_blocks]` int32, the blocks of each of `B` requests, with as many columns as the
        longest context has blocks; entries past a request's last block may hold anything.
    slots: `[T]` int64, where each new token's key and value go: `block * P + offset`, `P` tokens a block.
    """

    block_tables: Tensor
    slots: Tensor


class PagedAttention(ABC):
    """Attention over the paged KV cache: write the new keys and values to their slots, then attend.

    A backend implements `attend`, and `plan` if it prepares something for all layers of a step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.batch: PagedBatch

    def begin(self, batch: Batch) -> None:
        """Start a step: keep `batch` for the calls of all layers, and call `plan`."""
        assert isinstance(batch, PagedBatch)
        self.batch = batch
        self.plan()

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k`, `v [T, KH, D]` in `layer`'s blocks; return attention `[T, H, D]` of `q [T, H, D]`."""
        cache, _ = self.place(layer)
        self.store(cache, k, v)
        return self.attend(layer, q, k, v, cache)

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's `LayerBlocks`, and the slots `[T]` in them for the step's new keys and values."""
        return self.pool.layers[layer.index], self.batch.slots

    def store(self, cache: LayerBlocks, k: Tensor, v: Tensor) -> None:
        """Write every token's key and value to its slot in a layer's blocks, in the cache's format.

        cache: the layer's blocks. k, v: `[T, KH, D]`. A slot of the pool is `block * P + offset`.
        """
        cache.k.flatten(0, 1)[self.batch.slots] = encode(k, cache.k_scale, cache.k.dtype)
        cache.v.flatten(0, 1)[self.batch.slots] = encode(v, cache.v_scale, cache.v.dtype)

    def wipe(self, row: int) -> None:
        """From now on, fill every block with zeros when a request gets it, because some block may hold NaN.

        row: the row of the request that made NaN; not read here, since a row's blocks may be shared.
        """
        self.pool.stained = True

    def plan(self) -> None:  # noqa: B027  # many backends need nothing
        """Prepare what all layers share in the step `self.batch`; called once a step. Default: nothing."""

    @abstractmethod
    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """Return the attention `[T, H, D]` of `q [T, H, D]` over a layer's blocks.

        cache: the layer's blocks. They hold this step's `k` and `v [T, KH, D]` already.
        """


class TorchPagedAttention(PagedAttention):
    """Paged attention in plain torch: gather a group's blocks into one padded tensor, attend with a mask.

    A group: requests of similar length. The gather copies every key and value of every context at every
    step: the price of paging without a kernel that can read through a block table.
    """

    def __init__(self, pool: BlockPool) -> None:
        avoid_plans_per_shape()
        super().__init__(pool)

    def plan(self) -> None:
        """Group the step's requests by length, and look up each group's blocks."""
        host, device = self.batch.host, self.batch.positions.device
        if self.pool.exact:
            self._prompts, others = prompt_groups(host, device)
        else:  # a prompt attends to its keys as they are stored, as later requests will
            self._prompts, others = [], np.arange(len(host.query_lens))
        # By queries first, by contexts next, so that neighbours need little padding.
        by_length = np.lexsort((host.context_lens[others], host.query_lens[others]))
        order = others[by_length].tolist()
        found = group(order, host.query_lens, host.context_lens, PADDING_PER_CALL[device.type])
        self._others = [
            (Group.of(members, host, device), self._blocks(members)) for members in found
        ]

    def _blocks(self, members: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        """Return a group's block numbers, `[G * blocks]`: of each request as many as the longest context has.

        members: `[G]`, the group's requests as indices into the batch.

        A context of n tokens has n / P blocks, rounded up; the pool's tensor `self.pool.data`
        `[layers, 2, N, P, KH, D]` tells P. Lengths are in `self.batch.host.context_lens`, blocks in
        `self.batch.block_tables`. A shorter request is padded with its own first block: padding is masked,
        but 0 times a NaN in another request's block would be NaN.
        """
        size = self.pool.data.shape[3]
        counts = -(-self.batch.host.context_lens[members] // size)
        where = torch.from_numpy(members).to(self.batch.block_tables.device)
        tables = self.batch.block_tables[where, : int(counts.max())]  # [G, blocks]
        if (counts != counts.max()).any():  # past a table's end there may be no block at all
            used = torch.arange(tables.shape[1]) < torch.from_numpy(counts)[:, None]
            tables = tables.where(used.to(tables.device), tables[:, :1])
        return tables.flatten()

    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """Return attention `[T, H, D]` of `q [T, H, D]` over a layer's blocks, group by group."""
        out = torch.empty_like(q)
        for plan in self._prompts:
            prompt_attention(plan, layer, q, k, v, out)
        for plan, blocks in self._others:
            keys = self._gather(cache.k, blocks, plan).to(q.dtype)
            values = self._gather(cache.v, blocks, plan).to(q.dtype)
            mask = plan.mask(layer.sliding_window, keys.shape[2], q.device)
            queries = plan.take(q)
            # A head's scales are factors of all its scores and of all its outputs.
            if cache.k_scale is not None:
                queries = scaled(queries, cache.k_scale)
            seen = attend_masked(layer, queries, keys, values, mask)
            if cache.v_scale is not None:
                seen = scaled(seen, cache.v_scale)
            plan.put(out, seen)
        return out

    @staticmethod
    def _gather(numbers: Tensor, blocks: Tensor, plan: Group) -> Tensor:
        """Return the keys or values of a group's contexts, heads first: `[G, KH, blocks * P, D]`.

        numbers: `[N, P, KH, D]`. blocks: `[G * blocks]`, equally many of each request. plan: the requests.
        """
        taken = numbers.index_select(0, blocks)  # [G * blocks, P, KH, D], a copy
        return taken.view(len(plan.members), -1, *numbers.shape[2:]).transpose(1, 2)

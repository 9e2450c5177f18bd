"""Attention in plain torch over chunks of keys that end at fixed positions, combined in order.

Softmax over many keys is a sum, and where it is cut decides how it is rounded. So it is cut at multiples of
`CHUNK`, which the positions of keys alone decide: no batch, no length of a step and no cached prefix does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous.batch import Batch, HostBatch
from forward.attention import LayerSpec
from hybrid_cache.pool import HybridPool
from paged_cache import LayerBlocks, PagedAttention

CHUNK = 256
"""Keys of a chunk. Long chunks are less to combine; of short ones more can be computed side by side."""
QUERIES = 16
"""Query tokens of a tile here; fewer are padded."""


class Softmax(NamedTuple):
    """The softmax-weighted sum of values over some keys, not yet divided by the sum of weights.

    largest: `[...]`, the largest score. total: `[...]`, the sum of exp(score - largest).
    weighted: `[..., D]`, the values, each times its weight.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor

    def then(self, other: Softmax) -> Softmax:
        """Return the softmax over this one's keys and then the keys of `other`, which come after them.

        If `other` has no visible keys, the result has the bits of this one.
        """
        largest = torch.maximum(self.largest, other.largest)
        mine = torch.exp(self.largest - largest)
        theirs = torch.exp(other.largest - largest)
        return Softmax(
            largest,
            self.total * mine + other.total * theirs,
            self.weighted * mine[..., None] + other.weighted * theirs[..., None],
        )


def query_tiles(host: HostBatch, queries: int) -> NDArray[np.int64]:
    """Return a step's query tiles, `[n, 4]`, each of at most `queries` tokens of one request.

    host: the step's batch, on the host.

    Returns:
        For each tile: the index of its request in the batch, the index of its first token among the step's
        tokens, the number of its tokens, and the position of its first token in the request.
    """
    tiles = []
    lens, contexts = host.query_lens.tolist(), host.context_lens.tolist()
    starts = host.query_starts.tolist()
    for request, (count, context) in enumerate(zip(lens, contexts, strict=True)):
        for first in range(0, count, queries):
            rows = min(queries, count - first)
            tiles.append((request, starts[request] + first, rows, context - count + first))
    return np.array(tiles, np.int64).reshape(-1, 4)


class GroupedAttention(PagedAttention):
    """Paged attention over one or several KV cache groups (layers that share block tables)."""

    def begin(self, batch: Batch) -> None:
        """Start a step: look up its block tables and slots in every KV cache group."""
        super().begin(batch)
        self.look_up()

    def look_up(self) -> None:
        """Set `batches`: for each KV cache group the step's batch with the group's block tables and slots."""
        pool = self.pool
        self.batches = pool.begin(self.batch) if isinstance(pool, HybridPool) else [self.batch]

    def place(self, layer: LayerSpec) -> tuple[LayerBlocks, Tensor]:
        """Return a layer's blocks, and the slots `[T]` that the step's keys and values are written to.

        Also set `self.batch` to the step's batch with the block tables of the layer's KV cache group.
        """
        if isinstance(self.pool, HybridPool):
            self.batch = self.batches[self.pool.group_of[layer.index]]
        return super().place(layer)


class ChunkedTorch(GroupedAttention):
    """Paged attention by torch that computes tiles of `QUERIES` tokens over chunks of `CHUNK` keys.

    Every call of torch has tensors of the same shape, but for the number of tiles, which torch multiplies one
    by one: so the batch changes no bit of a tile.
    """

    chunk = CHUNK

    def plan(self) -> None:
        """Cut the step's tokens into tiles of `QUERIES`; keep each tile's rows and positions for `attend`."""
        device = self.batch.positions.device
        tiles = query_tiles(self.batch.host, QUERIES)
        self._ends = tiles[:, 3] + tiles[:, 2]
        self._requests, first, count, position = torch.from_numpy(tiles).to(device).unbind(1)
        row = torch.arange(QUERIES, device=device)
        self._real = row < count[:, None]  # [n, QUERIES]
        self._rows = first[:, None] + torch.minimum(row, count[:, None] - 1)
        self._positions = position[:, None] + row

    def attend(
        self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, cache: LayerBlocks
    ) -> Tensor:
        """Return the attention `[T, H, D]` of the step's tokens over the paged cache, chunk by chunk of keys.

        q: `[T, H, D]`. k, v: not used; `cache`, the layer's blocks, has them already.
        """
        heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
        queries = q[self._rows].float().view(*self._rows.shape, *heads, -1).movedim(1, 3)
        # [n, KH, group, QUERIES, D]
        none = queries.new_full(queries.shape[:-1], -1e30)
        done = Softmax(none, torch.zeros_like(none), torch.zeros_like(queries))
        for chunk in range(-(-int(self._ends.max(initial=0)) // self.chunk)):
            reach = torch.from_numpy(np.flatnonzero(self._ends > chunk * self.chunk))
            reach = reach.to(q.device)
            before = Softmax(*(numbers[reach] for numbers in done))
            after = before.then(self._attend_chunk(layer, queries, cache, reach, chunk))
            for numbers, new in zip(done, after, strict=True):
                numbers[reach] = new
        result = (done.weighted / done.total[..., None]).movedim(3, 1).flatten(2, 3)
        out = torch.empty_like(q)
        out[self._rows[self._real]] = result[self._real].to(q.dtype)
        return out

    def _attend_chunk(
        self, layer: LayerSpec, queries: Tensor, cache: LayerBlocks, reach: Tensor, chunk: int
    ) -> Softmax:
        """Return the softmax of `m` query tiles over the keys of one chunk.

        queries: `[n, KH, group, QUERIES, D]`, of all tiles; each of `KH` key/value heads has `group` query
            heads. reach: `[m]`, indices of the tiles that have keys in this chunk.
        cache: the layer's blocks. chunk: the chunk's number; its first key has the position `chunk *
            self.chunk`.
        """
        key = torch.arange(chunk * self.chunk, (chunk + 1) * self.chunk, device=queries.device)
        requests = self._requests[reach]
        # What lies behind a request's last key is masked; its own last key stands in for it.
        last = self.batch.context_lens.to(queries.device)[requests].long() - 1
        position = torch.minimum(key, last[:, None])  # [m, chunk]
        size = cache.k.shape[1]
        blocks = self.batch.block_tables[requests].gather(1, position // size).long()
        slots = blocks * size + position % size
        keys, values = (
            numbers.flatten(0, 1)[slots].float().transpose(1, 2) for numbers in cache[:2]
        )  # [m, KH, chunk, D]
        if cache.k_scale is not None and cache.v_scale is not None:
            keys = keys * cache.k_scale[:, None, None]
            values = values * cache.v_scale[:, None, None]
        own = queries[reach]
        rows = own.flatten(2, 3) * layer.scale  # [m, KH, group * QUERIES, D]
        scores = (rows @ keys.transpose(2, 3)).view(*own.shape[:-1], -1)
        distance = self._positions[reach][:, :, None] - key  # [m, QUERIES, chunk]
        seen = distance >= 0
        if layer.sliding_window is not None:
            seen &= distance < layer.sliding_window
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        largest = scores.amax(-1).clamp(min=-1e30)
        weights = torch.exp(scores - largest[..., None])
        weighted = (weights.flatten(2, 3) @ values).view(own.shape)
        return Softmax(largest, weights.sum(-1), weighted)

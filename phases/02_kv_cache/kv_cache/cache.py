"""A contiguous key/value cache: memory for every token of every layer, allocated once.

Keys and values of past tokens never change, because a causal transformer's past does not depend on its
future. Storing them turns each step's work from the whole sequence into one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import UserError
from common.models.config import ModelConfig


class LayerCache:
    """One layer's keys and values, ``[B, KH, capacity, D]``: a head's tokens are contiguous.

    A column is a token's position in the cache, padding included. A sliding-window layer has room for its
    window only, as a ring: column ``p`` is stored in slot ``p % capacity``.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.capacity = keys.shape[2]

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Store ``k, v [B, KH, S, D]`` as columns ``start .. start+S-1``; only the last `capacity` stay."""
        skip = max(0, k.shape[2] - self.capacity)
        k = k[:, :, skip:]
        v = v[:, :, skip:]
        first = (start + skip) % self.capacity
        head = min(k.shape[2], self.capacity - first)  # columns that fit before the ring wraps
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[:, :, first : first + head] = new[:, :, :head]
            if head < new.shape[2]:
                cache[:, :, : new.shape[2] - head] = new[:, :, head:]

    def read(self, end: int) -> tuple[Tensor, Tensor]:
        """Return views of the stored keys and values, ``[B, KH, min(end, capacity), D]`` each, in slot order.

        end: number of columns written so far; the last `capacity` of them are stored.
        """
        count = min(end, self.capacity)
        return self.keys[:, :, :count], self.values[:, :, :count]

    def columns(self, end: int) -> Tensor:
        """Return the column that is stored in each slot of `read(end)`: ``[min(end, capacity)]`` int64."""
        slots = torch.arange(min(end, self.capacity), device=self.keys.device)
        # The newest column in slot s is the largest p < end with p % capacity == s.
        return (
            slots + (end - 1 - slots).div(self.capacity, rounding_mode="floor") * self.capacity
        )


class KVCache:
    """The caches of all layers for a batch of ``B`` sequences of at most ``max_len`` columns.

    ``layers`` has a `LayerCache` for each layer. ``length`` is how many columns are filled. The generation
    loop advances it after a step; layers never do, since within a step every layer must see the same value.
    ``bytes_needed`` returns the memory that the caches take.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_len: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config.check_keys_only()
        self.max_len = max_len
        self.length = 0
        self.layers = []
        for window in config.sliding_windows:
            capacity = max_len if window is None else min(window, max_len)
            shape = (batch, config.num_kv_heads, capacity, config.head_dim)
            keys, values = (torch.empty(shape, device=device, dtype=dtype) for _ in "kv")
            self.layers.append(LayerCache(keys, values))

    @staticmethod
    def bytes_needed(config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype) -> int:
        """Return the bytes of a cache of `batch` sequences of `max_len` columns; nothing is allocated.

        ``2 * KH * D * bytes`` a token and layer; a window layer never holds more than its window.
        """
        columns = sum(
            max_len if w is None else min(w, max_len) for w in config.sliding_windows
        )
        return 2 * batch * columns * config.num_kv_heads * config.head_dim * dtype.itemsize

    def advance(self, count: int) -> None:
        """Count ``count`` more columns (token positions) as filled."""
        self.length += count

    def reserve(self, count: int) -> None:
        """Raise `UserError` if ``count`` more columns (positions) do not fit; called before layers write."""
        if self.length + count > self.max_len:
            raise UserError(
                f"the KV cache is full: {self.length} + {count} tokens, but max_len is {self.max_len}"
            )

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences ``rows [B']`` (int64), copied in this order; drop all others."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

"""Attention with a KV cache: append this step's keys and values, attend over everything stored."""

from __future__ import annotations

import torch
from torch import Tensor

from forward.attention import LayerSpec, attend, causal_mask
from kv_cache.cache import KVCache, LayerCache


class CachedAttention:
    """Attention over a `KVCache`; one query per sequence is a decode, several are a prefill.

    columns: `[S]` int64, the columns (positions in the cache) of the current step.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.columns = torch.empty(0, dtype=torch.int64)
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def begin(self, count: int) -> None:
        """Start a step of ``count`` new columns (positions in the cache), and forget the last step's masks.

        Raises `UserError` if the cache has no room for them.
        """
        self.cache.reserve(count)
        start, device = self.cache.length, self.cache.layers[0].keys.device
        self.columns = torch.arange(start, start + count, device=device)  # [S]
        self._masks.clear()

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention's output ``[B, S, H, D]`` of a layer, and store its new keys and values.

        q: ``[B, S, H, D]``. k, v: ``[B, S, KH, D]``, the keys and values of the step's columns.
        """
        q, k, v = (
            x.transpose(1, 2) for x in (q, k, v)
        )  # heads before tokens, as the cache has them
        cache = self.cache.layers[layer.index]
        start = self.cache.length
        count = q.shape[2]
        if layer.sliding_window is None or count == 1:
            # A decode may write first: the one column it overwrites has just left the window.
            cache.write(start, k, v)
            keys, values = cache.read(start + count)
            mask = self._mask(layer, cache, start + count)
        else:
            # A longer step may not: its first query still needs columns that its last one pushes out.
            old_keys, old_values = cache.read(start)
            keys, values = torch.cat((old_keys, k), dim=2), torch.cat((old_values, v), dim=2)
            mask = self._mask(layer, cache, start, self.columns)
            cache.write(start, k, v)
        return attend(layer, q, keys, values, mask).transpose(1, 2)

    def _mask(
        self, layer: LayerSpec, cache: LayerCache, end: int, fresh: Tensor | None = None
    ) -> Tensor | None:
        """Return the boolean mask ``[..., S, L]`` of keys that a layer's queries see; ``None``: they see all.

        Layers of the same window and capacity share a mask, which is computed once a step.

        cache: the layer's. end: number of columns written, whose keys come first. fresh: columns of the step,
            if their keys are not in the cache yet.
        """
        kind = (cache.capacity, layer.sliding_window)
        if kind not in self._masks:
            columns = cache.columns(end)
            keys = columns if fresh is None else torch.cat((columns, fresh))
            self._masks[kind] = self.mask(keys, layer.sliding_window)
        return self._masks[kind]

    def mask(self, key_columns: Tensor, window: int | None) -> Tensor | None:
        """Return the causal mask of the step's columns, bool ``[..., S, L]``; ``None``: they see every key.

        key_columns: ``[L]``, each key's position in the cache.
        window: the layer's sliding window in tokens; ``None``: none.
        """
        if len(self.columns) == 1:
            return None  # the newest token sees everything that is kept
        return causal_mask(self.columns, key_columns, window)

"""Cached attention over a left-padded batch: rows begin at different columns."""

from __future__ import annotations

from torch import Tensor

from forward.attention import causal_mask
from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache


class PaddedAttention(CachedAttention):
    """Attention over a KV cache that hides each row's padding.

    Args:
        cache: of ``B`` rows.
        padding: ``[B]`` int64, how many padding columns each row begins with.
    """

    def __init__(self, cache: KVCache, padding: Tensor) -> None:
        super().__init__(cache)
        self.padding = padding

    def keep(self, rows: Tensor) -> None:
        """Keep only the rows ``rows [B']`` (int64) of the batch, in cache and padding."""
        self.cache.keep(rows)
        self.padding = self.padding[rows]

    def mask(self, key_columns: Tensor, window: int | None) -> Tensor | None:
        """Return the mask ``[B, 1, S, L]``: causal, within the window, and without padding columns.

        key_columns: ``[L]``. window: the layer's sliding window in tokens; ``None``: none.
        """
        real = (key_columns >= self.padding.unsqueeze(-1)).unsqueeze(1)  # [B, 1, L]
        if len(self.columns) > 1:
            visible = causal_mask(self.columns, key_columns, window)  # [S, L]
            # A padding query would see nothing, and a softmax over nothing is 0/0: NaN spreads through
            # the next layer's values into every row's zero-weight terms. Let it see itself.
            itself = self.columns.unsqueeze(-1) == key_columns
            real = real & visible | itself  # [B, S, L]
        return real.unsqueeze(1)

"""The cache as the scheduler sees it, and the simplest one, which has a row for each request."""

from __future__ import annotations

from typing import Protocol

import torch

from common.models.config import ModelConfig
from common.request import Request


class CacheManager(Protocol):
    """The host's side of a cache: which requests have room. It moves no data and never waits for the device.

    The scheduler calls it in this order. Admission: `fits`, `lookup`, then the first `reserve`, which must
    not refuse what `fits` has just allowed; before it the request gets a row, and `num_computed_tokens` is
    set to what `lookup` returned. In each step: `reserve` before any token is scheduled, and `commit` when
    the step has succeeded. At the end: `release`, once, and then the row is freed.

    A method that a subclass does not define behaves as for a cache that always has room.
    """

    def holds(self, tokens: int) -> bool:
        """Return True if a request could keep this many tokens if it had the cache for itself."""
        return True

    def fits(self, request: Request) -> bool:
        """Return True if there is room now to admit `request` with all the tokens it has."""
        return True

    def lookup(self, request: Request) -> int:
        """Return how many of the request's first tokens are cached, at most all but one. Changes nothing."""
        return 0

    def reserve(self, request: Request, upto: int) -> bool:
        """Reserve cache memory for a request's first `upto` tokens; share the cached ones `lookup` found.

        What was reserved before stays, also if `upto` is less.

        Returns:
            True if the memory is reserved. False, with nothing changed, if there is no room.
        """
        return True

    def commit(self, request: Request, upto: int) -> None:
        """Record that a request's first `upto` tokens are computed: other requests may share them now."""
        return None

    def release(self, request: Request) -> None:
        """Free all cache memory of `request`."""
        return None

    def check(self) -> None:
        """Raise `AssertionError` if the counts of used memory contradict each other."""
        return None


class RowCache(CacheManager):
    """A cache with room for the longest request in every row, so a request that has a row has room."""


class RowStore:
    """The KV cache in `R` rows, one a request: keys and values of every layer, `[R, KH, max_len, D]` each.

    Heads come before tokens, so that one head's keys are adjacent: attention over `keys[row, :, :context]`
    reads a view, and nothing is copied.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        max_len: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config.check_keys_only()
        shape = (config.num_layers, 2, rows, config.num_kv_heads, max_len, config.head_dim)
        # Zeros, not garbage: a masked key's weight is exactly 0, and 0 times a stray NaN is NaN.
        self.data = torch.zeros(shape, device=device, dtype=dtype)  # [L, 2, R, KH, max_len, D]
        self.layers = [layer.unbind() for layer in self.data]

"""The cache as the scheduler sees it, and the simplest one: a row a request."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from common.models.config import ModelConfig
from common.request import Request


class CacheManager(Protocol):
    """The host's side of a cache: which requests have room. It moves no data and never waits for the device.

    The scheduler keeps to an order. Admission: `fits`, `lookup`, then a row and the first `reserve`, which
    must not refuse what `fits` has just allowed; the caller of `lookup` sets `num_computed_tokens` to what it
    says. Then, once a step, `reserve` before any token is scheduled, and `commit` when the step has ended
    well. At last `release`, once, and after it the row is taken away.

    By itself there is room for all, and nothing is shared.
    """

    def holds(self, tokens: int) -> bool:
        """Return True if a request could keep this many tokens if it had the cache for itself."""

    def fits(self, request: Request) -> bool:
        """Return True if there is room now to admit `request` with all the tokens it has."""
        return True

    def lookup(self, request: Request) -> int:
        """Return how many of the request's first tokens are cached, at most all but one. Changes nothing."""
        return 0

    def reserve(self, request: Request, upto: int) -> bool:
        """Make room for the request's first `upto` tokens and attach those that `lookup` found.

        What was reserved before stays, also if `upto` is less. Returns False, and changes nothing, if there
        is no room.
        """
        return True

    def commit(self, request: Request, upto: int) -> None:
        """The request's first `upto` tokens are known and computed: others may share them from now on."""
        return None

    def release(self, request: Request) -> None:
        """Give back all that `request` holds."""
        return None

    def check(self) -> None:
        """Raise `AssertionError` if the books do not balance."""
        return None


class RowCache(CacheManager):
    """Room for the longest request in every row, so a request that has a row has room."""

    def holds(self, tokens: int) -> bool:
        """Always: no request is longer than a row. See `CacheManager`."""
        return True


class RowStore:
    """The tensors: keys and values of every layer, `[R, KH, max_len, D]` each.

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
        shape = (config.num_layers, 2, rows, config.num_kv_heads, max_len, config.head_dim)
        # Zeros, not garbage: a masked key's weight is exactly 0, and 0 times a stray NaN is NaN.
        self.data = torch.zeros(shape, device=device, dtype=dtype)  # [L, 2, R, KH, max_len, D]
        self.layers: list[tuple[Tensor, Tensor]] = [
            (layer[0], layer[1]) for layer in self.data
        ]

    @staticmethod
    def bytes_needed(config: ModelConfig, rows: int, max_len: int, dtype: torch.dtype) -> int:
        """Bytes that such a store takes."""
        return rows * max_len * config.kv_bytes_per_token(dtype)

"""Phase 01's loop with a KV cache: each token is computed once."""

from __future__ import annotations

import torch
from torch import Tensor

from forward.generator import Generator
from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache


class CachedGenerator(Generator):
    """Serves one request after another. A request's first step is its prefill, every later one a decode.

    cache, attention: those of the running request.
    """

    cache: KVCache
    attention: CachedAttention

    def begin(self, prompt_len: int, limit: int) -> None:
        """Allocate the cache of a request of ``prompt_len`` tokens that generates at most ``limit``.

        The last generated token is never computed, so it needs no column (position) in the cache.
        """
        self.cache = KVCache(
            self.model.config,
            batch=1,
            max_len=prompt_len + limit - 1,
            device=self.model.device,
            dtype=self.model.dtype,
        )
        self.attention = CachedAttention(self.cache)

    def last_hidden(self, tokens: list[int]) -> Tensor:
        """Compute the tokens that are not in the cache yet; return the last hidden state ``[1, hidden]``."""
        start, device = self.cache.length, self.model.device
        ids = torch.tensor([tokens[start:]], device=device)  # [1, S]
        positions = torch.arange(start, len(tokens), device=device).unsqueeze(0)  # [1, S]
        self.attention.begin(ids.shape[1])
        hidden: Tensor = self.model(ids, positions, self.attention)  # [1, S, hidden]
        self.cache.advance(ids.shape[1])
        return hidden[:, -1]

"""Layers whose output is a sum over ranks."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.ranks import Ranks


class VocabularyEmbedding(nn.Embedding):
    """A rank's part of an embedding: `room` rows, of which `count` are the tokens from `first` on."""

    def __init__(self, room: int, hidden: int, first: int, count: int, ranks: Ranks) -> None:
        super().__init__(room, hidden)
        self.first = first
        self.count = count
        self.ranks = ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[...]` -> `[..., hidden]`: a token's row, and zeros from all ranks that do not have it."""
        own = input_ids - self.first
        here = (own >= 0) & (own < self.count)
        found = F.embedding(own.masked_fill(~here, 0), self.weight)
        return self.ranks.all_reduce(found.masked_fill(~here.unsqueeze(-1), 0))


class RowLinear(nn.Module):
    """A linear layer of which each rank has some inputs: their products add up to its output."""

    def __init__(self, linear: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.linear, self.ranks = linear, ranks

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in / ranks]` -> `[..., out]`, the same on every rank."""
        return self.ranks.all_reduce(self.linear(x))

    def joined(self, *parts: nn.Module) -> nn.Module:
        """Keep phase 06's ways, and add up what they compute; see its `join`."""
        from triton_paged_attention.linear import join  # Triton comes with it

        fused = join(self.linear)
        fused.total = partial(add_up, self.ranks)
        return fused


def add_up(ranks: Ranks, part: Tensor, residual: Tensor | None) -> Tensor:
    """Return the sum of all ranks' parts of a product, and of a residual once: `[..., out]`."""
    return ranks.all_reduce(part) if residual is None else ranks.reduce_add(part, residual)

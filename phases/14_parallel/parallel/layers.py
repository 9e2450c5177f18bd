"""Layers whose output is a sum over ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.ranks import Ranks


class VocabularyEmbedding(nn.Embedding):
    """A rank's part of an embedding: `room` rows, of which `count` are the tokens from `first` on."""

    def __init__(self, room: int, hidden: int, first: int, count: int, ranks: Ranks) -> None:
        super().__init__(room, hidden)
        self.first, self.count, self.ranks = first, count, ranks

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
        fused.total = RankSum(self.ranks)
        return fused


class RankSum:
    """Adds up the parts of a product over ranks, and a residual once, to the sum.

    deferred: the norm behind it adds up what it returns. With a residual it always adds up by itself.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.deferred = ranks, False

    def __call__(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """`[..., out]` of this rank -> `[..., out]` of all."""
        if residual is not None:
            return self.ranks.reduce_add(part, residual)
        return part if self.deferred else self.ranks.all_reduce(part)

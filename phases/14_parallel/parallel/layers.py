"""Layers whose output is a sum over ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.ranks import Ranks


class VocabularyEmbedding(nn.Embedding):
    """A rank's part of an embedding: `room` rows of `hidden`, `count` of them for the token ids from `first`
    on.

    ranks: over which embeddings are summed.
    """

    def __init__(self, room: int, hidden: int, first: int, count: int, ranks: Ranks) -> None:
        super().__init__(room, hidden)
        self.first = first
        self.count = count
        self.ranks = ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[..., hidden]` of token ids `[...]`: the sum over ranks, one of which
        has the row.
        """
        own = input_ids - self.first
        here = (own >= 0) & (own < self.count)
        found = F.embedding(own.masked_fill(~here, 0), self.weight)
        return self.ranks.all_reduce(found.masked_fill(~here.unsqueeze(-1), 0))


class RowLinear(nn.Module):
    """A linear layer of which each rank has some inputs; the sum over ranks is its output.

    linear: this rank's part.
    """

    def __init__(self, linear: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.linear, self.ranks = linear, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return the output `[..., out]`, equal on every rank, of this rank's inputs `x [..., in /
        ranks]`.
        """
        return self.ranks.all_reduce(self.linear(x))

    def joined(self, *parts: nn.Module) -> nn.Module:
        """Return this layer as phase 06's fused layer, whose product is summed over ranks; `parts` are not
        used.
        """
        from triton_paged_attention.linear import join  # Triton comes with it

        fused = join(self.linear)
        fused.total = self.ranks.all_reduce
        return fused

"""Layers whose output is a sum over ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parallel.ranks import Ranks


class VocabularyEmbedding(nn.Embedding):
    """A rank's part of an embedding: `room` rows of `hidden` numbers, for `count` token ids from `first` on.

    Rows after the first `count` are padding. ranks: the process group over which embeddings are summed.
    """

    def __init__(self, room: int, hidden: int, first: int, count: int, ranks: Ranks) -> None:
        super().__init__(room, hidden)
        self.first = first
        self.count = count
        self.ranks = ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[..., hidden]` of token ids `[...]`, equal on every rank.

        They are a sum over ranks: one rank has a token's row, the others add zeros.
        """
        own = input_ids - self.first
        here = (own >= 0) & (own < self.count)
        found = F.embedding(own.masked_fill(~here, 0), self.weight)
        return self.ranks.all_reduce(found.masked_fill(~here.unsqueeze(-1), 0))


class RowLinear(nn.Module):
    """A linear layer cut along its inputs: the products of all ranks' parts are summed.

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
        """Return this layer as a `FusedLinear` (Triton kernels around a matrix product), summed over ranks.

        parts: layers that read the same input; not used: a layer whose output is summed is not joined.
        """
        from triton_paged_attention.linear import join  # Triton comes with it

        fused = join(self.linear)
        fused.total = self.ranks.all_reduce
        return fused

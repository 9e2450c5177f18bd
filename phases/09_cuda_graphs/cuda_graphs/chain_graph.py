"""Several decode steps in one graph: what a draft model does while nobody looks at its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.sampler import Feature
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import DecodeGraph, Machine


class ChainGraph(DecodeGraph):
    """`count` steps of `size` requests, each on the tokens of the one before.

    A model that reads what it made in the step before, beside the tokens, has `feed`, which is given the
    hidden states of each step.

    chained: `[size, count]` int64; good until the next replay.
    """

    chained: Tensor

    def __init__(
        self, machine: Machine, size: int, count: int, inputs: Tensor, features: Feature, capturer: Capturer
    ) -> None:
        self.count = count
        super().__init__(machine, size, inputs, features, capturer)

    def compute(self) -> None:
        """The steps; what is captured."""
        feed = getattr(self.machine.model, "feed", None)
        tokens = []
        for _ in range(self.count):
            super().compute()
            tokens.append(self.tokens)
            if feed is not None:
                feed(self.hidden)
            self.at.copy_(torch.where(self.at < 0, self.at, self.at + 1))  # padding stays padding
            self.steps.add_(1)
        self.chained = torch.stack(tokens, dim=1)

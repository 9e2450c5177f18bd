"""The sampler of every phase with its choice made by kernels."""

from __future__ import annotations

from torch import Tensor

from common.sampling.rows import TRUNCATION, Feature
from common.sampling.sampler import Plan, Sampler
from triton_paged_attention.kernels.sampling import argmax_rows, draw_rows, reported_rows


class TritonSampler(Sampler):
    """The tokens of `Sampler`. What top-k, top-p and min-p keep is found by torch."""

    def choose(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """See `Sampler.choose`; without truncation `logits` may have the model's own dtype."""
        if not plan.draws:
            return argmax_rows(logits)
        if plan.features & TRUNCATION:
            return super().choose(logits, rows, steps, plan)
        return draw_rows(logits, rows, steps, self.floats, self.ints)

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """See `Sampler.report`."""
        return reported_rows(logits, tokens)

    def draw(self, logits: Tensor, rows: Tensor, steps: Tensor, features: Feature) -> Tensor:
        """See `Sampler.draw`: no noise `[B, V]`, only logits at minus infinity where tokens are excluded."""
        if features & TRUNCATION:
            logits = logits.masked_fill(self.weigh(logits, rows, features) == 0, float("-inf"))
        return draw_rows(logits, rows, steps, self.floats, self.ints)

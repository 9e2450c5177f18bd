"""The choice of tokens by kernels."""

from __future__ import annotations

from torch import Tensor

from common.sampling.rows import TRUNCATION, Needs
from common.sampling.sampler import Chooser, Masks, Plan, Sampler
from triton_paged_attention.kernels.sampling import argmax_rows, draw_rows, reported_rows


class TritonChooser(Chooser):
    """The tokens of `Chooser`. What top-k, top-p and min-p keep is found by torch."""

    def choose(
        self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan, allowed: Masks
    ) -> Tensor:
        """See `Chooser.choose`; without truncation `logits` may have the model's own dtype."""
        if not plan.draws:
            return argmax_rows(logits)
        if plan.features & TRUNCATION:
            return super().choose(sampler, logits, rows, steps, plan, allowed)
        return draw_rows(logits, rows, steps, sampler.floats, sampler.ints)

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """See `Chooser.report`."""
        return reported_rows(logits, tokens)

    def draw(self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, features: Needs) -> Tensor:
        """See `Chooser.draw`: no noise `[B, V]`, only logits at minus infinity where tokens are excluded."""
        if features & TRUNCATION:
            logits = logits.masked_fill(sampler.weigh(logits, rows, features) == 0, float("-inf"))
        return draw_rows(logits, rows, steps, sampler.floats, sampler.ints)

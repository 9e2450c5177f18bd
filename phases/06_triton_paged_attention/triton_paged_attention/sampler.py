"""The sampler of every phase with its choice made by kernels."""

from __future__ import annotations

from torch import Tensor

from common.sampling.rows import TRUNCATION
from common.sampling.sampler import Plan, Sampler
from triton_paged_attention.kernels.sampling import argmax_rows, draw_rows


class TritonSampler(Sampler):
    """The same tokens as `Sampler`. Batches with top-k or top-p are left to torch."""

    def choose(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """See `Sampler.choose`; here `logits` may have the model's own dtype."""
        if not plan.draws:
            return argmax_rows(logits)
        if plan.features & TRUNCATION:
            return super().choose(logits, rows, steps, plan)
        return draw_rows(logits, rows, steps, self.floats, self.ints)

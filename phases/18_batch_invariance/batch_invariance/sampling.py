"""Sampling of tokens by kernels whose bits do not depend on the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from common.sampling.sampler import Sampler
from cuda_graphs.sampling import TritonSamplerBackend

LEAST_ROWS = 5
"""From this number of rows on, the kernels cut a row of logits into parts of one size."""


def padded(x: Tensor) -> Tensor:
    """Return `x [B, ...]` with its last row repeated until there are `LEAST_ROWS` rows; empty `x` stays."""
    missing = max(LEAST_ROWS - len(x), 0)
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing and len(x) else x


class FixedSamplerBackend(TritonSamplerBackend):
    """`TritonSamplerBackend` (sampling by Triton kernels) that pads the logits to `LEAST_ROWS` rows or more.

    The kernels split each row of logits into parts, and with fewer rows these have another size. A token's
    weight is rounded relative to its part's largest logit, so two nearly equal tokens could be swapped.
    """

    def choose(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        masked: bool,
    ) -> Tensor:
        """Return the sampled tokens `[S]` int64 of `logits [S, V]`, padded unless all rows are greedy.

        sampler: has the requests' settings in rows. rows, steps: `[S]` int64, each request's row there, and
            its number of tokens generated before. plan: what is drawn. masked: True if grammars have
            excluded tokens.
        """
        if plan.draws:
            given = padded(logits), padded(rows), padded(steps)
            return super().choose(sampler, *given, plan, masked)[: len(rows)]
        return super().choose(sampler, logits, rows, steps, plan, masked)

    def draw(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        features: SamplingFlags,
    ) -> Tensor:
        """Return tokens `[S]` int64 drawn from `logits [S, V]`, which are padded to `LEAST_ROWS` rows.

        sampler: has the requests' settings in rows. rows, steps: `[S]` int64, each request's row there, and
            its number of tokens generated before. features: what rows need.
        """
        given = padded(logits), padded(rows), padded(steps)
        return super().draw(sampler, *given, features)[: len(rows)]

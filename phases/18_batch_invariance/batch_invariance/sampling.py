"""The choice of tokens by kernels that do not ask how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from common.sampling.sampler import Sampler
from cuda_graphs.sampling import TritonSamplerBackend

LEAST_ROWS = 5
"""From this number of rows on, the kernels cut a row of logits into parts of one size."""


def padded(x: Tensor) -> Tensor:
    """Return `x [B, ...]` with its last row repeated until there are `LEAST_ROWS` rows."""
    missing = max(LEAST_ROWS - len(x), 0)
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing and len(x) else x


class FixedSamplerBackend(TritonSamplerBackend):
    """`TritonSamplerBackend` that pads the logits to at least `LEAST_ROWS` rows.

    A token's weight is rounded relative to the largest logit of its part of the row, and fewer rows would
    have other parts. With parts of another size two tokens that are all but equal could be swapped.
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
        """See `SamplerBackend.choose`: the rows are padded, and the padding's tokens dropped."""
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
        """See `SamplerBackend.draw`: the rows are padded, and the padding's tokens dropped."""
        given = padded(logits), padded(rows), padded(steps)
        return super().draw(sampler, *given, features)[: len(rows)]

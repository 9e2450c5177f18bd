"""Sampling over ranks by phase 09's kernels, which choose the best token of each chunk of the vocabulary.

The last kernel reduces the chunks of all ranks as if they were those of one GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from common.sampling.sampler import Sampler
from cuda_graphs.sampling import BestTokens, DrawSettings, best_of_chunks, best_of_rows
from parallel.sampler import RankSamplerBackend


class TritonRankSamplerBackend(RankSamplerBackend):
    """A sampler backend over ranks in Triton.

    It reads the logits once, in the model's dtype. For each chunk of the vocabulary, the ranks exchange only
    its best token: largest logit, token id, and where tokens are drawn the score that decided.
    """

    def reduce_argmax(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
    ) -> Tensor:
        """Return the sampled tokens `[B]` int64, equal on all ranks.

        logits: `[B, V / ranks]`, of this rank's part of the vocabulary. rows, steps: `[B]`, each request's
            row of settings in `sampler` and its number of output tokens. plan: the batch's sampling settings.
        """
        if self.own_tokens < self.room:  # as many chunks on every rank
            logits = logits.clone()
            logits[:, self.own_tokens :] = float("-inf")
        random = SamplingFlags.RANDOM in plan.features
        draw = DrawSettings(rows, steps, sampler.floats, sampler.ints) if random else None
        return best_of_rows(self._all(best_of_chunks(logits, draw, self.first_token)), draw)

    def _all(self, own: BestTokens) -> BestTokens:
        """Return the best tokens of all ranks' chunks, `[B, ranks * chunks]`, in the order of token ids.

        own: those of this rank's chunks, `[B, chunks]`.
        """
        ids = own.ids + self.first_token
        parts = [own.best.view(torch.int32), ids]
        if own.races is not None:
            parts.append(own.races.view(torch.int32))
        found = self.ranks.gather(torch.stack(parts))  # [ranks, parts, B, CHUNKS]
        whole = found.permute(1, 2, 0, 3).flatten(2).contiguous()  # [parts, B, ranks * CHUNKS]
        best, tokens, *races = whole.unbind(0)
        largest = best.view(torch.float32)
        self.best = largest.T
        return BestTokens(
            largest,
            races[0].view(torch.float32) if races else None,
            tokens,
        )

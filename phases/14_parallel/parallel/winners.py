"""`RanksChooser` by phase 09's kernels: the ranks' chunks of a row are as the chunks of one GPU's."""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.rows import Needs
from common.sampling.sampler import Plan, Sampler
from cuda_graphs.sampling import DrawSettings, Winners, best_of_chunks, best_of_rows
from parallel.sampler import RanksChooser


class KernelRanksChooser(RanksChooser):
    """Reads the logits once, in the model's own dtype, and exchanges a few numbers a chunk."""

    def winners(self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """See `RanksChooser.winners`."""
        if self.own_tokens < self.room:  # as many chunks on every rank
            logits = logits.clone()
            logits[:, self.own_tokens :] = float("-inf")
        random = Needs.RANDOM in plan.features
        draw = DrawSettings(rows, steps, sampler.floats, sampler.ints) if random else None
        return best_of_rows(self._all(best_of_chunks(logits, draw, self.first_token)), draw)

    def _all(self, own: Winners) -> Winners:
        """All ranks' chunks, in the order of their tokens."""
        ids = own.ids + self.first_token
        parts = [own.best.view(torch.int32), ids] + (
            [own.races.view(torch.int32)] if own.races is not None else []
        )
        found = self.ranks.gather(torch.stack(parts))  # [ranks, parts, B, CHUNKS]
        best, tokens, *races = found.permute(1, 2, 0, 3).flatten(2).unbind(0)  # each [B, ranks * CHUNKS]
        return Winners(
            best.contiguous().view(torch.float32),
            races[0].contiguous().view(torch.float32) if races else None,
            tokens.contiguous(),
        )

"""The choice of tokens where every rank has the logits of a part of the vocabulary.

The noise of a sampled token is a function of seed, step and token id, so each rank finds the winner of its
own tokens, and the winner of the winners is the token of one GPU. What looks at the whole row (top-k, top-p,
penalties, edits, masks, log-probabilities) has the logits gathered first, and then every rank does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling import ops
from common.sampling.rows import KEY, TRUNCATION, SamplingFlags
from common.sampling.sampler import Sampler, SamplerBackend, SamplingMetadata, TokenBitmask
from parallel.ranks import Ranks
from parallel.shard import Shard

WHOLE_ROW = SamplingFlags.EDITS | SamplingFlags.PENALTIES | TRUNCATION


def gathered(ranks: Ranks, logits: Tensor, vocab_size: int) -> Tensor:
    """All ranks' `logits [B, V / ranks]` as `[B, V]` float32."""
    whole = ranks.gather(logits).transpose(0, 1).flatten(1)  # [B, ranks * room]
    return whole[:, :vocab_size].float().contiguous()


class RankSamplerBackend(SamplerBackend):
    """Takes logits of this rank's tokens, `[B, V / ranks]`.

    Args:
        ranks: all of them.
        inner: chooses from whole rows, where a step needs them.
        vocab_size: of the whole model.
    """

    def __init__(self, ranks: Ranks, inner: SamplerBackend, vocab_size: int) -> None:
        self.ranks, self.inner = ranks, inner
        self.first_token, self.own_tokens, self.room = Shard(
            ranks.rank, ranks.size
        ).vocabulary(vocab_size)

    def whole(
        self, sampler: Sampler, logits: Tensor, plan: SamplingMetadata, masked: bool
    ) -> Tensor:
        """Gather the logits where something looks at whole rows."""
        if not masked and plan.wanted is None and not plan.features & WHOLE_ROW:
            return logits
        return gathered(self.ranks, logits, sampler.vocab_size)

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: TokenBitmask) -> None:
        """See `SamplerBackend.forbid`."""
        self.inner.forbid(sampler, logits, allowed)

    def choose(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
        masked: bool,
    ) -> Tensor:
        """See `SamplerBackend.choose`. Masks are rank 0's alone, and with masks so is the choice."""
        if logits.shape[1] == self.room:
            return self.reduce_argmax(sampler, logits, rows, steps, plan)
        tokens = self.inner.choose(sampler, logits, rows, steps, plan, masked)
        return self.ranks.first(tokens) if masked else tokens

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        """See `SamplerBackend.report`; nothing is known of a part."""
        return None if logits.shape[1] == self.room else self.inner.report(logits, tokens)

    def reduce_argmax(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
    ) -> Tensor:
        """Choose from the logits of all ranks, of which each gives its best."""
        own = logits[:, : self.own_tokens].float()
        if not own.shape[1]:  # more ranks than this vocabulary fills
            own = logits[:, :1].float().fill_(float("-inf"))
        values, at = own.max(1)  # of equals the first, and NaN is the largest
        if SamplingFlags.RANDOM in plan.features:
            largest = self.ranks.gather(values).amax(0)  # [B]
            for places, features in plan.draws:
                if SamplingFlags.RANDOM in features:
                    best = self._race(
                        sampler, own[places], rows[places], steps[places], largest[places]
                    )
                    values[places], at[places] = best
        return self._best(values, at + self.first_token)

    def _race(
        self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, largest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw among this rank's tokens; `largest [B]` are the largest logits of all ranks."""
        weights = sampler.weights(logits, largest[:, None], rows)
        ids = sampler.ids[self.first_token : self.first_token + logits.shape[1]]
        noise = ops.negative_exponentials(sampler.ints[rows, KEY], steps, ids)
        best = noise.div_(weights).max(1)
        return best.values, best.indices

    def _best(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return the token of the largest value of all ranks, `[B]` int64; of equals the first rank's."""
        pairs = torch.stack([values.view(torch.int32), tokens.int()], dim=1)  # [B, 2]
        found = self.ranks.gather(pairs)  # [ranks, B, 2]
        winner = found[..., 0].contiguous().view(torch.float32).max(0).indices  # [B]
        return found[..., 1].gather(0, winner[None])[0].long()

"""The choice of tokens where every rank has the logits of a part of the vocabulary.

The noise of a sampled token is a function of seed, step and token id, so each rank finds the winner of its
own tokens, and the winner of the winners is the token of one GPU. What looks at the whole row (top-k, top-p,
penalties, edits, masks, log-probabilities) has the logits gathered first, and then every rank does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from common.request import Request
from common.sampling import ops
from common.sampling.rows import KEY, TRUNCATION, Feature
from common.sampling.sampler import Allowed, Plan, Sampled, Sampler
from continuous.prompt_logprobs import PromptPart, PromptReader
from parallel.ranks import Ranks
from parallel.shard import Shard

WHOLE_ROW = Feature.EDITS | Feature.PENALTIES | TRUNCATION


def gathered(ranks: Ranks, logits: Tensor, vocab_size: int) -> Tensor:
    """All ranks' `logits [B, V / ranks]` as `[B, V]` float32."""
    whole = ranks.gather(logits).transpose(0, 1).flatten(1)  # [B, ranks * room]
    return whole[:, :vocab_size].float().contiguous()


class RanksPrompts(PromptReader):
    """A `PromptReader` of logits in parts."""

    def __init__(self, ranks: Ranks, vocab_size: int) -> None:
        super().__init__()
        self.ranks, self.vocab_size = ranks, vocab_size

    def _part(self, request: Request, first: int, logits: Tensor) -> PromptPart:
        return super()._part(request, first, gathered(self.ranks, logits, self.vocab_size))


class RanksSampler(Sampler):
    """Put before another sampler's class; takes logits of this rank's tokens, `[B, V / ranks]`.

    gathered: batches whose logits were gathered.
    """

    ranks: ClassVar[Ranks]

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, **options: int) -> None:
        super().__init__(rows, vocab_size, device, **options)
        shard = Shard(self.ranks.rank, self.ranks.size)
        self.first_token, self.own_tokens, self.room = shard.vocabulary(vocab_size)
        self.gathered = 0
        self._told = False

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_host: Sequence[int],
        steps: Tensor,
        plan: Plan | None = None,
        allowed: Tensor | Allowed | None = None,
        drafts: Tensor | None = None,
    ) -> Sampled:
        """See `Sampler.sample`. Masks are rank 0's alone, and with masks so is the choice."""
        if plan is None:
            plan = self.plan(rows_host)
        if allowed is None and plan.wanted is None and not plan.features & WHOLE_ROW:
            return Sampled(self.winners(logits, rows, steps, plan))
        self.gathered += 1
        whole = gathered(self.ranks, logits, self.vocab_size)
        self._told = allowed is not None
        return super().sample(whole, rows, rows_host, steps, plan, allowed, drafts)

    def choose(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """See `Sampler.choose`."""
        tokens = super().choose(logits, rows, steps, plan)
        return self.ranks.first(tokens) if self._told else tokens

    def winners(self, logits: Tensor, rows: Tensor, steps: Tensor, plan: Plan) -> Tensor:
        """`choose` from the logits of all ranks, of which each gives its best."""
        own = logits[:, : self.own_tokens].float()
        if not own.shape[1]:  # more ranks than this vocabulary fills
            own = logits[:, :1].float().fill_(float("-inf"))
        values, at = own.max(1)  # of equals the first, and NaN is the largest
        if Feature.RANDOM in plan.features:
            largest = self.ranks.gather(values).amax(0)  # [B]
            for places, features in plan.draws:
                if Feature.RANDOM in features:
                    best = self._race(own[places], rows[places], steps[places], largest[places])
                    values[places], at[places] = best
        return self._best(values, at + self.first_token)

    def _race(self, logits: Tensor, rows: Tensor, steps: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """`Sampler.draw` among this rank's tokens; `largest [B]` are the largest logits of all ranks."""
        weights = self.weights(logits, largest[:, None], rows)
        ids = self.ids[self.first_token : self.first_token + logits.shape[1]]
        noise = ops.negative_exponentials(self.ints[rows, KEY], steps, ids)
        best = noise.div_(weights).max(1)
        return best.values, best.indices

    def _best(self, values: Tensor, tokens: Tensor) -> Tensor:
        """The token of the largest value of all ranks; of equals that of the first rank. `[B]` int64."""
        pairs = torch.stack([values.view(torch.int32), tokens.int()], dim=1)  # [B, 2]
        found = self.ranks.gather(pairs)  # [ranks, B, 2]
        winner = found[..., 0].contiguous().view(torch.float32).max(0).indices  # [B]
        return found[..., 1].gather(0, winner[None])[0].long()


def over(ranks: Ranks, sampler: type[Sampler], *, kernels: bool) -> type[Sampler]:
    """A sampler's class over ranks; its choice is by kernels where the sampler's is."""
    kind = RanksSampler
    if kernels:
        from parallel.winners import KernelRanksSampler  # Triton comes with it

        kind = KernelRanksSampler
    return type(f"Ranks{sampler.__name__}", (kind, sampler), {"ranks": ranks})

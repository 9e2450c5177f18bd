"""Sampling where every rank has the logits of a part of the vocabulary.

The noise of a sampled token is a function of seed, step and token id. So each rank finds the best of its own
tokens, and the best of these is the token that one GPU would sample. Settings that depend on all logits of a
request (top-k, top-p, penalties, edits, masks, log-probabilities) have them gathered first; then all ranks
compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.metadata import TRUNCATION, SamplingFlags, SamplingMetadata
from common.sampling.noise import negative_exponentials
from common.sampling.ops import NAN_TOKEN
from common.sampling.rows import KEY
from common.sampling.sampler import Sampler, SamplerBackend, TokenBitmask
from parallel.ranks import Ranks
from parallel.shard import Shard

WHOLE_ROW = SamplingFlags.EDITS | SamplingFlags.PENALTIES | TRUNCATION


def gathered(ranks: Ranks, logits: Tensor, vocab_size: int) -> Tensor:
    """Return the logits of the whole vocabulary, `[B, vocab_size]` float32, equal on all ranks.

    logits: `[B, V / ranks]`, this rank's part.
    """
    whole = ranks.gather(logits).transpose(0, 1).flatten(1)  # [B, ranks * room]
    return whole[:, :vocab_size].float().contiguous()


class RankSamplerBackend(SamplerBackend):
    """A sampler backend for ranks that each have the logits of a part of the vocabulary, `[B, V / ranks]`.

    ranks: this rank in its process group. vocab_size: of the whole model.
    inner: the backend that chooses from gathered logits `[B, V]`, where a step needs them.
    best: `[parts, B]` float32, the largest values that the last `reduce_argmax` found in each part of the
        vocabulary, NaN in a part that has one. Every `reduce_argmax` keeps them here, where `report` looks.
    """

    best: Tensor

    def __init__(self, ranks: Ranks, inner: SamplerBackend, vocab_size: int) -> None:
        self.ranks, self.inner = ranks, inner
        self.first_token, self.own_tokens, self.room = Shard(
            ranks.rank, ranks.size
        ).vocabulary(vocab_size)

    def whole(
        self, sampler: Sampler, logits: Tensor, plan: SamplingMetadata, masked: bool
    ) -> Tensor:
        """Return the logits of the whole vocabulary, `[B, V]`, if the step needs them; else `logits` itself.

        plan: the sampling settings of the batch, of which some need all logits, as do masks.
        masked: whether grammars mask the step's tokens.
        """
        if not masked and plan.wanted is None and not plan.features & WHOLE_ROW:
            return logits
        return gathered(self.ranks, logits, sampler.vocab_size)

    def forbid(self, sampler: Sampler, logits: Tensor, allowed: TokenBitmask) -> None:
        """Set the logits of tokens that are not `allowed` to -inf, in place; only rank 0 has masks."""
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
        """Return the sampled tokens `[B]` int64, equal on all ranks.

        logits: `[B, V / ranks]`, of this rank's part of the vocabulary, or `[B, V]`, as `whole` has returned
            them.
        rows, steps: `[B]`, each request's row of settings in `sampler` and its number of output tokens.
        plan: the sampling settings of the batch.
        masked: grammars mask the logits; rank 0 alone has the masks, so it chooses and broadcasts.
        """
        if logits.shape[1] == self.room:
            return self.reduce_argmax(sampler, logits, rows, steps, plan)
        tokens = self.inner.choose(sampler, logits, rows, steps, plan, masked)
        return self.ranks.first(tokens) if masked else tokens

    def report(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return `tokens [B]`, with `NAN_TOKEN` in place of those whose logit in `logits [B, V]` is NaN.

        If `logits` are only a rank's part of the vocabulary, what `choose` gathered before says which.
        """
        if logits.shape[1] != self.room:
            return self.inner.report(logits, tokens)
        return tokens.masked_fill(self.best.isnan().any(0), NAN_TOKEN)

    def reduce_argmax(
        self,
        sampler: Sampler,
        logits: Tensor,
        rows: Tensor,
        steps: Tensor,
        plan: SamplingMetadata,
    ) -> Tensor:
        """Return the sampled tokens `[B]` int64: the best of all ranks' tokens, equal on all ranks.

        logits: `[B, V / ranks]`, of this rank's tokens. rows, steps: `[B]`, each request's row of settings
            in `sampler` and its number of output tokens. plan: the sampling settings of the batch.
        """
        own = logits[:, : self.own_tokens].float()
        if not own.shape[1]:  # more ranks than this vocabulary fills
            own = logits[:, :1].float().fill_(float("-inf"))
        values, at = own.max(1)  # of equals the first, and NaN is the largest
        if SamplingFlags.RANDOM in plan.features:
            largest = self.ranks.gather(values).amax(0)  # [B]
            for entries, features in plan.draws:
                if SamplingFlags.RANDOM in features:
                    best = self._race(
                        sampler, own[entries], rows[entries], steps[entries], largest[entries]
                    )
                    values[entries], at[entries] = best
        return self._best(values, at + self.first_token)

    def _race(
        self, sampler: Sampler, logits: Tensor, rows: Tensor, steps: Tensor, largest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the largest score of this rank's tokens, and its index among them, `[B]` each.

        A score is -E / weight: E is exponential noise, and the weight is the token's probability, not
        normalized. The token of the largest score is then a sample of these probabilities.

        logits: `[B, V / ranks]`. rows, steps: `[B]`, each request's row of settings in `sampler`, such as its
            seed, and its number of output tokens; the noise depends on both. largest: `[B]`, the largest
            logits of all ranks, to which weights are relative.
        """
        weights = sampler.weights(logits, largest[:, None], rows)
        ids = sampler.ids[self.first_token : self.first_token + logits.shape[1]]
        noise = negative_exponentials(sampler.ints[rows, KEY], steps, ids)
        best = noise.div_(weights).max(1)
        return best.values, best.indices

    def _best(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return the token ids `[B]` int64 of all ranks' largest values; of equal values the first rank's.

        values, tokens: `[B]`, this rank's best values, and their token ids.
        """
        pairs = torch.stack([values.view(torch.int32), tokens.int()], dim=1)  # [B, 2]
        found = self.ranks.gather(pairs)  # [ranks, B, 2]
        self.best = found[..., 0].contiguous().view(torch.float32)  # [ranks, B]
        winner = self.best.max(0).indices  # [B]
        return found[..., 1].gather(0, winner[None])[0].long()

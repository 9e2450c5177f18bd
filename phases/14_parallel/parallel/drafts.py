"""Speculation over ranks: rank 0 alone guesses, with a drafter that is whole.

What a trained drafter reads is there: hidden states are the same on every rank once they are added up. What
it borrows is not: of the embedding and the output head every rank has a part, so they are gathered once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor, nn

from common.models.config import ModelConfig
from forward.model import Model
from paged_cache import Parts
from parallel.ranks import Ranks
from speculative import Speculate
from speculative.head import head_weight
from speculative.ngram import NGrams
from speculative.speculation import Source


@dataclass(frozen=True)
class SplitSpeculate(Speculate):
    """`Speculate` inside a rank's own engine. config: the configuration of the whole model."""

    whole: ClassVar[bool] = False

    ranks: Ranks | None = None
    config: ModelConfig | None = None

    @classmethod
    def of(cls, options: Speculate, ranks: Ranks, config: ModelConfig) -> SplitSpeculate:
        """The same drafter. It guesses on the host: in a graph it would be in every rank's."""
        given = {field.name: getattr(options, field.name) for field in fields(Speculate)}
        return cls(**given, ranks=ranks, config=config)

    def source(self, parts: Parts) -> Source:
        """See `Speculate.source`; on other ranks one that nobody asks."""
        assert self.ranks is not None and self.config is not None
        if self.drafter != "head":
            return super().source(parts) if self.ranks.rank == 0 or self.drafter == "synthetic" else NGrams()
        seen = copy.copy(parts)
        seen.model = view(parts.own_model(), self.ranks, self.config)
        found = super().source(seen)
        # Layers that are watched add up by themselves, on all ranks alike: the hooks stay, the drafter goes.
        return found if self.ranks.rank == 0 else NGrams()


def view(model: Model, ranks: Ranks, whole: ModelConfig) -> Model:
    """The model for who looks at its vocabulary and its sizes; the layers are still this rank's part."""
    seen: Any = copy.copy(model)
    seen._modules = dict(model._modules)  # or the model itself would change
    seen.config = whole
    seen.embed_tokens = embedding = nn.Embedding(0, 0)
    embedding.weight = nn.Parameter(gathered(model.get_parameter("embed_tokens.weight"), ranks, whole), False)
    if not whole.tie_word_embeddings:
        seen.lm_head = head = nn.Linear(0, 0, bias=False)
        head.weight = nn.Parameter(gathered(head_weight(model), ranks, whole), False)
    found: Model = seen
    return found


def gathered(part: Tensor, ranks: Ranks, whole: ModelConfig) -> Tensor:
    """All ranks' rows of a vocabulary, `[V, hidden]`."""
    return ranks.gather(part.detach()).flatten(0, 1)[: whole.vocab_size]

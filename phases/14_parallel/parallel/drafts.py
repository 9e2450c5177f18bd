"""Speculation over ranks: rank 0 alone guesses, and the others are told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from paged_cache import Parts
from speculative import Speculate
from speculative.ngram import NGrams
from speculative.speculation import Source


@dataclass(frozen=True)
class SplitSpeculate(Speculate):
    """`Speculate` inside a rank's own engine."""

    whole: ClassVar[bool] = False

    rank: int = 0

    @classmethod
    def of(cls, options: Speculate, rank: int) -> SplitSpeculate:
        """The same drafter. It guesses on the host: in a graph it would be in every rank's."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(Speculate)}, rank=rank)

    def source(self, parts: Parts) -> Source:
        """See `Speculate.source`; on other ranks one that is never asked."""
        return super().source(parts) if self.rank == 0 or self.drafter == "synthetic" else NGrams()

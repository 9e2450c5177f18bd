"""Decisions about a batch, made on the host: which operations its requests need, and which rows."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor


class SamplingFlags(enum.IntFlag):
    """Operations that a request's settings need beyond the argmax, such as top-k or penalties."""

    RANDOM = enum.auto()  # a temperature above 0
    EDITS = enum.auto()  # logit_bias or min_tokens
    PENALTIES = enum.auto()
    MIN_P = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()


RADIX = SamplingFlags.TOP_K | SamplingFlags.TOP_P
"""Settings that need a selection by radix."""
TRUNCATION = RADIX | SamplingFlags.MIN_P
"""Settings that exclude tokens before the draw."""

Positions = slice | Tensor
"""Positions of rows in the batch: a slice if they are neighbours, else int64 on the device."""


Upload = Callable[[NDArray[Any]], Tensor]
"""Copies an array to the device, without waiting for the device's queued work."""


class Draw(NamedTuple):
    """Rows of a batch whose tokens are chosen together, by the same operations.

    positions: indices of the rows in the batch.
    features: operations that some of these rows need. Greedy rows, random ones, and those with top-k or
        top-p, which are much more work, are in different draws.
    """

    positions: Positions
    features: SamplingFlags


class Edits(NamedTuple):
    """Sparse additions to logits, `[N]` each: of a batch, on the device, or of one row, on the host.

    tokens: int64, token ids. values: float32, added. until: int64, the first step without the addition, where
        a request's step is its number of tokens generated before.
    positions: int64, rows of the batch; None: the edits are of one row.
    """

    tokens: Any
    values: Any
    until: Any
    positions: Any = None


@dataclass(frozen=True)
class SamplingMetadata:
    """The operations that sampling one batch needs, decided on the host; the sampler has no other branches.

    features: operations that some row of the batch needs.
    draws: groups of rows, together the whole batch, whose tokens are chosen group by group; empty when all
        rows are greedy.
    wanted: for each position in the batch how many top log-probabilities were asked for, -1 where no
        log-probabilities were; None when no row asked for any.
    edits: of the rows with `logit_bias` or `min_tokens`.
    penalties: positions of the rows with penalties, in groups that are processed one after another.
    """

    features: SamplingFlags
    draws: tuple[Draw, ...]
    wanted: tuple[int, ...] | None
    edits: Edits | None = None
    penalties: tuple[Positions, ...] = ()

    def for_any_rows(self) -> SamplingMetadata:
        """Return metadata with the same features that applies each of them to all rows of the batch.

        A CUDA graph captured with it is right for every batch that needs no other features, whichever rows
        need them. Only `edits` (numbers added to single logits) stay this batch's.
        """
        everywhere = slice(None)
        draws = (
            (Draw(everywhere, self.features),) if SamplingFlags.RANDOM in self.features else ()
        )
        return replace(
            self,
            draws=draws,
            penalties=(everywhere,) if SamplingFlags.PENALTIES in self.features else (),
        )

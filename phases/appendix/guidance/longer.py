"""Outputs that are to be longer than their grammars ask: `min_tokens`, and ends that are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from phases.appendix.guidance.matcher import Job
from structured.matcher import Words


@dataclass(frozen=True)
class Longer:
    """Which of a step's masks are to lose something. All of it is known before they are made.

    endless: masks of outputs that may not end yet.
    stops: masks of outputs that may not have a stop token yet, and the token.
    """

    endless: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, jobs: Sequence[Job], owners: Sequence[Request]) -> Longer:
        """Those of jobs, and whose they are."""
        endless: list[int] = []
        stops: list[tuple[int, int]] = []
        for job, request in zip(jobs, owners, strict=True):
            params = request.params
            if params.ignore_eos and not (params.min_tokens or job.drafts):
                endless.append(job.row)
            elif params.min_tokens or params.ignore_eos:
                length = len(request.tokens) - request.prompt_len
                for row in range(job.row, job.row + len(job.drafts) + 1):
                    length += 1  # the number of the output's token that this mask is for
                    short = length <= params.min_tokens
                    if short or params.ignore_eos:
                        endless.append(row)
                    if short:
                        stops += [(row, token) for token in params.stop_token_ids]
        return cls(np.array(endless, np.int64), np.array(stops, np.int64).reshape(-1, 2))

    def apply(self, words: Words, ends: NDArray[np.int64]) -> None:
        """Keep any of the tokens `ends` out of masks `[M, W]`, as far as grammars let outputs go on."""
        rows = self.endless
        may_end = (words[rows[:, None], ends >> 5] >> (ends & 31) & 1).any(axis=1)
        rows = rows[may_end]
        if len(rows) or len(self.stops):
            hold_back(
                words,
                np.concatenate([rows.repeat(len(ends)), self.stops[:, 0]]),
                np.concatenate([np.tile(ends, len(rows)), self.stops[:, 1]]),
            )


def hold_back(words: Words, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Take tokens out of masks `words [M, W]`, each out of its row, unless nothing else is left in that."""
    bits = (1 << (tokens & 31)).astype(np.uint32).view(np.int32)
    taken = words[rows, tokens >> 5] & bits
    np.bitwise_and.at(words, (rows, tokens >> 5), ~bits)
    touched = np.unique(rows)
    back = np.isin(rows, touched[~words[touched].any(axis=1)])
    np.bitwise_or.at(words, (rows[back], tokens[back] >> 5), taken[back])

"""Sparse additions to logits: the biases of a request, and the end tokens that `min_tokens` holds back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from common.sampling.metadata import Edits, Upload
from common.sampling.params import SamplingParams

_FOREVER = (1 << 63) - 1


def edits_of(
    params: SamplingParams, eos_ids: Collection[int], vocab_size: int
) -> Edits | None:
    """Return the `Edits` (additions to logits) of a request's bias and `min_tokens`; None: it has neither.

    eos_ids: the model's end-of-sequence tokens.
    """
    bias = params.logit_bias
    held_back = list[int]()
    if params.min_tokens > 0 and params.grammar is None:  # a grammar's mask sees to it
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        # An id that the vocabulary does not have cannot be chosen anyway.
        held_back = sorted(token for token in ids if token < vocab_size)
    if not bias and not held_back:
        return None
    return Edits(
        np.array([*bias.keys(), *held_back], dtype=np.int64),
        np.array([*bias.values(), *[float("-inf")] * len(held_back)], dtype=np.float32),
        np.array([_FOREVER] * len(bias) + [params.min_tokens] * len(held_back), np.int64),
    )


def edits_of_batch(
    edits: Mapping[int, Edits | None],
    rows: Sequence[int],
    upload: Upload,
) -> Edits:
    """Return the `Edits` (additions to logits) of all rows of a batch as one object, on the device.

    edits: by row of settings, None where there are none; at least one row of the batch has some.
    rows: the row of settings of the request at each position in the batch.
    upload: copies an array to the device.
    """
    own = [(place, some) for place, row in enumerate(rows) if (some := edits.get(row))]
    positions = np.concatenate([np.full(len(some.tokens), place) for place, some in own])
    columns = zip(*(some[:3] for _, some in own), strict=True)
    tokens, values, until = (upload(np.concatenate(column)) for column in columns)
    return Edits(tokens, values, until, upload(positions))

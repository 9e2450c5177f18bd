"""Are two engines' outputs the same? Greedy decoding in float32 is, but for ties.

The same sum in another batch shape rounds differently, by up to 1e-4 in a logit. Where the two best tokens
are closer than that, either is right, and what follows differs. So at the first difference the oracle is
asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from common.events import Completion
from forward.attention import RecomputeAttention
from forward.model import Model

TIE = 1e-3


@torch.inference_mode()
def margin(model: Model, tokens: Sequence[int]) -> float:
    """How far the best next token's logit is above the second best, computed from nothing."""
    ids = torch.tensor(list(tokens), device=model.device)
    hidden = model(ids, torch.arange(len(ids), device=model.device), RecomputeAttention())
    best = model.logits(hidden[-1]).topk(2).values
    return float(best[0] - best[1])


def assert_same(model: Model, expected: Completion, actual: Completion) -> None:
    """Raise `AssertionError` if the outputs differ other than by a tie; a tie is reported as a warning."""
    where = f"prompt {expected.index}, sample {expected.sample}"
    assert (expected.index, expected.sample) == (actual.index, actual.sample)
    assert expected.prompt_ids == actual.prompt_ids
    pairs = zip(expected.token_ids, actual.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        gap = margin(model, expected.prompt_ids + expected.token_ids[:at])
        message = (
            f"{where}: token {at} is {actual.token_ids[at]}, not {expected.token_ids[at]}; "
            f"the oracle's best two are {gap:.1e} apart"
        )
        assert gap < TIE, message
        warnings.warn(message, stacklevel=2)
        return
    assert expected.token_ids == actual.token_ids, f"{where}: one output is the beginning of the other"
    assert expected.finish_reason == actual.finish_reason, where


def assert_all_same(model: Model, expected: Sequence[Completion], actual: Sequence[Completion]) -> None:
    """`assert_same` for every completion."""
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert_same(model, one, other)

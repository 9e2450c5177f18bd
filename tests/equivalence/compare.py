"""Are two engines' outputs the same? Decoding in float32 is, but for ties.

The same sum in another batch shape rounds differently, by up to 1e-4 in a logit. Where the two best tokens
are closer than that, either is right, and what follows differs. So at the first difference the oracle is
asked. A sampled token is the best of perturbed logits, so it knows the same ties.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from common.events import Completion
from common.sampling import noise
from common.sampling.params import SamplingParams
from common.sampling.sampler import Sampler
from forward.attention import RecomputeAttention
from forward.model import Model

TIE = 1e-3


@torch.inference_mode()
def next_logits(model: Model, tokens: Sequence[int]) -> Tensor:
    """The logits `[V]` of the next token, computed from nothing."""
    ids = torch.tensor(list(tokens), device=model.device)
    hidden = model(ids, torch.arange(len(ids), device=model.device), RecomputeAttention())
    return model.logits(hidden[-1])


def margin(model: Model, tokens: Sequence[int]) -> float:
    """How far the best next token's logit is above the second best."""
    best = next_logits(model, tokens).topk(2).values
    return float(best[0] - best[1])


def perturbed(logits: Tensor, temperature: float, key: int, step: int) -> Tensor:
    """`logits [V]` / temperature + Gumbel noise, in float64: of these the sampler takes the largest.

    key: `common.sampling.noise.stream_key` of the request's seed. step: output tokens before this one.
    """
    ids = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    keys, steps = (torch.tensor([number], device=logits.device) for number in (key, step))
    exponential = -noise.negative_exponentials(keys, steps, ids)[0].double()
    return logits.double() / temperature - exponential.log()


@torch.inference_mode()
def sampled_margin(
    logits: Tensor,
    params: SamplingParams,
    seed: int | None,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: Sequence[int],
) -> float:
    """How far the token drawn from `logits [V]` with all of `params` is above any that rounding could draw.

    Besides the second best that is a token at the edge of what top-k, top-p and min-p keep: one that rounding
    could let in and that would win, or drop though it wins.

    seed: that of this completion, `params.seed_of(sample)`. output_ids: the output tokens before this one.
    """
    sampler, step = Sampler(1, len(logits), logits.device), len(output_ids)
    seed = sampler.set_row(0, params, prompt_ids, output_ids, seed=seed, eos_ids=eos_ids)
    rows, steps = (torch.tensor([number], device=logits.device) for number in (0, step))
    plan = sampler.plan([0])
    x = sampler._adjust(logits[None].float(), rows, steps, plan, None)
    kept = torch.ones_like(x[0], dtype=torch.bool)
    scores, unit = x[0].double(), 1.0
    if plan.draws:
        kept = sampler.weigh(x, rows, plan.features)[0] > 0
        unit = params.temperature
        scores = perturbed(x[0], unit, noise.stream_key(seed), step)
    values, ids = scores.masked_fill(~kept, -torch.inf).topk(2)
    first, gap = int(ids[0]), float(values[0] - values[1]) * unit
    if not bool(kept.all()):
        lowest, highest = float(x[0, kept].min()), float(x[0, ~kept].max())
        could_win = int(
            scores.masked_fill(~(kept | (x[0] > lowest - TIE)), -torch.inf).argmax()
        )
        if could_win != first or float(x[0, first]) < highest + TIE:
            gap = min(gap, lowest - highest)
    return gap


def assert_same(
    model: Model,
    expected: Completion,
    actual: Completion,
    params: SamplingParams | None = None,
) -> None:
    """Raise `AssertionError` if the outputs differ other than by a tie; a tie is reported as a warning.

    params: with which the tokens were sampled; None: greedily.
    """
    where = f"prompt {expected.index}, sample {expected.sample}"
    assert (expected.index, expected.sample) == (actual.index, actual.sample)
    assert expected.prompt_ids == actual.prompt_ids
    pairs = zip(expected.token_ids, actual.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        before = expected.token_ids[:at]
        if params is None:
            gap = margin(model, expected.prompt_ids + before)
        else:
            logits = next_logits(model, expected.prompt_ids + before)
            seed, eos = params.seed_of(expected.sample), model.config.eos_token_ids
            gap = sampled_margin(logits, params, seed, expected.prompt_ids, before, tuple(eos))
        message = (
            f"{where}: token {at} is {actual.token_ids[at]}, not {expected.token_ids[at]}; "
            f"the oracle's best two are {gap:.1e} apart"
        )
        assert gap < TIE, message
        warnings.warn(message, stacklevel=2)
        return
    assert expected.token_ids == actual.token_ids, (
        f"{where}: one output is the beginning of the other"
    )
    assert expected.finish_reason == actual.finish_reason, where


def assert_all_same(
    model: Model,
    expected: Sequence[Completion],
    actual: Sequence[Completion],
    params: Sequence[SamplingParams] | None = None,
) -> None:
    """`assert_same` for every completion; `params` are those of the prompts."""
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        assert_same(model, one, other, None if params is None else params[one.index])

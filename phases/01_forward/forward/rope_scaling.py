"""RoPE for a longer context than the model was trained on: slower frequencies for some pairs.

A pair that turns many times within the original context has seen every angle and is not changed. One that
turns less than once would come to angles that training has never shown, and is slowed.

Frequencies belong to the model and not to a request: a key in the cache must not depend on the tokens after
it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from common.models.config import ModelConfig, RopeConfig


def scaled(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Return `frequencies [D/2]`, in radians per token, with the scaling that `rope` describes."""
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def attention_scaling(config: ModelConfig, layer: int) -> float:
    """Return the factor by which YaRN multiplies attention scores in layer number `layer`; 1 without YaRN.

    The papers and `transformers` scale cosines and sines, and so queries and keys, by the factor's root.
    """
    local = config.rope_local is not None and config.sliding_windows[layer] is not None
    rope = config.rope_local if local else config.rope
    if rope is None or rope.kind != "yarn":
        return 1.0
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
    return factor**2


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Return `frequencies [D/2]` with Llama 3.1's scaling: those of slow pairs are divided by ``factor``.

    Within the original context, a pair turns ``original_max_position * frequency / (2 pi)`` times. It is slow
    if it turns fewer than ``low_freq_factor`` times, and fast, so unchanged, if more than
    ``high_freq_factor`` times. Between them the frequency is a mixture of both, whose shares are linear in
    the number of turns.
    """
    turns = (
        rope.original_max_position * frequencies / (2 * math.pi)
    )  # [D/2] within the context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return (1 - ramp) * frequencies / rope.factor + ramp * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Return `frequencies [D/2]` with YaRN's scaling (arXiv 2309.00071): slow ones are divided by ``factor``.

    Pairs that turn more than ``beta_fast`` times within the original context are fast and unchanged; those
    that turn fewer than ``beta_slow`` times are slow. Between them the frequency is a mixture of both, whose
    shares are linear in the pair's index.
    """
    dims = 2 * len(frequencies)

    def pair_of(turns: float) -> float:
        """Return the index (a fraction) of the pair that makes `turns` turns over the original context."""
        return (
            dims
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first or 0.001
    ramp = ((torch.arange(dims // 2, device=frequencies.device) - first) / width).clamp(
        0.0, 1.0
    )
    return ramp * frequencies / rope.factor + (1 - ramp) * frequencies

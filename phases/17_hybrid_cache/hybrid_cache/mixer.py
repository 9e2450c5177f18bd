"""The second operator that mixes tokens: a seam beside attention, for layers that keep a state.

A layer of Gated DeltaNet hands its inputs to a `Mixer`, as a layer of attention hands queries, keys and
values to an `Attention`. The object of a phase is both, or the model says which phase it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from common.models.config import DeltaConfig
from forward.attention import Attention, RecomputeAttention
from hybrid_cache.delta_rule import DeltaTokens, causal_conv, recurrence, unit


@dataclass(frozen=True)
class DeltaSpec:
    """The facts that a mixer needs about the layer that calls it.

    index: of the layer among all. Value head `h` has the query and key of key head `h // groups`.
    """

    index: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @classmethod
    def of(cls, config: DeltaConfig, index: int) -> DeltaSpec:
        """Describe layer `index` of a model."""
        return cls(
            index, config.key_heads, config.value_heads, config.key_dim, config.value_dim, config.conv_width
        )

    @property
    def channels(self) -> int:
        """Numbers a token that the convolution mixes: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """`(H, Dk, Dv)`: the memory of the layer for one request."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """`(W - 1, C)`: the inputs that the next token's convolution sees."""
        return self.conv_width - 1, self.channels


class DeltaInputs(NamedTuple):
    """A layer's inputs, each token's by itself so far.

    mixed: `[..., C]`, queries, keys and values before the convolution.
    decay: `[..., H]` float32; beta: `[..., H]`; see `DeltaTokens`.
    conv: `[C, W]`, the weights of the convolution.
    """

    mixed: Tensor
    decay: Tensor
    beta: Tensor
    conv: Tensor

    def cut(self, first: int, last: int) -> DeltaInputs:
        """The tokens `first .. last - 1` of a ragged batch."""
        mixed, decay, beta = (part[first:last] for part in self[:3])
        return DeltaInputs(mixed, decay, beta, self.conv)

    def tokens(self, layer: DeltaSpec, mixed: Tensor) -> DeltaTokens:
        """Return the rule's inputs, given what the convolution has made of `self.mixed`."""
        leading, keys = mixed.shape[:-1], layer.key_heads * layer.key_dim
        q, k, v = torch.split(mixed, [keys, keys, layer.value_heads * layer.value_dim], -1)
        q, k = (unit(x.reshape(*leading, layer.key_heads, layer.key_dim)) for x in (q, k))
        groups = layer.value_heads // layer.key_heads
        q, k = q.repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)
        v = v.reshape(*leading, layer.value_heads, layer.value_dim).float()
        return DeltaTokens(q * layer.key_dim**-0.5, k, v, self.decay, self.beta.float())


class Mixer(ABC):
    """Maps a Gated DeltaNet layer's inputs to its outputs."""

    @abstractmethod
    def mix(self, layer: DeltaSpec, inputs: DeltaInputs) -> Tensor:
        """Return `[..., H, Dv]` in the dtype of `inputs.mixed`."""


class WholeSequence(Mixer):
    """Sees the whole sequence at every call and remembers nothing, as `RecomputeAttention` does."""

    def mix(self, layer: DeltaSpec, inputs: DeltaInputs) -> Tensor:
        """See `Mixer.mix`; the sequence is the dimension before the last."""
        x = inputs.mixed
        leading = x.shape[:-2]
        mixed, _ = causal_conv(x, inputs.conv, x.new_zeros(*leading, *layer.conv_shape))
        empty = torch.zeros(*leading, *layer.state_shape, device=x.device)
        out, _ = recurrence(empty, inputs.tokens(layer, mixed))
        return out.to(x.dtype)


def mixer_of(attention: Attention) -> Mixer:
    """Return the mixer that belongs to a phase's attention.

    Raises:
        UserError: the phase has none.
    """
    if isinstance(attention, Mixer):
        return attention
    if isinstance(attention, RecomputeAttention):
        return WholeSequence()
    raise UserError(
        "the model has layers of Gated DeltaNet, which keep a state: phase 01 computes it without a cache, "
        "phase 17 with one, and the phases between do not"
    )

"""The interface of Gated DeltaNet layers to their states, as `Attention` is that of layers to the KV cache.

A layer of Gated DeltaNet hands its inputs to a `Mixer`, as a layer of attention hands queries, keys and
values to an `Attention`. An engine's attention object is both. If it is not, the model says which phase it
needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from common.models.config import DeltaConfig
from forward.attention import Attention, RecomputeAttention
from hybrid_cache.states.delta_rule import DeltaTokens, causal_conv, recurrence, unit


class DeltaInputs(NamedTuple):
    """Inputs of a Gated DeltaNet layer, computed from each token alone.

    layer: index among all layers. config: numbers and sizes of the layer's heads.
    conv: `[C, W]`, the weights of the convolution of `C` channels over `W` tokens.
    mixed: `[..., C]`, queries, keys and values before the convolution.
    decay: `[..., H]` float32, the logarithm of the share of the state that stays.
    beta: `[..., H]`, 0 to 1: the share of the state's error about a token's value that the token corrects.
    """

    layer: int
    config: DeltaConfig
    conv: Tensor
    mixed: Tensor
    decay: Tensor
    beta: Tensor

    def take(self, tokens: slice | Tensor) -> DeltaInputs:
        """Return the inputs of some tokens of a ragged batch (requests' tokens end to end).

        tokens: a slice of the batch, or indices of any shape, which becomes the inputs' leading shape.
        """
        mixed, decay, beta = (part[tokens] for part in self[3:])
        return self._replace(mixed=mixed, decay=decay, beta=beta)

    def tokens(self, mixed: Tensor) -> DeltaTokens:
        """Return the inputs of the delta rule in float32, with queries, keys and values taken from `mixed`.

        mixed: `[..., C]`, the convolution's output. Value head `h` gets the query and key of key head `h //
            groups`: each key head has `groups` value heads.
        """
        shape, leading = self.config, mixed.shape[:-1]
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        q, k, v = torch.split(mixed, [keys, keys, values], -1)
        q, k = (unit(x.reshape(*leading, shape.key_heads, shape.key_dim)) for x in (q, k))
        groups = shape.value_heads // shape.key_heads
        q, k = q.repeat_interleave(groups, -2), k.repeat_interleave(groups, -2)
        v = v.reshape(*leading, shape.value_heads, shape.value_dim).float()
        return DeltaTokens(q * shape.key_dim**-0.5, k, v, self.decay, self.beta.float())


class Mixer(ABC):
    """Interface of what computes Gated DeltaNet layers over a batch, and keeps states between steps."""

    @abstractmethod
    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Return a layer's outputs `[..., H, Dv]` in the dtype of `inputs.mixed`, and update its states."""


class WholeSequence(Mixer):
    """A `Mixer` that computes whole sequences from an empty state at every call and keeps no state."""

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Return a layer's outputs `[..., S, H, Dv]` in the dtype of `inputs.mixed [..., S, C]`."""
        x, config = inputs.mixed, inputs.config
        mixed, _ = causal_conv(x, inputs.conv, x.new_zeros(*x.shape[:-2], *config.conv_shape))
        empty = torch.zeros(*x.shape[:-2], *config.state_shape, device=x.device)
        return recurrence(empty, inputs.tokens(mixed))[0].to(x.dtype)


def mixer_of(attention: Attention) -> Mixer:
    """Return an engine's attention object as the `Mixer` of its layers with states; if it has no KV cache,
    return a `WholeSequence` instead.

    Raises:
        UserError: the object's class computes no Gated DeltaNet layers.
    """
    if isinstance(attention, Mixer):
        return attention
    if isinstance(attention, RecomputeAttention):
        return WholeSequence()
    raise UserError(
        "the model has layers of Gated DeltaNet, which keep a state: phase 01 computes it without a cache, "
        "phase 17 with one, and the phases between do not"
    )

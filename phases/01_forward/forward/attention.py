"""Attention, the only operator of a transformer that mixes tokens, and the one that later phases replace.

A model computes queries, keys and values and calls an `Attention` object with them. This phase's object is
the simplest one there is: it sees the whole sequence at every call and stores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerSpec:
    """The facts that attention needs about a layer: its index, head counts and size, scale, and those below.

    ``sliding_window = w`` lets the query at position ``p`` see the keys ``p-w+1 .. p``.
    ``sinks [H]``: the score, for each query head, of one more key that every query sees, of value 0.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)


class Attention(Protocol):
    """Interface of an object that maps a layer's queries, keys and values to outputs; phases implement it."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return a layer's attention ``[..., H, D]`` of ``q [..., H, D]``, ``k`` and ``v [..., KH, D]``."""


def causal_mask(
    query_positions: Tensor, key_positions: Tensor, window: int | None = None
) -> Tensor:
    """Return which keys each query may see: none from the future, none outside the window.

    The query at position ``p`` sees the keys at ``p - window + 1 .. p``.

    Args:
        query_positions: ``[..., S]``.
        key_positions: ``[..., L]``. The mask is not square once keys outnumber queries, so it is computed
            from positions; "lower triangle" would align the wrong corner.
        window: the layer's sliding window in tokens, or ``None``.

    Returns:
        ``[..., S, L]`` boolean, true where attention is allowed.
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)  # [..., S, L]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the keys of `scores [..., KH, H / KH, S, L]`, same shape.

    sinks: `[H]`, for each query head the score of one more key that only enlarges the sum; None: no such key.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.float().view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def attend(layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return scaled dot-product attention with grouped key/value heads (arXiv 1706.03762, 2305.13245).

    Args:
        layer: head counts, scale and sinks.
        q: ``[..., H, S, D]``.
        k, v: ``[..., KH, L, D]``. Query head ``h`` reads key/value head ``h // (H / KH)``.
        mask: boolean, broadcastable to ``[..., 1, S, L]``, true where a key may be seen; ``None`` = all.
            Every query needs at least one key, or its softmax is 0/0.

    Returns:
        ``[..., H, S, D]`` in ``q``'s dtype.
    """
    groups, length = layer.num_heads // layer.num_kv_heads, q.shape[-2]
    # The queries that share a key/value head become extra rows of one matrix product, so no key or
    # value is copied for each query head.
    grouped = q.reshape(*q.shape[:-3], layer.num_kv_heads, groups * length, layer.head_dim)
    scores = (grouped * layer.scale) @ k.transpose(-1, -2)  # [..., KH, G*S, L]
    scores = scores.view(*scores.shape[:-2], groups, length, k.shape[-2]).float()
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(-3), float("-inf"))
    # Softmax is in float32, because bfloat16 rounds sums of many weights; then the weights take the
    # dtype of the values, because both factors of a matrix product need the same.
    weights = softmax(scores, layer.sinks).to(v.dtype)
    out = weights.flatten(-3, -2) @ v  # [..., KH, G*S, D]
    return out.view(*q.shape)


class RecomputeAttention:
    """Causal attention over the whole sequence at every call; it stores nothing between calls."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[..., S, H, D]`` of a sequence's ``q [..., S, H, D]``, ``k``, ``v [..., S, KH, D]``."""
        positions = torch.arange(q.shape[-3], device=q.device)
        mask = causal_mask(positions, positions, layer.sliding_window)  # [S, S]
        mask = mask.unsqueeze(-3)  # [1, S, S]: one mask for all heads
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))  # heads before tokens
        return attend(layer, q, k, v, mask).transpose(-3, -2)

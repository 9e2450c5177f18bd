"""Four bits in words: the order in which a kernel reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quant.weights import QuantizedWeight, unpack_nibbles

SPAN = 128
"""Inputs that 16 words hold: bits 4 i and 16 + 4 i of word j are inputs 32 i + 2 j and 32 i + 2 j + 1."""


def words_fit(weight: QuantizedWeight) -> bool:
    """Return True if a weight can lie in words: its groups are no smaller than a part of a span."""
    return weight.scheme.group % 32 == 0


def to_words(weight: QuantizedWeight) -> Tensor:
    """The nibbles of a weight `[N, K]` in the order of `SPAN`: `[N, 16 ceil(K / 128)]` int32."""
    numbers = unpack_nibbles(weight.data)  # [N, K]
    numbers = pad(numbers, (0, -numbers.shape[1] % SPAN), value=8)
    parts = numbers.view(len(numbers), -1, 4, 16, 2)  # spans, i, j, even and odd
    words = torch.zeros(parts.shape[0], parts.shape[1], 16, dtype=torch.int32, device=numbers.device)
    for i in range(4):
        for odd in range(2):
            words |= parts[:, :, i, :, odd].to(torch.int32) << (4 * i + 16 * odd)
    return words.flatten(1)


def from_words(words: Tensor, size: int) -> Tensor:
    """Undo `to_words`: `[N, K]` uint8 of 0 to 15, for `size` inputs."""
    shifts = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], dtype=torch.int32, device=words.device)
    parts = (words.view(len(words), -1, 1, 16, 1) >> shifts[:, None, :]) & 15  # [N, spans, 4, 16, 2]
    return parts.flatten(1).to(torch.uint8)[:, :size]

"""Rotary position embedding (RoPE, arXiv 2104.09864): position as a rotation of query and key pairs.

Dimension ``i`` of the first half of a head is paired with dimension ``i`` of the second half, the
convention of Hugging Face checkpoints. (The paper pairs neighbours 2i and 2i+1; weights trained for
one pairing give garbage with the other.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.models.config import RopeConfig
from forward.rope_scaling import scaled


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the radians that each pair turns per token: ``[D/2]`` float32, from 1 down to about ``1/theta``.

    Pair i turns ``theta ** -(2 i / D)``. A longer context scales this: ``rope.kind`` "linear" divides by
    ``rope.factor``, and `scaled` does every other kind. ``rope.share`` is not used: the caller has already
    multiplied ``head_dim`` by it. Made on the device "cpu" by name: a model is built
    on the device "meta", where tensors have no values.
    """
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":  # position interpolation, arXiv 2306.15595
        return frequencies / rope.factor
    return scaled(frequencies, rope)


class Rope(nn.Module):
    """Computes the cosines and sines of positions, once a step for all layers of one kind."""

    inverse_frequencies: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.register_buffer(
            "inverse_frequencies", inverse_frequencies(rope, head_dim), persistent=False
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)`` of positions ``[...]``, each ``[..., 1, D]`` float32.

        float32 whatever the model's dtype is: bfloat16 does not distinguish position 257 from 256. The
        first half of ``sin`` carries the minus sign of the rotation.
        """
        angles = positions.unsqueeze(-1).float() * self.inverse_frequencies  # [..., D/2]
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)  # [..., 1, D/2]
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rope(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Return ``x [..., H, D]`` rotated by ``cos, sin [..., 1, D]``: ``[..., H, D]`` in ``x``'s dtype.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``: rolling by half a head gives each number its partner.
    """
    cos, sin = cos_sin
    half, full = x.shape[-1] // 2, x.float()
    return torch.addcmul(full * cos, full.roll(half, -1), sin).to(x.dtype)

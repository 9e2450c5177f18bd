"""MXFP4, a format of four-bit numbers (OCP Microscaling Formats 1.0): 32 of them share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4 = "mxfp4"
"""The format's name in a checkpoint's configuration."""
BLOCK = 32
"""Numbers that share a power of two."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The eight numbers without their sign, which is the highest of the four bits."""


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of an MXFP4 tensor: four-bit numbers times a power of two for each block of 32.

    The results are exact in bfloat16.

    Args:
        blocks: `[..., blocks, 16]` uint8, two numbers a byte, the first in the lower half.
        scales: `[..., blocks]` uint8, the exponents of two plus 127.
        dtype: of the result.

    Returns:
        `[..., 32 * blocks]`.
    """
    table = torch.tensor((*E2M1, *(-number for number in E2M1)), device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., blocks, 32]
    powers = torch.exp2(scales.float() - 127).unsqueeze(-1)
    return (table[halves.int()] * powers).to(dtype).flatten(-2)

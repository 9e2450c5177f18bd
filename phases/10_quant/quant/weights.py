"""The quantized weight of one linear layer: numbers, scales, zero points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import UserError
from quant.formats import BLOCK, Scheme

MIDDLE = 8
"""The nibble that stands for 0 where groups have no zero point of their own."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight `[N, K]`, in the one layout that layers and kernels read from any checkpoint.

    scheme: the format.
    data: fp8 `[N, K]` float8_e4m3fn; int8 `[N, K]` int8; int4 `[N, K / 2]` uint8, an even input in the low
        nibble and the odd one after it in the high nibble, both unsigned.
    scale: fp8 and int8 float32: `[N]` (channel) or `[ceil(N / 128), ceil(K / 128)]` (block). int4 `[N, K /
        group]`, float32 or the half precision that the file has.
    zero: int4 `[N, K / group]` uint8, the nibble that stands for 0; None: it is 8.
    order: `[K]` int64; column `j` of `data` belongs to input `order[j]`. None: to input `j`. Only GPTQ
        checkpoints whose groups are by activation order have it.
    """

    scheme: Scheme
    data: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return the weight's shape `(N, K)`: outputs and inputs."""
        rows, columns = self.data.shape
        return rows, columns * 8 // self.scheme.bits

    def dequantize(self) -> Tensor:
        """Return the weight in float32, `[N, K]`. This is the definition against which kernels are tested."""
        n, k = self.shape
        scheme, scale = self.scheme, self.scale.float()
        if scheme.weights == "int4":
            numbers = unpack_nibbles(self.data).float()
            numbers = numbers.view(n, -1, scheme.group)  # [N, K / g, g]
            zero = float(MIDDLE) if self.zero is None else self.zero.float()[..., None]
            weight = ((numbers - zero) * scale[..., None]).view(n, k)
        elif scheme.scales == "block":
            weight = self.data.float() * spread_blocks(scale, n, k)
        else:
            weight = self.data.float() * scale[:, None]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def can_concatenate(self, other: QuantizedWeight) -> bool:
        """Return True if `cat` may append the outputs of `other`: formats, inputs and scales fit."""
        same_scheme = replace(self.scheme, name="") == replace(other.scheme, name="")
        same_inputs = self.shape[1] == other.shape[1] and self.order is other.order
        whole_blocks = self.scheme.scales != "block" or self.shape[0] % BLOCK == 0
        same_dtype = self.scale.dtype == other.scale.dtype
        return same_scheme and same_inputs and whole_blocks and same_dtype

    @classmethod
    def cat(cls, parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return one weight `[sum of N, K]` that concatenates the outputs of `parts`, with their scales.

        Args:
            parts: weights of layers with the same input; each but the last `can_concatenate` the next one.
        """
        zeros = [part.zero for part in parts if part.zero is not None]
        data = torch.cat([part.data.view(torch.uint8) for part in parts])
        return replace(
            parts[0],
            data=data.view(parts[0].data.dtype),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat(zeros) if zeros else None,
        )


def spread_blocks(scale: Tensor, n: int, k: int) -> Tensor:
    """Return scales of 128 x 128 blocks repeated for each weight: `[n, k]`.

    scale: `[ceil(n / 128), ceil(k / 128)]`.
    """
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def check_scale(name: str, scale: Tensor) -> None:
    """Raise `UserError` unless all of a weight's scales are finite and none is negative.

    name: of the tensor `scale`, for the message.
    """
    if not bool(torch.isfinite(scale).all()):
        raise UserError(f"{name} holds NaN or infinity: the checkpoint is damaged")
    if bool((scale < 0).any()):
        raise UserError(f"{name} holds negative scales: the checkpoint is damaged")


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Return numbers `[N, K]` of 0 to 15 packed into `[N, K / 2]` uint8: even columns in the low nibbles."""
    numbers = numbers.to(torch.uint8)
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """Return bytes `data [N, K / 2]` as numbers `[N, K]` uint8 of 0 to 15: the low nibble first."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(1)

"""Formats of quantized weights: which numbers stand for a weight, and which of them share a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from common.errors import UserError

Weights = Literal["fp8", "int8", "int4"]
Scales = Literal["channel", "block", "group"]
Activations = Literal["fp8", "int8"]

DTYPES: dict[str, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
"""What the numbers are kept in: two of four bits share a byte."""
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The largest magnitude of each; int8 leaves -128 out, so that a weight and its opposite are both there."""
BLOCK = 128
"""Side of a block of weights that share a scale."""
FORMATS = {("fp8", "channel"), ("fp8", "block"), ("int8", "channel"), ("int4", "group")}
"""Weights that are supported, each with what shares a scale."""
GROUPS = (256, 128, 64, 32, 16)
"""Sizes of groups, in inputs: each holds whole bytes of four-bit numbers, and whole words of a file."""


@dataclass(frozen=True)
class Scheme:
    """The number format of one linear layer's weight `[N, K]`, and of its input.

    name: what it is called in options and messages.
    weights: the format of a weight: "fp8", "int8" or "int4".
    scales: which weights share a scale: an output channel (a row), a block of 128 x 128, or a group of
        neighbouring inputs within a row.
    group: inputs in a group; 0 unless scales are by group.
    zeros: whether a group has a zero point; without one, the middle number stands for 0.
    activations: the format to which the input is rounded, token by token; None: it is not rounded.
    """

    name: str
    weights: Weights
    scales: Scales
    group: int = 0
    zeros: bool = False
    activations: Activations | None = None

    def __post_init__(self) -> None:
        """Raise `UserError` for a combination of fields that no layer here can have."""
        if (self.weights, self.scales) not in FORMATS:
            raise UserError(
                f"{self.name}: {self.weights} weights with a scale for each {self.scales} are not supported"
            )
        if self.scales == "group" and self.group not in GROUPS:
            sizes = ", ".join(map(str, sorted(GROUPS)))
            raise UserError(
                f"{self.name}: group_size is {self.group}, but must be one of {sizes}"
            )
        if self.zeros and self.weights != "int4":
            raise UserError(
                f"{self.name}: zero points are supported for int4 only, not {self.weights}"
            )
        if self.activations not in (None, self.weights):
            raise UserError(
                f"{self.name}: {self.weights} weights with {self.activations} activations"
            )

    @property
    def bits(self) -> int:
        """Return the bits of one weight: 4 or 8."""
        return 4 if self.weights == "int4" else 8

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight `[n, k]`."""
        if self.scales == "channel":
            return (n,)
        if self.scales == "block":
            return (-(-n // BLOCK), -(-k // BLOCK))
        return (n, k // self.group)

    def with_group(self, size: int) -> Scheme:
        """Return a copy of this scheme with groups of `size` inputs."""
        return replace(self, group=size)

    def fitted(self, k: int, name: str) -> Scheme:
        """Return this scheme with the largest supported group size, up to its own, that divides `k`.

        A scheme without groups is returned as it is.

        k: weights in a row, which are the layer's inputs. name: the layer, for the message.

        Raises:
            UserError: no size of group divides `k`.
        """
        if self.scales != "group" or k % self.group == 0:
            return self
        for size in GROUPS:
            if size < self.group and k % size == 0:
                return replace(self, group=size)
        raise UserError(
            f"{name} has rows of {k} weights, which no group of {GROUPS[-1]} or more divides"
        )


FP8 = Scheme("fp8", "fp8", "channel", activations="fp8")
FP8_WEIGHTS = Scheme("fp8-weights", "fp8", "channel")
FP8_BLOCK = Scheme("fp8-block", "fp8", "block", activations="fp8")
INT8 = Scheme("int8", "int8", "channel")
W8A8 = Scheme("w8a8", "int8", "channel", activations="int8")
INT4 = Scheme("int4", "int4", "group", group=128)

SCHEMES = {scheme.name: scheme for scheme in (FP8, FP8_WEIGHTS, FP8_BLOCK, INT8, W8A8, INT4)}
"""What can be made here, by the name it has as an option."""

"""Round to nearest: the method that asks nothing of the model but its weights; and inputs, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats import BLOCK, LARGEST, Activations, Scheme
from quant.weights import MIDDLE, QuantizedWeight, pack_nibbles, spread_blocks


def quantize(
    weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """Return `weight [N, K]` rounded to the nearest numbers of a scheme.

    In eight bits, the largest weight of a scale keeps float32's precision.

    Args:
        scheme: a format whose groups divide K.
        scale_dtype: of the scales of groups; numbers are rounded with the scales as they are kept.
    """
    weight = weight.float()
    if scheme.weights == "int4":
        return in_groups(weight, scheme, *group_scales(weight, scheme, scale_dtype))
    sizes, most = weight.abs(), LARGEST[scheme.weights]
    if scheme.scales == "block":
        n, k = weight.shape
        padded = torch.nn.functional.pad(sizes, (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = padded.view(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK)
        scale = _nonzero(blocks.amax(dim=(1, 3)) / most)
        each = spread_blocks(scale, n, k)
    else:
        scale = _nonzero(sizes.amax(dim=1) / most)
        each = scale[:, None]
    return QuantizedWeight(scheme, to_eight_bits(weight / each, scheme.weights), scale)


def to_eight_bits(numbers: Tensor, kind: str) -> Tensor:
    """Return float32 numbers rounded to the format `kind`, "fp8" or "int8", in its dtype; ties go to even.

    Numbers beyond the format's range become its ends.
    """
    most = LARGEST[kind]
    if kind == "fp8":
        return numbers.clamp(-most, most).to(torch.float8_e4m3fn)
    return numbers.round().clamp(-most, most).to(torch.int8)


def group_scales(
    weight: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Return scales `[N, K / g]` in `dtype` of a weight `[N, K]`, and zero points `[N, K / g]` uint8 or None.

    Without zero points the largest magnitude is 7.5 steps from 0: a positive one is stored as 7, and a
    negative one as -8. With them, the range from the smallest to the largest, 0 within it,
    is cut into 15 steps. `g` is the scheme's group size.
    """
    groups = weight.float().view(len(weight), -1, scheme.group)  # [N, K / g, g]
    if not scheme.zeros:
        scale = groups.abs().amax(dim=-1) / (MIDDLE - 0.5)
        return _nonzero(scale.to(dtype)), None
    low, high = groups.amin(dim=-1).clamp_max(0), groups.amax(dim=-1).clamp_min(0)
    scale = _nonzero(((high - low) / 15).to(dtype))
    return scale, (-low / scale.float()).round().clamp(0, 15).to(torch.uint8)


def _nonzero(scale: Tensor) -> Tensor:
    """Return `scale` with 1 in place of 0: a row of zeros has scale 0, and 0 / 0 is not a number."""
    return scale.masked_fill(scale == 0, 1)


def to_nibbles(numbers: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return float32 numbers quantized to 0 .. 15, uint8: the rounded number / scale, plus the zero point.

    scale, zero: broadcast to the shape of `numbers`; zero: None: 8.
    """
    middle = float(MIDDLE) if zero is None else zero.float()
    return ((numbers / scale.float()).round() + middle).clamp(0, 15).to(torch.uint8)


def in_groups(
    weight: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None
) -> QuantizedWeight:
    """Return `weight [N, K]` float32 rounded to the nearest int4 numbers, given its groups' scales.

    scheme: int4 in groups of g. scale: `[N, K / g]`. zero: `[N, K / g]` uint8, zero points; None: 8.
    """
    groups = weight.view(len(weight), -1, scheme.group)
    numbers = to_nibbles(groups, scale[..., None], None if zero is None else zero[..., None])
    return QuantizedWeight(scheme, pack_nibbles(numbers.flatten(1)), scale, zero)


def quantize_tokens(x: Tensor, kind: Activations) -> tuple[Tensor, Tensor]:
    """Return `x [..., K]` as eight-bit numbers `[..., K]`, and a float32 scale `[..., 1]` for each token.

    kind: the format of the numbers, "int8" or "fp8". A token's largest magnitude becomes the largest number
        of the format, `LARGEST[kind]`. A token of zeros has numbers of 0 and the smallest normal scale, not
        0. Scales are float32 whatever `x` is, and x is multiplied by their reciprocal.
    """
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) * (1.0 / LARGEST[kind])
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)  # a token of zeros stays one
    return to_eight_bits(
        x * scale.reciprocal(), kind
    ), scale  # as the kernels do it: one division a token


def rounded(x: Tensor, kind: Activations | None) -> Tensor:
    """Return `x [..., K]` rounded to an eight-bit format with a scale for each token, in `x`'s dtype.

    kind: the format, "fp8" or "int8"; None: `x` is returned unchanged.
    """
    if kind is None:
        return x
    numbers, scale = quantize_tokens(x, kind)
    return (numbers.float() * scale).to(x.dtype)

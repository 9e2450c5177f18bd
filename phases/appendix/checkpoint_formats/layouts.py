"""Layouts of a quantized layer's tensors in checkpoints, and how each becomes a `QuantizedWeight`.

The four-bit numbers are the same in all formats, 0 to 15; formats differ in the side along which numbers are
packed, in their order within a word, and in what a zero point is counted from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from common.errors import UserError
from quant.formats import DTYPES, Scheme
from quant.linear import QuantLinear
from quant.weights import (
    MIDDLE,
    QuantizedWeight,
    check_scale,
    pack_nibbles,
    unpack_nibbles,
)

Kind = Literal["plain", "packed", "gptq", "awq"]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight columns of an AWQ word lie: column `i` in nibble `AWQ_ORDER[i]`."""
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class TensorLayout:
    """Layout of the tensors of one quantized layer in a checkpoint's file.

    scheme: format of the numbers and of their scales. scale: name of the tensor of scales.
    one_less: True if the file has zero points minus 1, as in GPTQ's first format. one_scale: True if the file
        has one scale for all channels.
    kind: "plain": numbers as they are, and scales (formats `float-quantized`, `int-quantized`, `fp8`).
        "packed": an int32 word has eight four-bit or four eight-bit numbers of neighbouring inputs, the first
        in the lowest bits, each plus half the range (`pack-quantized`). "gptq": words of neighbouring inputs.
        "awq": words of neighbouring outputs, in AWQ's own order.
    """

    kind: Kind
    scheme: Scheme
    scale: str = "weight_scale"
    one_less: bool = False
    one_scale: bool = False

    def tensors(self, n: int, k: int, name: str) -> Expected:
        """Return {tensor name: (shape, dtype)} of the file's tensors for a layer's weight `[n, k]`.

        name: of the layer, for errors.

        Raises:
            UserError: `n` or `k` is no multiple of the layout's groups or words.
        """
        per_word, group = 32 // self.scheme.bits, self.scheme.group
        if self.kind == "plain":
            shape = (
                (n, 1) if self.scheme.scales == "channel" else self.scheme.scale_shape(n, k)
            )
            shape = (1,) if self.one_scale else shape
            return {
                "weight": ((n, k), DTYPES[self.scheme.weights]),
                self.scale: (shape, torch.float32),
            }
        if k % (group or per_word):
            raise UserError(
                f"{name} has rows of {k} weights, which groups of {group or per_word} do not divide"
            )
        groups = k // group if group else 1
        if self.kind == "packed":
            found: Expected = {
                "weight_packed": ((n, k // per_word), torch.int32),
                "weight_scale": ((n, groups), torch.float32),
                "weight_shape": ((2,), torch.int64),
            }
            if self.scheme.zeros:
                found["weight_zero_point"] = ((-(-n // per_word), groups), torch.int32)
            return found
        if n % per_word:
            raise UserError(f"{name} has {n} outputs, which words of {per_word} do not divide")
        packed = (k // per_word, n) if self.kind == "gptq" else (k, n // per_word)
        found = {
            "qweight": (packed, torch.int32),
            "qzeros": ((groups, n // per_word), torch.int32),
            "scales": ((groups, n), torch.float32),
        }
        return found | ({"g_idx": ((k,), torch.int32)} if self.kind == "gptq" else {})

    def read(
        self, found: Mapping[str, Tensor], shape: tuple[int, int], name: str
    ) -> QuantizedWeight:
        """Return the quantized weight `[N, K]` that a layer's tensors in the file describe.

        Args:
            found: tensors of the shapes and dtypes that `tensors` returns.
            shape: `(N, K)`.
            name: of the layer, for errors.

        Raises:
            UserError: a tensor holds a value that its format does not allow.
        """
        check_scale(f"{name}.{self.scale}", found[self.scale])
        if self.kind == "plain":
            return self._plain(found, name)
        if self.kind == "packed":
            return self._packed(found, shape, name)
        if self.kind == "awq":
            numbers, zero = unpack_awq(found["qweight"]).t(), unpack_awq(found["qzeros"])
            order = None
        else:
            numbers = unpack_words(found["qweight"].t())  # [N, K]
            zero = (unpack_words(found["qzeros"]) + int(self.one_less)) & 15
            order = _order(found["g_idx"], self.scheme.group, f"{name}.g_idx")
        if not self.scheme.zeros and bool((zero != MIDDLE).any()):
            raise UserError(
                f"{name}.qzeros holds zero points, but the configuration says that there are none"
            )
        numbers = numbers if order is None else numbers.index_select(1, order)
        scale, zero = found["scales"].t().contiguous(), zero.t().contiguous()
        return QuantizedWeight(
            self.scheme,
            pack_nibbles(numbers),
            scale,
            zero if self.scheme.zeros else None,
            order,
        )

    def _plain(self, found: Mapping[str, Tensor], name: str) -> QuantizedWeight:
        data, scale = found["weight"], found[self.scale].float()
        if data.dtype == torch.float8_e4m3fn and bool(
            ((data.view(torch.uint8) & 127) == 127).any()
        ):
            raise UserError(f"{name}.weight holds NaN: the checkpoint is damaged")
        scale = scale.expand(len(data)) if self.one_scale else scale
        shape = self.scheme.scale_shape(*data.shape)
        return QuantizedWeight(self.scheme, data, scale.reshape(shape).contiguous())

    def _packed(
        self, found: Mapping[str, Tensor], shape: tuple[int, int], name: str
    ) -> QuantizedWeight:
        said = found["weight_shape"].tolist()  # of the whole, also in a rank
        if said[0] % shape[0] or said[1] % shape[1]:
            raise UserError(
                f"{name}.weight_shape says {said}, but the weight is {list(shape)}"
            )
        # The lowest byte first, as every machine here has it: the order of our nibbles and bytes.
        data = found["weight_packed"].contiguous().view(torch.uint8)
        scale = found["weight_scale"]
        if self.scheme.weights == "int8":
            return QuantizedWeight(
                self.scheme, (data ^ 128).view(torch.int8), scale.float()[:, 0].clone()
            )
        zero = None
        if self.scheme.zeros:
            words = found["weight_zero_point"].t()
            zero = unpack_words(words).t()[: shape[0]].contiguous()
        return QuantizedWeight(self.scheme, data, scale.clone(), zero)


class StoredLinear(nn.Module):
    """Holds the tensors of one quantized layer as they are in the file, until `understood` converts them."""

    def __init__(self, linear: nn.Linear, layout: TensorLayout, name: str) -> None:
        super().__init__()
        self.layout, self.shape = layout, (linear.out_features, linear.in_features)
        self.expected = layout.tensors(*self.shape, name)
        for tensor, (shape, dtype) in self.expected.items():
            self.register_buffer(tensor, torch.empty(shape, dtype=dtype, device="meta"))
        self.bias = linear.bias

    def understood(self, name: str) -> QuantLinear:
        """Return the quantized linear layer that the loaded tensors describe.

        name: of the layer, for errors.

        Raises:
            UserError: a tensor holds a value that the format forbids.
        """
        weight = self.layout.read(
            {key: self.get_buffer(key) for key in self.expected}, self.shape, name
        )
        return QuantLinear(weight, self.bias)


def unpack_words(words: Tensor) -> Tensor:
    """Unpack int32 words `[R, C]` into four-bit numbers `[R, C * 8]` uint8, lowest bits first."""
    return unpack_nibbles(words.contiguous().view(torch.uint8))


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack int32 words `[R, C]` in AWQ's order into eight four-bit numbers each: `[R, C * 8]` uint8."""
    numbers = unpack_words(words).view(len(words), -1, 8)
    return numbers[..., list(AWQ_ORDER)].flatten(1)


def _order(groups: Tensor, size: int, name: str) -> Tensor | None:
    """Return the indices of the inputs, sorted by group, `[K]` int64; None if they are in that order.

    groups: `[K]`, the group of each input (GPTQ's `g_idx`). size: inputs of a group. name: of the tensor, for
        errors.

    Raises:
        UserError: a group does not exist, or has not `size` inputs.
    """
    count = len(groups) // size
    if bool(((groups < 0) | (groups >= count)).any()):
        raise UserError(
            f"{name} names groups outside of 0 to {count - 1}, or of other ranks (desc_act)"
        )
    if bool((torch.bincount(groups.long(), minlength=count) != size).any()):
        raise UserError(f"{name} has groups that are not {size} inputs each")
    order = torch.argsort(groups.long(), stable=True)
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order

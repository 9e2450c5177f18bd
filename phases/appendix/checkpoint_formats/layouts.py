"""Layouts of a quantized layer's tensors in checkpoints, and the way from each to `QuantizedWeight`.

Everybody's four-bit numbers are the same sixteen; they differ in the side they are packed along, in their
order within a word, and in what a zero point is counted from.
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
from quant.weights import MIDDLE, QuantizedWeight, check_scale, pack_nibbles

Kind = Literal["plain", "packed", "gptq", "awq"]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight columns of an AWQ word lie: column `i` in nibble `AWQ_ORDER[i]`."""
Expected = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of a layer in a file.

    kind: plain: numbers as they are, and scales (`float-quantized`, `int-quantized`, `fp8`). packed: eight
        nibbles or four bytes of neighbouring inputs in a word, the first lowest, each plus half the range
        (`pack-quantized`). gptq: words along the inputs. awq: words along the outputs, nibbles shuffled.
    scale: the scales' name.
    one_less: GPTQ's zero points are stored less one, in its first format.
    by_activation: there is a `g_idx` that says each input's group, in `packed`; `gptq` always has one.
    row: a row has one scale, which becomes that of each of its groups.
    eight: numbers of eight bits with scales by group. No routine here reads such, so the weight becomes a
        plain one; of `scheme` only the group and the zero points count.
    """

    kind: Kind
    scheme: Scheme
    scale: str = "weight_scale"
    one_less: bool = False
    by_activation: bool = False
    row: bool = False
    eight: bool = False

    @property
    def bits(self) -> int:
        """Of one number."""
        return 8 if self.eight else self.scheme.bits

    def inputs(self, k: int) -> int:
        """Return how many of a row's `k` inputs share a scale in the file; 0 where that is not by group."""
        return k if self.row else self.scheme.group

    def tensors(self, n: int, k: int, name: str) -> Expected:
        """Shape and dtype of each tensor of layer `name`, a weight `[n, k]`.

        Raises:
            UserError: a weight of this shape cannot be laid out so.
        """
        per_word, group = 32 // self.bits, self.inputs(k)
        if self.kind == "plain":
            shape = self.scheme.scale_shape(n, k)
            if self.scheme.scales == "channel":
                shape = (n, 1)
            return {
                "weight": ((n, k), DTYPES[self.scheme.weights]),
                self.scale: (shape, torch.float32),
            }
        if k % (group or per_word):
            raise UserError(
                f"{name} has rows of {k} weights, which groups of {group or per_word} do not divide"
            )
        if self.row:
            self.scheme.fitted(k, name)
        groups = k // group if group else 1
        if self.kind == "packed":
            found: Expected = {
                "weight_packed": ((n, k // per_word), torch.int32),
                "weight_scale": ((n, groups), torch.float32),
                "weight_shape": ((2,), torch.int64),
            }
            if self.scheme.zeros:
                found["weight_zero_point"] = ((-(-n // per_word), groups), torch.int32)
            if self.by_activation:
                found["weight_g_idx"] = ((k,), torch.int32)
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
    ) -> QuantizedWeight | Tensor:
        """The weight of layer `name`; a plain one, `[N, K]` float32, if it is `eight`.

        Args:
            found: tensors of the shapes and dtypes that `tensors` says.
            shape: `(N, K)`.

        Raises:
            UserError: a tensor holds what it cannot hold.
        """
        scales = "scales" if "scales" in found else self.scale
        check_scale(f"{name}.{scales}", found[scales])
        if self.kind == "plain":
            return self._plain(found, name)
        if self.kind == "packed":
            return self._packed(found, shape, name)
        if self.kind == "gptq":
            numbers = unpack_words(found["qweight"].t().contiguous(), self.bits)  # [N, K]
            zero = unpack_words(found["qzeros"], self.bits)
            zero = (zero + int(self.one_less)) & ((1 << self.bits) - 1)
        else:
            numbers = unpack_awq(found["qweight"]).t()
            zero = unpack_awq(found["qzeros"])
        checked = self._zero(zero.t().contiguous(), f"{name}.qzeros")
        return self._grouped(numbers, found["scales"].t().contiguous(), checked, found, name)

    def _grouped(
        self, numbers: Tensor, scale: Tensor, zero: Tensor | None, found: Mapping[str, Tensor], name: str
    ) -> QuantizedWeight | Tensor:
        """The weight of numbers `[N, K]` in the order of inputs, and of scales and zero points by group."""
        k, key = numbers.shape[1], "weight_g_idx" if self.kind == "packed" else "g_idx"
        order = _order(found[key], self.inputs(k), f"{name}.{key}") if key in found else None
        if order is not None:
            numbers = numbers.index_select(1, order)
        scheme = self.scheme.fitted(k, name)
        if self.row:
            scale = scale.repeat_interleave(k // scheme.group, 1)
            zero = None if zero is None else zero.repeat_interleave(k // scheme.group, 1)
        if not self.eight:
            return QuantizedWeight(scheme, pack_nibbles(numbers), scale, zero, order)
        middle = 128.0 if zero is None else zero.float()[..., None]
        weight = (numbers.float().view(len(numbers), -1, scheme.group) - middle) * scale.float()[..., None]
        weight = weight.flatten(1)
        return weight if order is None else torch.empty_like(weight).index_copy_(1, order, weight)

    def _plain(self, found: Mapping[str, Tensor], name: str) -> QuantizedWeight:
        data, scale = found["weight"], found[self.scale].float()
        if data.dtype == torch.float8_e4m3fn and bool(((data.view(torch.uint8) & 127) == 127).any()):
            raise UserError(f"{name}.weight holds NaN: the checkpoint is damaged")
        shape = self.scheme.scale_shape(*data.shape)
        return QuantizedWeight(self.scheme, data, scale.reshape(shape).contiguous())

    def _packed(
        self, found: Mapping[str, Tensor], shape: tuple[int, int], name: str
    ) -> QuantizedWeight | Tensor:
        said = tuple(found["weight_shape"].tolist())
        if said != shape:
            raise UserError(f"{name}.weight_shape says {list(said)}, but the weight is {list(shape)}")
        numbers, scale = unpack_words(found["weight_packed"], self.bits), found["weight_scale"]
        if self.scheme.weights == "int8":
            return QuantizedWeight(self.scheme, (numbers ^ 128).view(torch.int8), scale.float()[:, 0].clone())
        zero = None
        if self.scheme.zeros:
            words = found["weight_zero_point"].t().contiguous()
            zero = unpack_words(words, self.bits).t()[: shape[0]].contiguous()
        return self._grouped(numbers, scale.clone(), zero, found, name)

    def _zero(self, zero: Tensor, name: str) -> Tensor | None:
        """`zero` itself, or None where the scheme has no zero points: then all must be the middle."""
        if self.scheme.zeros:
            return zero
        if bool((zero != (128 if self.eight else MIDDLE)).any()):
            raise UserError(f"{name} holds zero points, but the configuration says that there are none")
        return None


class StoredLinear(nn.Module):
    """A layer's tensors as a checkpoint has them, between being read and being understood."""

    def __init__(self, linear: nn.Linear, layout: TensorLayout, name: str) -> None:
        super().__init__()
        self.layout, self.shape = layout, (linear.out_features, linear.in_features)
        self.expected = layout.tensors(*self.shape, name)
        for tensor, (shape, dtype) in self.expected.items():
            self.register_buffer(tensor, torch.empty(shape, dtype=dtype, device="meta"))
        self.bias = linear.bias

    def part(self, leaf: str, value: Tensor, place: int | None) -> Tensor:
        """See phase 14's `KnowsParts`: shapes are this rank's, and groups are counted from its own first."""
        if leaf == "weight_shape":
            return torch.tensor(self.shape, dtype=value.dtype)
        if not leaf.endswith("g_idx") or place is None or self.layout.row:
            return value
        groups = self.shape[1] // self.layout.scheme.group
        value = value - place * groups
        if bool(((value < 0) | (value >= groups)).any()):
            raise UserError("groups are in the order of activations: they cannot be cut along the inputs")
        return value

    def understood(self, name: str, dtype: torch.dtype) -> QuantLinear | nn.Linear:
        """The layer that this stands for; one whose weight is plain has it in `dtype`."""
        weight = self.layout.read({key: self.get_buffer(key) for key in self.expected}, self.shape, name)
        if isinstance(weight, QuantizedWeight):
            return QuantLinear(weight.check(name), self.bias)
        n, k = self.shape
        plain = nn.Linear(k, n, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight.to(dtype), requires_grad=False), self.bias
        return plain


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """`[R, C]` int32 -> `[R, C * 32 / bits]` uint8, the lowest bits first."""
    numbers = words.contiguous().view(
        torch.uint8
    )  # the lowest byte first: every machine here is little-endian
    return numbers if bits == 8 else torch.stack([numbers & 15, numbers >> 4], dim=-1).flatten(1)


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """`[R, C]` of unsigned numbers -> `[R, ceil(C * bits / 32)]` int32, padded with zeros."""
    numbers = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[1] % (32 // bits)))
    packed = numbers if bits == 8 else pack_nibbles(numbers)
    return packed.flatten().view(torch.int32).view(len(numbers), -1)  # a single row may have any strides


def unpack_awq(words: Tensor) -> Tensor:
    """`[R, C]` int32 in AWQ's order -> `[R, C * 8]` uint8."""
    numbers = unpack_words(words, 4).view(len(words), -1, 8)
    return numbers[..., list(AWQ_ORDER)].flatten(1)


def _order(groups: Tensor, size: int, name: str) -> Tensor | None:
    """From each input's group `[K]` the inputs in the order of their groups, or None if they are in order."""
    count = len(groups) // size
    if bool(((groups < 0) | (groups >= count)).any()):
        raise UserError(f"{name} names groups outside of 0 to {count - 1}")
    if bool((torch.bincount(groups.long(), minlength=count) != size).any()):
        raise UserError(f"{name} has groups that are not {size} inputs each")
    order = torch.argsort(groups.long(), stable=True)
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order

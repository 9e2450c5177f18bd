"""Phase 10: what a quantized weight is, in memory and in everybody's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from quant import cpu
from quant.activations import quantize_tokens, rounded
from quant.checkpoints import matches, stored
from quant.formats import FP8, FP8_BLOCK, INT4, INT8, SCHEMES, W8A8, Scheme
from quant.layouts import AWQ_ORDER, Layout, pack_words, unpack_words
from quant.linear import QuantLinear, end_to_end, joinable
from quant.rtn import quantize
from quant.weights import QuantizedWeight, pack_nibbles, unpack_nibbles

INT4_ZEROS = Scheme("int4, zeros", "int4", "group", group=32, zeros=True)
TENSOR = Scheme("fp8, tensor", "fp8", "tensor")
SHAPES = [(8, 32), (24, 64), (130, 256), (128, 384), (3, 576)]
ALL = {
    "fp8": FP8,
    "tensor": TENSOR,
    "block": FP8_BLOCK,
    "int8": INT8,
    "w8a8": W8A8,
    "int4": INT4,
    "int4 32": INT4.with_group(32),
    "zeros": INT4_ZEROS,
}
STEP = {"fp8": 1 / 16, "int8": 1 / 127, "int4": 1 / 7}
"""The largest rounding error, as a share of the largest number that shares the scale, from above."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    weight[:, 0] *= 8  # an outlier, as real layers have them
    return weight


def made(name: str, n: int = 24, k: int = 64, seed: int = 0) -> QuantizedWeight:
    return quantize(matrix(n, k, seed), ALL[name].fitted(k, "a layer"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_weight_comes_back_within_a_step(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, found = matrix(n, k), made(name, n, k)
    assert found.check("w") is found and found.shape == shape
    assert found.scale.shape == found.scheme.scale_shape(n, k), f"scales of {name} at {shape}"
    back = found.dequantize()
    assert back.shape == shape and back.dtype == torch.float32
    worst = float((back - weight).abs().max() / weight.abs().max())
    assert worst <= STEP[found.scheme.weights], (
        f"{name} at {shape} is off by {worst:.3f} of the largest weight"
    )
    assert found.nbytes < weight.nbytes / (5 if found.scheme.bits == 4 else 3)


@pytest.mark.parametrize("name", ALL)
def test_what_was_rounded_once_is_not_rounded_again(name: str) -> None:
    once = made(name).dequantize()
    again = quantize(once, made(name).scheme).dequantize()
    if name in (
        "fp8",
        "tensor",
        "block",
        "int8",
        "w8a8",
    ):  # the largest is a number of the format, so is its scale
        assert torch.allclose(once, again, atol=1e-6), (
            f"{name}: the largest change is {(once - again).abs().max()}"
        )


@pytest.mark.parametrize("name", ALL)
def test_a_row_of_zeros_stays_one(name: str) -> None:
    weight = matrix(128, 256)
    weight[5] = 0
    back = quantize(weight, ALL[name].fitted(256, "w"), torch.float16).dequantize()
    assert torch.isfinite(back).all(), f"{name}: 0 / 0"
    assert bool((back[5] == 0).all()), f"{name}: a row of zeros came back as something else"


def test_the_lesson_by_hand() -> None:
    """The small matrix of the lesson: one scale for all, one a row, one a group of two."""
    weight = torch.tensor([[0.1, -0.2, 0.3, 8.0], [0.05, 0.11, -0.11, 0.2]])
    tensor = weight.abs().max() / 7
    assert ((weight / tensor).round() * tensor)[0].tolist() == pytest.approx([0, 0, 0, 8.0])
    rows = weight.abs().amax(1, keepdim=True) / 7
    assert ((weight / rows).round() * rows)[1].tolist() == pytest.approx(
        [0.0571, 0.1143, -0.1143, 0.2], abs=1e-4
    )
    groups = weight.view(2, 2, 2).abs().amax(2, keepdim=True) / 7
    back = ((weight.view(2, 2, 2) / groups).round() * groups).view(2, 4)
    assert back[0, :2].tolist() == pytest.approx([0.1143, -0.2], abs=1e-4)


def test_nibbles() -> None:
    numbers = torch.arange(32, dtype=torch.uint8).remainder(16).view(2, 16)
    packed = pack_nibbles(numbers)
    assert packed[0].tolist()[:2] == [0x10, 0x32], "the even input lies in the low nibble"
    assert torch.equal(unpack_nibbles(packed), numbers)
    words = pack_words(numbers, 4)
    assert words.shape == (2, 2) and words[0, 0].item() == 0x76543210
    assert torch.equal(unpack_words(words, 4), numbers)


@pytest.mark.parametrize("name", ALL)
def test_joined_parts_keep_their_scales(name: str) -> None:
    parts = [made(name, n, 256, seed) for seed, n in enumerate((128, 128, 64))]
    assert parts[0].joins(parts[1])
    whole = QuantizedWeight.cat(parts)
    apart = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(whole.dequantize(), apart), f"{name}: joining changed a weight"


def test_parts_that_do_not_go_together_stay_apart() -> None:
    assert not made("int8").joins(made("fp8")), "other numbers"
    assert not made("int4", k=64).joins(made("int4 32", k=64)), "other groups"
    assert not made("block", 100, 256).joins(made("block", 128, 256)), "a block would hold rows of both"
    order = torch.arange(64).flip(0)
    turned = QuantizedWeight(made("int4").scheme, made("int4").data, made("int4").scale, order=order)
    assert not turned.joins(made("int4")) and turned.joins(turned)
    plain = torch.nn.Linear(64, 8)
    assert not joinable([QuantLinear(made("int8")), plain])


# Files: every layout, written here by hand and read.


def gptq_file(
    numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor, less: int, bits: int = 4
) -> dict[str, Tensor]:
    """`numbers [N, K]`, `scale` and `zero [N, K / g]` as AutoGPTQ lays them out."""
    return {
        "qweight": pack_words(numbers, bits).t().contiguous(),
        "qzeros": pack_words((zero - less).to(torch.uint8).t().contiguous() & ((1 << bits) - 1), bits),
        "scales": scale.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def awq_words(numbers: Tensor) -> Tensor:
    shuffled = torch.empty_like(numbers.view(len(numbers), -1, 8))
    shuffled[..., list(AWQ_ORDER)] = numbers.view(len(numbers), -1, 8)
    return pack_words(shuffled.flatten(1), 4)


def parts_of(seed: int = 0, zeros: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (16, 64), generator=generator, dtype=torch.uint8)
    scale = torch.rand(16, 2, generator=generator).to(torch.float16)
    zero = torch.randint(0, 16, (16, 2), generator=generator, dtype=torch.uint8)
    return numbers, scale, zero if zeros else torch.full_like(zero, 8)


def by_hand(numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    """Each weight by the definition, one group index at a time."""
    groups = groups.long()
    return (numbers.float() - zero.float()[:, groups]) * scale.float()[:, groups]


@pytest.mark.parametrize("less", [0, 1], ids=["v2", "v1"])
@pytest.mark.parametrize("order", ["as it lies", "by activation"])
@pytest.mark.parametrize("zeros", [False, True])
def test_gptq(less: int, order: str, zeros: bool) -> None:
    numbers, scale, zero = parts_of(zeros=zeros)
    groups = torch.arange(64) // 32
    if order == "by activation":
        groups = groups[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    scheme = Scheme("gptq", "int4", "group", group=32, zeros=zeros)
    layout = Layout("gptq", scheme, "scales", one_less=bool(less))
    found = gptq_file(numbers, scale, zero, groups, less)
    expect(layout, found)
    weight = layout.read(found, (16, 64), "w").check("w")
    assert (weight.order is None) == (order == "as it lies") and (weight.zero is None) == (not zeros)
    assert torch.equal(weight.dequantize(), by_hand(numbers, scale, zero, groups)), (
        f"layer w of a GPTQ file, inputs {order}: not (number - zero) * scale of each input's group"
    )
    x = torch.randn(3, 64)
    layer = QuantLinear(weight)
    assert torch.allclose(layer(x), layer.exact(x), atol=1e-4), "the inputs were not put in order"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [-1, 32])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("by_activation", [False, True])
def test_gptq_of_other_bits_and_groups(bits: int, size: int, zeros: bool, by_activation: bool) -> None:
    """Eight bits become plain weights; a group of -1 is a whole row of 96 inputs."""
    random = torch.Generator().manual_seed(bits)
    many = 1 if size == -1 else 3
    numbers = torch.randint(0, 1 << bits, (16, 96), generator=random, dtype=torch.uint8)
    scale = torch.rand(16, many, generator=random).half()
    zero = torch.randint(0, 1 << bits, (16, many), generator=random, dtype=torch.uint8)
    zero = zero if zeros else torch.full_like(zero, 1 << (bits - 1))
    groups = torch.arange(96) // (96 // many)
    groups = groups[torch.randperm(96, generator=random)] if by_activation else groups
    raw = {**GPTQ, "bits": bits, "group_size": size, "sym": not zeros}
    layout = stored(raw).layout("layers.0.mlp.up_proj")
    assert layout is not None
    found = gptq_file(numbers, scale, zero, groups, 1, bits)
    expect(layout, found, k=96)
    weight = layout.read(found, (16, 96), "w")
    assert isinstance(weight, Tensor) == (bits == 8)
    plain = weight if isinstance(weight, Tensor) else weight.check("w").dequantize()
    assert torch.equal(plain, by_hand(numbers, scale, zero, groups))


def expect(layout: Layout, found: Mapping[str, Tensor], n: int = 16, k: int = 64) -> None:
    """The layout asks for just the tensors that there are; any float may stand for float32."""
    wanted = layout.tensors(n, k, "w")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (shape, _) in wanted.items()
    }
    for name, (_, dtype) in wanted.items():
        assert found[name].dtype == dtype or dtype == torch.float32, name


def test_awq() -> None:
    numbers, scale, zero = parts_of()
    layout = Layout("awq", Scheme("awq", "int4", "group", group=32, zeros=True), "scales")
    found = {
        "qweight": awq_words(numbers.t().contiguous()),
        "qzeros": awq_words(zero.t().contiguous()),
        "scales": scale.t().contiguous(),
    }
    expect(layout, found)
    weight = layout.read(found, (16, 64), "w").check("w")
    assert torch.equal(weight.dequantize(), by_hand(numbers, scale, zero, torch.arange(64) // 32)), (
        "layer w of an AWQ file: columns or zero points are not where its words have them"
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("by_activation", [False, True])
def test_pack_quantized(zeros: bool, by_activation: bool) -> None:
    numbers, scale, zero = parts_of(zeros=zeros)
    groups = (torch.arange(64) // 32).flip(0) if by_activation else torch.arange(64) // 32
    scheme = Scheme("packed", "int4", "group", group=32, zeros=zeros)
    layout = Layout("packed", scheme, by_activation=by_activation)
    found = {
        "weight_packed": pack_words(numbers, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor([16, 64]),
    }
    if zeros:
        found["weight_zero_point"] = pack_words(zero.t().contiguous(), 4).t().contiguous()
    if by_activation:
        found["weight_g_idx"] = groups.to(torch.int32)
    expect(layout, found)
    weight = layout.read(found, (16, 64), "w").check("w")
    assert torch.equal(weight.dequantize(), by_hand(numbers, scale, zero, groups))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_pack_quantized_as_compressed_tensors_reads_it(bits: int, zeros: bool) -> None:
    """Four bits by channel and eight bits by group, packed and unpacked by the library itself."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    many = 1 if bits == 4 else 2
    half = 1 << (bits - 1)
    random = torch.Generator().manual_seed(0)
    numbers = torch.randint(-half, half, (16, 64), generator=random, dtype=torch.int8)
    zero = torch.randint(-half, half, (16, many), generator=random, dtype=torch.int8) * zeros
    scale = torch.rand(16, many, generator=random)
    weights = {"num_bits": bits, "symmetric": not zeros, "strategy": "channel" if bits == 4 else "group"}
    raw = compressed(weights={**weights, "group_size": None if bits == 4 else 32})
    layout = stored(raw).layout("layers.0.mlp.up_proj")
    assert layout is not None
    found = {
        "weight_packed": pack_to_int32(numbers, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([16, 64]),
    }
    if zeros:
        found["weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0).contiguous()
    expect(layout, found)
    weight = layout.read(found, (16, 64), "w")
    plain = weight if isinstance(weight, Tensor) else weight.check("w").dequantize()
    assert torch.equal(plain, by_hand(numbers, scale, zero, torch.arange(64) // (64 // many)))


def test_pack_quantized_of_eight_bits() -> None:
    data = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    scale = torch.rand(16, 1)
    layout = Layout("packed", INT8)
    words = (data.int() + 128).to(torch.uint8)
    found = {
        "weight_packed": pack_words(words, 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor([16, 64]),
    }
    expect(layout, found)
    assert torch.equal(layout.read(found, (16, 64), "w").check("w").dequantize(), data.float() * scale)


DAMAGE: dict[str, tuple[str, str, Any, str]] = {
    "nan scales": ("awq", "scales", float("nan"), r"w\.scales holds NaN or infinity"),
    "infinite scales": ("awq", "scales", float("inf"), r"w\.scales holds NaN or infinity"),
    "negative scales": ("awq", "scales", -1.0, r"w\.scales holds negative scales"),
    "no such group": ("gptq", "g_idx", 2, r"w\.g_idx names groups outside of 0 to 1"),
    "a group below 0": ("gptq", "g_idx", -1, r"w\.g_idx names groups outside of 0 to 1"),
    "uneven groups": ("gptq", "g_idx", 0, r"w\.g_idx has groups that are not 32 inputs each"),
    "another shape": ("packed", "weight_shape", 64, r"w\.weight_shape says \[64, 64\], but the weight is"),
}


@pytest.mark.parametrize(("kind", "name", "value", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_by_the_tensors_name(kind: Any, name: str, value: Any, says: str) -> None:
    numbers, scale, zero = parts_of()
    scheme = Scheme(kind, "int4", "group", group=32, zeros=True)
    layout = Layout(kind, scheme, "weight_scale" if kind == "packed" else "scales")
    if kind == "gptq":
        found = gptq_file(numbers, scale, zero, torch.arange(64) // 32, 0)
    elif kind == "awq":
        found = {
            "qweight": awq_words(numbers.t().contiguous()),
            "qzeros": awq_words(zero.t().contiguous()),
            "scales": scale.t().contiguous(),
        }
    else:
        found = {
            "weight_packed": pack_words(numbers, 4),
            "weight_scale": scale,
            "weight_shape": torch.tensor([16, 64]),
            "weight_zero_point": pack_words(zero.t().contiguous(), 4).t().contiguous(),
        }
    layout.read(found, (16, 64), "w")  # or the refusal would say nothing
    found[name].view(-1)[40 if name == "g_idx" else 0] = value
    with pytest.raises(UserError, match=says):
        layout.read(found, (16, 64), "w")


def test_zero_points_that_the_configuration_denies() -> None:
    numbers, scale, zero = parts_of()
    layout = Layout("gptq", Scheme("gptq", "int4", "group", group=32), "scales")
    found = gptq_file(numbers, scale, zero, torch.arange(64) // 32, 0)
    with pytest.raises(UserError, match=r"w\.qzeros holds zero points, but the configuration says"):
        layout.read(found, (16, 64), "w")


def test_nan_among_fp8_numbers() -> None:
    data = torch.zeros(4, 16).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(UserError, match=r"w\.weight holds NaN"):
        Layout("plain", FP8).read({"weight": data, "weight_scale": torch.ones(4, 1)}, (4, 16), "w")


def test_a_group_that_does_not_divide_a_row() -> None:
    layout = Layout("awq", Scheme("awq", "int4", "group", group=128, zeros=True), "scales")
    with pytest.raises(UserError, match="w has rows of 576 weights, which groups of 128 do not divide"):
        layout.tensors(8, 576, "w")
    assert INT4.fitted(576, "w").group == 64, "rows of 576 take groups of 64: 128 does not divide them"
    assert INT4.fitted(1536, "w") is INT4
    assert INT4.fitted(48, "w").group == 16
    with pytest.raises(UserError, match="w has rows of 40 weights, which no group of 16 or more divides"):
        INT4.fitted(40, "w")


# What configurations say.

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
F8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(
    form: str = "pack-quantized", weights: Any = None, more: Any = None, **top: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}, **(more or {})}
    raw = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**raw, "config_groups": {"group_0": group}, **top}


QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}

KNOWN: dict[str, tuple[dict[str, Any], str, str, int, bool, str | None]] = {
    "Qwen3-8B-FP8": (QWEN, "fp8", "block", 0, False, "fp8"),
    "fp8 per tensor": ({**QWEN, "weight_block_size": None}, "fp8", "tensor", 0, False, "fp8"),
    "gptq": (GPTQ, "int4", "group", 128, False, None),
    "gptq, zeros": ({**GPTQ, "sym": False, "group_size": 32}, "int4", "group", 32, True, None),
    "awq": (AWQ, "int4", "group", 128, True, None),
    "packed": (compressed(), "int4", "group", 128, False, None),
    "packed, zeros": (compressed(weights={"symmetric": False}), "int4", "group", 128, True, None),
    "packed w8a16": (compressed(weights={**W8, "group_size": None}), "int8", "channel", 0, False, None),
    "w8a8": (
        compressed("int-quantized", {**W8, "group_size": None}, {"input_activations": TOKENS}),
        "int8",
        "channel",
        0,
        False,
        "int8",
    ),
    "fp8 channels": (
        compressed("float-quantized", F8, {"input_activations": {**TOKENS, "type": "float"}}),
        "fp8",
        "channel",
        0,
        False,
        "fp8",
    ),
    "naive fp8": (
        compressed("naive-quantized", {**F8, "strategy": "tensor"}),
        "fp8",
        "tensor",
        0,
        False,
        None,
    ),
}


@pytest.mark.parametrize(
    ("raw", "weights", "scales", "group", "zeros", "activations"), KNOWN.values(), ids=KNOWN
)
def test_known_configurations(
    raw: dict[str, Any], weights: str, scales: str, group: int, zeros: bool, activations: str | None
) -> None:
    found = stored(raw)
    assert found.layout("lm_head") is None, "the head is plain in all of these"
    layout = found.layout("layers.3.mlp.down_proj")
    assert layout is not None
    scheme = layout.scheme
    assert (scheme.weights, scheme.scales, scheme.group) == (weights, scales, group)
    assert scheme.zeros == zeros, f"the file says zero points: {zeros}, but it is read with {scheme.zeros}"
    assert scheme.activations == activations, f"inputs are {activations}, not {scheme.activations}"


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "a method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported, only fp8"),
    "static": ({**QWEN, "activation_scheme": "static"}, "activation_scheme is 'static', but only 'dynamic'"),
    "other blocks": ({**QWEN, "weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]"),
    "e5m2": ({**QWEN, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "gptq_v2 by its other name": ({**GPTQ, "format": "marlin"}, "format 'marlin' is not supported"),
    "rotated": ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard', but is not supported"),
    "marlin's own": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True, but is not supported"),
    "an order": (compressed(weights={"actorder": "foo"}), "actorder is 'foo', but must be group, weight"),
    "scales of powers": (compressed(weights={"scale_dtype": "float8_e8m0fnu"}), "scale_dtype 'float8_e8m0"),
    "a field of weights": (compressed(weights={"num_bitz": 3}), "weights.'num_bitz' is not known, only num"),
    "a field of a group": (compressed(more={"hadamard": True}), "'hadamard' is not known, only targets"),
    "a field of inputs": (
        compressed("int-quantized", {**W8}, {"input_activations": {**TOKENS, "clip": 3}}),
        "input_activations.'clip' is not known",
    ),
    "gptq of 3 bits": ({**GPTQ, "bits": 3}, "gptq: bits is 3, but only 4 and 8"),
    "awq of 8 bits": ({**AWQ, "bits": 8}, "awq: bits is 8, but only 4"),
    "another group": ({**GPTQ, "group_size": 100}, "group_size is 100, but must be -1, for a whole row, or"),
    "two groups": ({**GPTQ, "q_group_size": 64}, "group_size is 128, but q_group_size 64 means the same"),
    "dynamic bits": ({**GPTQ, "dynamic": {"+:.*q_proj": {"bits": 3}}}, "bits is 3, but only 4 and 8"),
    "a slow rule": ({**GPTQ, "dynamic": {"-:(a+)+": {}}}, "dynamic .* is too involved"),
    "a rule of nothing": ({**GPTQ, "dynamic": {".*": 3}}, "dynamic '.*' is 3, but must be an object"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version is 'gemv', but only 'gemm'"),
    "awq without zeros": ({**AWQ, "zero_point": False}, "zero_point is False, but only True"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24"}), "sparsity_config is .* not supported"),
    "marlin-24": (compressed("marlin-24"), "format 'marlin-24' is not supported"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported"),
    "no groups": ({"quant_method": "compressed-tensors"}, "there is no field 'config_groups'"),
    "2 bits": (compressed(weights={"num_bits": 2}), "weights of 2 bits and type int are not supported"),
    "4-bit floats": (compressed(weights={"type": "float"}), "weights of 4 bits and type float"),
    "4 bits by tensor": (
        compressed(weights={"strategy": "tensor"}),
        "int4 weights with a scale for each tensor",
    ),
    "8 bits by group, not packed": (
        compressed("int-quantized", weights={"num_bits": 8}),
        "int8 weights with a scale for each group",
    ),
    "int8 zeros": (
        compressed("int-quantized", {**W8, "symmetric": False}),
        "zero points are supported for int4 only, not int8",
    ),
    "static activations": (
        compressed("int-quantized", W8, {"input_activations": {**TOKENS, "dynamic": False}}),
        "input_activations must be of 8 bits, symmetric and dynamic",
    ),
    "activations by tensor": (
        compressed("int-quantized", W8, {"input_activations": {**TOKENS, "strategy": "tensor"}}),
        "input_activations.strategy 'tensor' is not supported",
    ),
    "mixed activations": (
        compressed("int-quantized", W8, {"input_activations": {**TOKENS, "type": "float"}}),
        "int8 weights with fp8 activations",
    ),
    "outputs": (compressed(more={"output_activations": TOKENS}), "output_activations are not supported"),
    "kv by head": (
        compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "attn_head"}),
        "kv_cache_scheme is .*, but only 8 static bits for each tensor",
    ),
    "a wrong pattern": (compressed(ignore=["re:["]), "ignore 're:.*' is no regular expression"),
    "a slow pattern": (compressed(ignore=["re:(a+)+$"]), "ignore .* is too involved"),
    "many repeats": (compressed(ignore=["re:.*a.*a.*a.*a.*b"]), "ignore .* is too involved"),
    "a pattern that is none": (compressed(ignore=[3]), "ignore is 3, but must be a string"),
    "frozen": (compressed(quantization_status="frozen"), "quantization_status is 'frozen'"),
}


def test_the_second_version_of_gptq_by_either_name() -> None:
    for name in ("checkpoint_format", "format"):
        for version, less in (("gptq", True), ("gptq_v2", False)):
            layout = stored({**GPTQ, "sym": False, name: version}).layout("layers.0.mlp.up_proj")
            assert layout is not None and layout.one_less == less, f"{name} {version} is read as the other"


@pytest.mark.parametrize(("raw", "says"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        stored(raw)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_names() -> None:
    assert matches("model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj")
    assert matches("re:.*down_proj", "layers.0.mlp.down_proj")
    assert matches("re:model\\.layers\\.1\\..*", "layers.1.mlp.down_proj")
    assert not matches("re:model\\.layers\\.1\\..*", "layers.11.mlp.down_proj")
    assert not matches("model.layers.0.mlp", "layers.0.mlp.up_proj"), "part of a name is no name"
    assert matches("lm_head", "lm_head")
    apart = compressed(ignore=["re:.*mlp.*"])
    assert stored(apart).layout("layers.0.mlp.up_proj") is None
    assert stored(apart).layout("layers.0.self_attn.q_proj") is not None


@pytest.mark.parametrize("part", ["self_attn", "model.layers.0.", "layers.0.self_attn", "q_proj"])
def test_awq_leaves_out_layers_whose_names_have_a_part(part: str) -> None:
    found = stored({**AWQ, "modules_to_not_convert": [part]})
    assert found.layout("layers.0.self_attn.q_proj") is None
    assert found.layout("layers.10.mlp.up_proj") is not None


@pytest.mark.parametrize("part", ["model.layers.0", "model.layers.0.mlp.gate_proj", "mlp.gate_proj"])
def test_fp8_leaves_out_layers_whose_names_begin_or_end_so(part: str) -> None:
    found = stored({**QWEN, "modules_to_not_convert": [part]})
    assert found.layout("layers.0.mlp.gate_proj") is None
    assert found.layout("layers.10.mlp.up_proj") is not None


def test_the_first_rule_of_gptq_that_matches_decides() -> None:
    """As GPTQModel applies them: `-:` leaves a layer plain, anything else changes fields for it."""
    rules = {
        r"-:.*\.1\.mlp\.up_proj": {},
        r"+:model\.layers\.1\..*mlp": {"bits": 8, "group_size": 32},
        r".*\.(?:q|k)_proj": {"group_size": -1, "sym": False},
        r"-:.*mlp": {},
    }
    found = stored({**GPTQ, "dynamic": rules})
    assert found.layout("layers.1.mlp.up_proj") is None and found.layout("layers.2.mlp.up_proj") is None
    down, query, value = (
        found.layout(f"layers.1.{name}") for name in ("mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj")
    )
    assert down is not None and query is not None and value is not None
    assert down.eight and down.scheme.group == 32 and not down.scheme.zeros
    assert query.row and query.scheme.zeros and not query.eight
    assert not value.row and value.scheme.group == 128 and not value.eight


def test_gptq_may_name_the_layers_that_are_quantized() -> None:
    found = stored({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert found.layout("layers.0.mlp.up_proj") is not None
    assert found.layout("layers.0.mlp.down_proj") is None


def test_named_layers_come_before_all_layers() -> None:
    raw = compressed()
    raw["config_groups"]["group_1"] = {
        "targets": ["re:.*q_proj$"],
        "weights": {**WEIGHTS, "group_size": 32},
    }
    found = stored(raw)
    groups = [
        layout.scheme.group
        for name in ("q_proj", "k_proj")
        if (layout := found.layout(f"layers.0.self_attn.{name}")) is not None
    ]
    assert groups == [32, 128], f"q_proj is named with groups of 32, k_proj is not, but they have {groups}"


# Products.


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 32, 33, 70])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("n", "bias"), [(24, False), (32, True)])
def test_a_product_is_that_of_the_weights_it_stands_for(name: str, tokens: int, n: int, bias: bool) -> None:
    k = 256
    layer = QuantLinear(made(name, n, k), torch.randn(n) if bias else None)
    x = torch.randn(2, tokens, k) if tokens == 2 else torch.randn(tokens, k)
    want = layer.exact(x)
    layer.settle()
    got = layer(x)
    assert got.shape == want.shape and got.dtype == x.dtype
    # Some routines round inputs, and offsets of groups, to bfloat16.
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst < 1.5e-2, f"{name}, {tokens} tokens: off by {worst:.1e} of the largest output"
    assert torch.equal(layer.exact(x), want), f"{name}: the weight is another one in its fastest form"


@pytest.mark.parametrize("k", [8, 40, 130, 200])
def test_rows_that_the_routine_for_few_would_read_beyond(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads 16 inputs at a time. Beyond the end is other memory, or none: then the process dies."""
    routine = torch._weight_int8pack_mm

    def careful(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        assert data.shape[1] % 16 == 0, f"rows of {data.shape[1]}"
        return routine(x, data, scale)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", careful)
    layer = QuantLinear(made("int8", 24, k))
    for tokens in (1, 8):
        x = torch.randn(tokens, k)
        want = layer.exact(x)
        assert torch.allclose(layer(x), want, atol=1e-2 * float(want.abs().max()))


def test_sixteen_bits_of_an_input_go_through_two_products() -> None:
    layer = QuantLinear(made("int8", 24, 256))
    x = torch.randn(16, 256)
    want = layer.exact(x)
    worst = float((layer(x) - want).abs().max() / want.abs().max())
    assert worst < 1e-4, (
        f"16 tokens: off by {worst:.1e} of the largest output: eight bits of the input are lost"
    )
    alone = torch.cat([cpu.int8_product(row.expand(16, -1), layer.data, layer.scale)[:1] for row in x])
    assert torch.equal(cpu.int8_product(x, layer.data, layer.scale), alone), (
        "neighbours change a token's result"
    )


def test_every_fp8_number_is_itself_in_bfloat16() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 127) != 127].view(torch.float8_e4m3fn)  # without NaN
    found = cpu.e4m3_to_bfloat16(numbers)
    assert torch.equal(found.float(), numbers.float()), "a number has changed"


def test_four_bits_take_no_second_copy() -> None:
    layer = QuantLinear(made("int4", 64, 256))
    before = layer.weight
    size = sum(buffer.nbytes for buffer in layer.buffers())
    layer.settle()
    after = sum(buffer.nbytes for buffer in layer.buffers())
    assert after <= size * 1.1, f"a layer of {size} bytes takes {after} in its fastest form"
    assert torch.equal(layer.weight.data, before.data) and torch.equal(layer.weight.scale, before.scale)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_tokens_have_scales_of_their_own(kind: Any) -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1e4])[:, None]
    numbers, scale = quantize_tokens(x, kind)
    assert scale.shape == (5, 1) and torch.isfinite(numbers.float()).all()
    back = rounded(x, kind)
    for row, (a, b) in enumerate(zip(x, back, strict=True)):
        worst = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        assert worst < (1 / 16 if kind == "fp8" else 1 / 250), (
            f"token {row} is off by {worst:.3f} of its largest"
        )
    assert torch.equal(rounded(x, None), x)


def test_layers_end_to_end_with_biases() -> None:
    layers = [QuantLinear(made("int8", n, 64, n), torch.randn(n)) for n in (16, 8)]
    x = torch.randn(3, 64)
    want = torch.cat([layer(x) for layer in layers], dim=-1)
    assert torch.allclose(end_to_end(layers)(x), want, atol=1e-5)
    assert not joinable([layers[0], QuantLinear(made("int8", 8, 64))]), "one has a bias, one has none"


def test_schemes_that_no_layer_can_have() -> None:
    for wrong, says in (
        ({"weights": "int4", "scales": "channel"}, "int4 weights with a scale for each channel"),
        ({"weights": "int8", "scales": "group", "group": 64}, "int8 weights with a scale for each group"),
        ({"weights": "int4", "scales": "group", "group": 100}, "group_size is 100, but must be one of"),
        ({"weights": "fp8", "scales": "channel", "zeros": True}, "zero points are supported for int4 only"),
        ({"weights": "int8", "scales": "tensor"}, "int8 weights need a scale for each channel"),
    ):
        with pytest.raises(UserError, match=f"x: {says}"):
            Scheme("x", **wrong)  # type: ignore[arg-type]
    assert set(SCHEMES) == {"fp8", "fp8-weights", "fp8-block", "int8", "w8a8", "int4"}

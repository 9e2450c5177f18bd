"""Phase 10: a quantized weight in memory, and products of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from quant.cpu import CpuLinear, has_routine
from quant.formats import FP8, FP8_BLOCK, INT4, INT8, SCHEMES, W8A8, Scheme
from quant.linear import QuantLinear
from quant.rtn import quantize, quantize_tokens, rounded
from quant.weights import QuantizedWeight, pack_nibbles, unpack_nibbles
from tests.quant_kit import checked, matrix

INT4_ZEROS = Scheme("int4, zeros", "int4", "group", group=32, zeros=True)
SHAPES = [(8, 32), (24, 64), (130, 256), (128, 384), (3, 576)]
ALL = {
    "fp8": FP8,
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


def made(name: str, n: int = 24, k: int = 64, seed: int = 0) -> QuantizedWeight:
    return quantize(matrix(n, k, seed), ALL[name].fitted(k, "a layer"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_weight_comes_back_within_a_step(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, found = matrix(n, k), made(name, n, k)
    assert found.shape == shape
    back = checked(found).dequantize()
    assert back.shape == shape and back.dtype == torch.float32
    worst = float((back - weight).abs().max() / weight.abs().max())
    assert worst <= STEP[found.scheme.weights], (
        f"{name} at {shape}: off by {worst:.3f} of the largest weight"
    )
    size, least = (
        sum(part.nbytes for part in vars(found).values() if isinstance(part, torch.Tensor)),
        5 if found.scheme.bits == 4 else 3,
    )
    assert size < weight.nbytes / least


@pytest.mark.parametrize("name", ["fp8", "block", "int8", "w8a8"])
def test_what_was_rounded_once_is_not_rounded_again(name: str) -> None:
    """The largest is a number of the format, and so is its scale."""
    once = made(name).dequantize()
    again = quantize(once, made(name).scheme).dequantize()
    assert torch.allclose(once, again, atol=1e-6), (
        f"{name}: off by up to {(once - again).abs().max()}"
    )


@pytest.mark.parametrize("name", ALL)
def test_a_row_of_zeros_stays_one(name: str) -> None:
    weight = matrix(128, 256)
    weight[5] = 0
    back = quantize(weight, ALL[name].fitted(256, "w"), torch.float16).dequantize()
    assert torch.isfinite(back).all(), f"{name}: 0 / 0"
    assert bool((back[5] == 0).all()), f"{name}: a row of zeros came back as something else"


def test_nibbles() -> None:
    numbers = torch.arange(32, dtype=torch.uint8).remainder(16).view(2, 16)
    packed = pack_nibbles(numbers)
    assert packed[0].tolist()[:2] == [0x10, 0x32], "the even input lies in the low nibble"
    assert torch.equal(unpack_nibbles(packed), numbers)


@pytest.mark.parametrize("name", ALL)
def test_joined_parts_keep_their_scales(name: str) -> None:
    parts = [made(name, n, 256, seed) for seed, n in enumerate((128, 128, 64))]
    assert parts[0].can_concatenate(parts[1])
    whole = QuantizedWeight.cat(parts)
    apart = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(whole.dequantize(), apart), f"{name}: joining changed a weight"


def test_parts_that_do_not_go_together_stay_apart() -> None:
    assert not made("int8").can_concatenate(made("fp8")), "other numbers"
    assert not made("int4", k=64).can_concatenate(made("int4 32", k=64)), "other groups"
    assert not made("block", 100, 256).can_concatenate(made("block", 128, 256)), (
        "a block would hold rows of both"
    )
    order = torch.arange(64).flip(0)
    turned = QuantizedWeight(
        made("int4").scheme, made("int4").data, made("int4").scale, order=order
    )
    assert not turned.can_concatenate(made("int4")) and turned.can_concatenate(turned)
    plain = torch.nn.Linear(64, 8)
    assert QuantLinear.joined(QuantLinear(made("int8")), plain) is None


# Products.


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 32, 33, 70])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("n", "bias"), [(24, False), (32, True)])
def test_a_product_is_that_of_the_weights_it_stands_for(
    name: str, tokens: int, n: int, bias: bool
) -> None:
    k = 256
    plain = QuantLinear(made(name, n, k), torch.randn(n) if bias else None)
    layer = CpuLinear(plain) if has_routine(plain.scheme, n) else plain
    x = torch.randn(2, tokens, k) if tokens == 2 else torch.randn(tokens, k)
    want = plain.exact(x)
    got = layer(x)
    assert got.shape == want.shape and got.dtype == x.dtype
    # Some routines round inputs, and offsets of groups, to bfloat16.
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst < 1.5e-2, f"{name}, {tokens} tokens: off by {worst:.1e} of the largest output"
    assert torch.equal(layer.exact(x), want), (
        f"{name}: the weight is another one in its fastest form"
    )


@pytest.mark.parametrize("k", [8, 40, 130, 200])
def test_rows_that_the_routine_for_few_would_read_beyond(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads 16 inputs at a time. Beyond the end is other memory, or none: then the process dies."""
    routine = torch._weight_int8pack_mm

    def careful(x: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        assert data.shape[1] % 16 == 0, f"rows of {data.shape[1]}"
        return routine(x, data, scale)

    monkeypatch.setattr(torch, "_weight_int8pack_mm", careful)
    layer = CpuLinear(QuantLinear(made("int8", 24, k)))
    for tokens in (1, 8):
        x = torch.randn(tokens, k)
        want = layer.exact(x)
        assert torch.allclose(layer(x), want, atol=1e-2 * float(want.abs().max()))


def test_four_bits_take_no_second_copy() -> None:
    plain = QuantLinear(made("int4", 64, 256))
    before = plain.weight
    size = sum(buffer.nbytes for buffer in plain.buffers())
    layer = CpuLinear(plain)
    after = sum(buffer.nbytes for buffer in layer.buffers())
    assert after <= size * 1.1, f"a layer of {size} bytes takes {after} in its fastest form"
    assert torch.equal(layer.weight.data, before.data) and torch.equal(
        layer.weight.scale, before.scale
    )


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_tokens_have_scales_of_their_own(kind: Any) -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1e4])[:, None]
    numbers, scale = quantize_tokens(x, kind)
    assert scale.shape == (5, 1) and torch.isfinite(numbers.float()).all()
    back = rounded(x, kind)
    for row, (a, b) in enumerate(zip(x, back, strict=True)):
        worst = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        most = 1 / 16 if kind == "fp8" else 1 / 250
        assert worst < most, f"token {row} is off by {worst:.3f} of its largest"
    assert torch.equal(rounded(x, None), x)


def test_layers_end_to_end_with_biases() -> None:
    layers = [QuantLinear(made("int8", n, 64, n), torch.randn(n)) for n in (16, 8)]
    x = torch.randn(3, 64)
    want = torch.cat([layer(x) for layer in layers], dim=-1)
    joined = QuantLinear.joined(*layers)
    assert joined is not None and torch.allclose(joined(x), want, atol=1e-5)
    one_bias = QuantLinear.joined(layers[0], QuantLinear(made("int8", 8, 64)))
    assert one_bias is None, "one has a bias, one has none"


def test_schemes_that_no_layer_can_have() -> None:
    for wrong, says in (
        (
            {"weights": "int4", "scales": "channel"},
            "int4 weights with a scale for each channel",
        ),
        (
            {"weights": "int8", "scales": "group", "group": 64},
            "int8 weights with a scale for each group",
        ),
        (
            {"weights": "int4", "scales": "group", "group": 100},
            "group_size is 100, but must be one of",
        ),
        (
            {"weights": "fp8", "scales": "channel", "zeros": True},
            "zero points are supported for int4 only",
        ),
        (
            {"weights": "int8", "scales": "block"},
            "int8 weights with a scale for each block are not supported",
        ),
    ):
        with pytest.raises(UserError, match=f"x: {says}"):
            Scheme("x", **wrong)  # type: ignore[arg-type]
    assert set(SCHEMES) == {"fp8", "fp8-weights", "fp8-block", "int8", "w8a8", "int4"}

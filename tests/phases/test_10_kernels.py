"""Phase 10's kernels against dequantize-then-multiply in float32, in the interpreter or natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.formats import Scheme
from quant.kernel_layers import KernelLinear
from quant.products import round_rows
from quant.rtn import quantize_tokens
from tests.quant_layers import DEVICE, DTYPE, assert_close, layer_of, named

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.slow,
]  # a minute in the interpreter


@named
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 48, 256), (40, 32, 384), (3, 80, 1152)])
def test_a_product_is_that_of_the_dequantized_weight(
    scheme: Scheme, tokens: int, n: int, k: int, rng: torch.Generator
) -> None:
    plain = layer_of(scheme, n, k, rng, bias=n == 32)
    x = torch.randn(tokens, k, device=DEVICE, generator=rng).to(DTYPE)
    layer = KernelLinear(plain)
    assert_close(layer(x), plain.exact(x), f"{scheme.name}, {tokens} tokens times [{n}, {k}]")
    kept = layer.weight
    for name, tensor in vars(plain.weight).items():
        if isinstance(tensor, Tensor):
            assert torch.equal(getattr(kept, name).float(), tensor.float()), (
                f"{name} is kept as it was"
            )


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("size", [40, 256])
def test_rows_are_rounded_as_the_lesson_does_it(
    kind: str, size: int, rng: torch.Generator
) -> None:
    x = torch.randn(7, size, device=DEVICE, generator=rng).to(DTYPE)
    x[2] = 0  # a token of zeros
    x[3, 0] = 1000.0
    values, scale = round_rows(x, kind)  # type: ignore[arg-type]
    wanted, wanted_scale = quantize_tokens(x, kind)  # type: ignore[arg-type]
    assert torch.equal(scale, wanted_scale[:, 0]), "scales"
    assert torch.equal(values.float(), wanted.float()), "numbers"

"""Phase 10 as a whole: loading, engines, keys and values, and methods."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from benchmarks.fidelity import compare, difference
from common.errors import UserError
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.model import Model
from forward.surgery import clone
from paged_cache.attention import encode
from paged_cache.memory import weight_bytes
from quant import awq, gptq, rtn
from quant.formats import INT4, SCHEMES
from quant.kv import KV_DTYPES, head_scales, sample
from quant.linear import QuantLinear
from quant.loading import Quantize
from tests.quant_kit import PARAMS, PROMPTS, SMALL, checked, exactly, logits
from tests.quant_kit import folders as folders


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model("random:tiny", device="cpu", dtype="float32")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loading_gives_what_rounding_a_loaded_model_gives(
    folders: dict[str, Path], scheme: str
) -> None:
    made = Quantize(SCHEMES[scheme], SCHEMES["int8"])
    loaded = load_model(
        str(folders["qwen2"]), device="cpu", dtype="float32", weight_loader=made
    )
    plain = load_model(str(folders["qwen2"]), device="cpu", dtype="float32")
    after = load_model(plain, weight_loader=made)
    assert after is not plain and not any(
        isinstance(layer, QuantLinear) for layer in plain.modules()
    )
    layers = {
        name: layer for name, layer in loaded.named_modules() if isinstance(layer, QuantLinear)
    }
    assert len(layers) == 2 * 7 + 1, "every linear layer, and the head"
    for name, layer in layers.items():
        other = after.get_submodule(name)
        assert isinstance(other, QuantLinear)
        assert torch.equal(layer.weight.dequantize(), other.weight.dequantize()), name
        assert not any(tensor.is_meta for tensor in (*layer.buffers(), *layer.parameters())), (
            name
        )
    assert torch.equal(logits(loaded), logits(after))


def test_never_two_copies_of_the_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a layer's weight is quantized, none of those before it is alive as it was."""
    import quant.loading

    plain: list[int] = []
    real = quant.loading.quantized

    def watched(weight: Tensor, scheme: Any, name: str) -> Any:
        model = models[0]
        layers = [each for each in model.named_modules() if isinstance(each[1], nn.Linear)]
        plain.append(
            sum(not layer.weight.is_meta and other != name for other, layer in layers)
        )
        return real(weight, scheme, name)

    models: list[Any] = []

    class Watching(Quantize):
        def expect(self, model: Model) -> None:
            models.append(model)
            super().expect(model)

    monkeypatch.setattr(quant.loading, "quantized", watched)
    both = Watching(SCHEMES["int8"], SCHEMES["int8"])
    load_model(str(folders["llama"]), device="cpu", dtype="float32", weight_loader=both)
    assert plain == [0] * 15, f"plain layers alive while each layer was quantized: {plain}"


def test_the_callers_model_stays_as_it_is(tiny: Model) -> None:
    before = {name: id(part) for name, part in tiny.named_modules()}
    engine = quant.load(tiny, quantization="int4", **SMALL)
    assert {name: id(part) for name, part in tiny.named_modules()} == before
    assert engine.memory_plan.weights < weight_bytes(tiny) / 2
    assert quant.load(tiny, **SMALL).runner.model is tiny, (
        "nothing to do, so nothing is copied"
    )


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a scheme": (
        {"quantization": "int3"},
        "quantization is 'int3', but must be .*did you mean 'int",
    ),
    "a group": ({"group_size": 100}, "group_size is 100, but must be one of 16, 32"),
    "keys": ({"kv_cache": "fp4"}, "kv_cache is 'fp4', but must be one of none, fp8, int8"),
    "off": (
        {"quant": False, "quantization": "int8"},
        "quantization is 'int8', but quant is off on cpu",
    ),
}


@pytest.mark.parametrize(("options", "says"), OPTIONS.values(), ids=OPTIONS)
def test_wrong_options(tiny: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        quant.load(tiny, **options, **SMALL)


# Engines: all ways give the same tokens.

SUBSETS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "chunked_prefill": False},
    {"chunk_tokens": 5, "step_tokens": 9, "prefix_cache": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "fp8", "int8"])
@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "w8a8", "int4"])
def test_every_way_gives_the_same_tokens(tiny: Model, scheme: str | None, kv: str) -> None:
    found = []
    for subset in SUBSETS:
        engine = quant.load(tiny, quantization=scheme, kv_cache=kv, **{**SMALL, **subset})
        found.append([completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)])
        assert found[-1] == found[0], f"{scheme} with {kv} keys: {subset} gives other tokens"
        engine.check_integrity()
        assert engine.cache.free == engine.cache.allocator.count, f"blocks leak with {subset}"


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("TRITON_INTERPRET"), reason="needs triton's interpreter"
)
@pytest.mark.parametrize(
    ("scheme", "kv"), [("fp8", "none"), ("int8", "none"), ("w8a8", "fp8"), ("int4", "int8")]
)
def test_kernels_give_the_same_tokens(
    tiny: Model, scheme: str, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the definition: kernels multiply in float32, a CPU's own routines in bfloat16."""
    params = replace(PARAMS[0], max_tokens=3)
    formats = {"quantization": scheme, "kv_cache": kv}
    with monkeypatch.context() as exact:
        exact.setattr("quant.cpu.install", lambda model: None)
        (wanted,) = quant.load(tiny, **formats, **SMALL).generate(PROMPTS[:1], params)
    engine = quant.load(tiny, **formats, kernels=True, graphs=False, **SMALL)
    assert not any(isinstance(part, nn.Linear) for part in engine.runner.model.modules()), (
        "a plain layer"
    )
    (found,) = engine.generate(PROMPTS[:1], params)
    assert found.token_ids == wanted.token_ids, f"request 0, {scheme} with {kv} keys"


# Keys and values.


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_scales_hold_what_was_seen(tiny: Model, kind: str) -> None:
    scales = head_scales(tiny, [sample(tiny)], kind)
    assert scales.shape == (2, 2, 3) and bool((scales > 0).all())
    seen: dict[tuple[int, int], Tensor] = {}

    class Spy(RecomputeAttention):
        def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen[layer.index, 0], seen[layer.index, 1] = k, v
            return super().__call__(layer, q, k, v)

    ids = torch.tensor(sample(tiny))
    with torch.no_grad():
        tiny(ids, torch.arange(len(ids)), Spy())
    for (layer, side), x in seen.items():
        stored = (
            encode(x, scales[layer, side], KV_DTYPES[kind]).float()
            * scales[layer, side][:, None]
        )
        worst = float(((x - stored).abs() / x.abs().amax((0, 2))[:, None]).max())
        most = 1 / 16 if kind == "fp8" else 1 / 200
        assert worst < most, f"layer {layer}, side {side}: off by {worst:.3f}"


# Methods.


def problem(n: int = 32, k: int = 128, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs with outliers that move together, and the inputs' matrix."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    x = torch.randn(1024, k, generator=generator) @ mix
    x[:, ::17] *= 12
    return torch.randn(n, k, generator=generator), x, x.t() @ x / len(x)


def loss(weight: Tensor, found: Tensor, x: Tensor) -> float:
    return float(((x @ (found - weight).t()) ** 2).mean())


@pytest.mark.parametrize("k", [128, 384])
def test_gptq_loses_less_than_rounding_to_nearest(k: int) -> None:
    weight, x, hessian = problem(k=k)
    scheme = quant.Scheme("x", "int4", "group", group=32)
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    kept = weight.clone(), hessian.clone()
    found = checked(gptq.quantize(weight, hessian, scheme))
    assert torch.equal(weight, kept[0]) and torch.equal(hessian, kept[1]), (
        "its inputs were changed"
    )
    got = loss(weight, found.dequantize(), x)
    assert got < nearest / 2, f"GPTQ loses {got:.4f}, rounding to nearest {nearest:.4f}"
    if k > gptq.COLUMNS:
        within = loss(weight, blockwise(weight, hessian, scheme), x)
        assert got < within, (
            f"errors beyond a block of columns are not passed on: {got:.4f}, {within:.4f}"
        )


def test_awq_loses_less_than_rounding_to_nearest() -> None:
    weight, x, hessian = problem()
    scheme = quant.Scheme("x", "int4", "group", group=32)
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    scales = awq.input_scales([weight], hessian, scheme)
    found = checked(awq.quantize(weight * scales, hessian.diagonal() / scales**2, scheme))
    got = loss(weight, found.dequantize() / scales, x)
    assert got < nearest / 1.2, f"AWQ loses {got:.4f}, rounding to nearest {nearest:.4f}"


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_gptq_of_eight_bits(name: str) -> None:
    weight, x, hessian = problem(k=256)
    scheme = SCHEMES[name]
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    found = checked(gptq.quantize(weight, hessian, scheme))
    got = loss(weight, found.dequantize(), x)
    assert got < nearest / 2, (
        f"{name}: GPTQ loses {got:.5f}, rounding to nearest {nearest:.5f}"
    )


def blockwise(weight: Tensor, hessian: Tensor, scheme: Any) -> Tensor:
    """GPTQ whose blocks of columns know nothing of each other."""
    order = hessian.diagonal().argsort(descending=True)
    apart = torch.zeros_like(hessian)
    for members in order.split(gptq.COLUMNS):
        apart[members[:, None], members] = hessian[members[:, None], members]
    return gptq.quantize(weight, apart, scheme).dequantize()


def test_gptq_is_what_its_definition_says() -> None:
    """Round an input, let the others change by what makes up best for it, leave it out; and so on."""
    weight, _, hessian = problem(8, 64)
    scheme = quant.Scheme("x", "int4", "group", group=32)
    scale = gptq.search_scales(weight, hessian.diagonal(), scheme, torch.float32)
    damped = hessian.double() + gptq.DAMPING * hessian.double().diagonal().mean() * torch.eye(
        64
    )
    columns, want = weight.double(), torch.zeros(8, 64)
    left = hessian.diagonal().argsort(descending=True)
    while len(left):
        inverse, first = damped[left][:, left].inverse(), int(left[0])
        step = scale[:, first // 32]
        want[:, first] = (
            rtn.to_nibbles(columns[:, first].float(), step, None).float() - 8
        ) * step
        error = (columns[:, first] - want[:, first]) / inverse[0, 0]
        columns[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    found = gptq.quantize(weight, hessian, scheme).dequantize()
    others = float(((found - want).abs() > 1e-4).float().mean())
    assert others < 0.03, (
        f"{others:.0%} of the weights are not those of the definition: errors go elsewhere"
    )


def test_gptq_without_correlations_is_rounding() -> None:
    """Inputs that never move together cannot make up for each other."""
    weight, _, _ = problem()
    scheme = quant.Scheme("x", "int4", "group", group=32)
    scale = gptq.search_scales(weight, torch.ones(128), scheme, torch.float32)
    want = rtn.to_nibbles(weight.view(32, -1, 32), scale[..., None], None).flatten(1)
    found = gptq.quantize(weight, torch.eye(128), scheme)
    assert torch.equal(quant.weights.unpack_nibbles(found.data), want)


def test_gptq_of_inputs_that_were_never_seen() -> None:
    weight, _, hessian = problem()
    hessian[:, 5] = hessian[5] = 0
    found = gptq.quantize(weight, hessian, INT4.with_group(32)).dequantize()
    assert torch.isfinite(found).all()
    assert bool((found[:, 5] == 0).all()), "input 5 was always 0, but its weights are kept"


# Quality by definition.


def test_quality_is_of_the_whole_text(tiny: Model) -> None:
    """Against the definition: every window from nothing, every token but a window's first."""
    tokens = torch.randint(1, 200, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    other = Quantize(SCHEMES["int4"]).finish(clone(tiny))
    sums = torch.zeros(3, dtype=torch.float64)
    for at in (0, 32):
        ids = torch.tensor(tokens[at : at + 32])
        true, guess = (
            logits(exactly(model), ids)[:-1].log_softmax(-1) for model in (tiny, other)
        )
        sums += difference(true, guess, ids[1:])
    found = compare(tiny, [("int4", other, RecomputeAttention())], tokens, window=32)["int4"]
    assert found.kl == pytest.approx(float(sums[0]) / 62, rel=1e-3), (
        "the divergence is of other tokens"
    )
    assert found.perplexity == pytest.approx(float((sums[1] / 62).exp()), rel=1e-4)
    assert found.agreement == pytest.approx(float(sums[2]) / 62) and found.tokens == 62

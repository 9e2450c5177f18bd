"""Kernels for weights of few bits against dequantize-then-multiply in float32, interpreted or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.events import generate
from common.sampling.params import SamplingParams
from forward.attention import LayerSpec
from forward.loading import load_model
from phases import phase_named, registry
from phases.appendix.latency.layers import install as latency
from phases.appendix.latency.single_request import SingleRequestSplits
from phases.appendix.latency.tables import SingleRequestConfig
from phases.appendix.quant_kernels import gemv, gemv4
from phases.appendix.quant_kernels.configs import LoopConfig
from phases.appendix.quant_kernels.inputs import PendingScales, gated_rows, norm_rows
from phases.appendix.quant_kernels.layers import (
    EightBitBlock,
    QuantLatencyKernel,
    install,
)
from quant.formats import FP8, INT8, W8A8, Scheme
from quant.kernel_layers import KernelLinear
from quant.kernel_layers import install as kernels
from quant.linear import QuantLinear
from quant.loading import Quantize
from quant.rtn import rounded
from tests.compiling import spilled
from tests.quant_layers import CLOSE, DEVICE, DTYPE, assert_close, layer_of, named
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.layers import FusedAttention, optimize
from triton_paged_attention.linear import FusedLinear

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.slow,
]  # a minute in the interpreter


@named
@pytest.mark.parametrize(("gate", "dtype"), [(None, torch.float32), ("silu", DTYPE)])
def test_one_token_with_norm_gate_and_residual(
    scheme: Scheme, gate: str | None, dtype: torch.dtype, rng: torch.Generator
) -> None:
    n, k = 64, 640
    plain = layer_of(scheme, n, k, rng)
    x = torch.randn(1, k, device=DEVICE, generator=rng).to(DTYPE) * 30
    weight = torch.randn(k, device=DEVICE, generator=rng).to(dtype)
    rows = n // (1 if gate is None else 2)
    residual = torch.randn(1, rows, device=DEVICE, generator=rng).to(DTYPE)
    found = layered(plain)(x, norm=NormWeights(weight, 1e-5), gate=gate, residual=residual)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean() + 1e-5) * weight.float()
    out = plain.exact(normed.to(DTYPE))
    if gate is not None:
        out = F.silu(out[:, :rows]) * out[:, rows:]
    assert_close(found, out + residual.float(), f"{scheme.name}, one token")


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_kernels_for_few_bits_compile_for_a_gpu(capability: int) -> None:
    """The interpreter knows nothing of the instructions that make pairs of float16. Nor may they spill."""
    found = spilled(capability, "--quant")
    wanted = 6 if capability >= 90 else 4  # without e4m3
    assert len(found) == wanted and max(found) <= 16, (
        f"bytes that do not fit into registers: {found}"
    )


@named
@pytest.mark.parametrize(("gate", "block_k"), [(None, 512), ("silu", 128)])
def test_a_program_takes_row_after_row(
    scheme: Scheme,
    gate: str | None,
    block_k: int,
    rng: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three programs, whose last round ends in the middle of a tile; inputs of one tile, and of three."""
    n, k = 86, 384
    for module in (gemv, gemv4):
        monkeypatch.setattr(module, "loop_config", lambda *_: LoopConfig(4, block_k, each=1))
    monkeypatch.setattr(LoopConfig, "programs", lambda *_: 3)
    plain = layer_of(scheme, n, k, rng)
    x = torch.randn(1, k, device=DEVICE, generator=rng).to(DTYPE)
    rows = n // (1 if gate is None else 2)
    residual = torch.randn(1, rows, device=DEVICE, generator=rng).to(DTYPE)
    out = plain.exact(x)
    if gate is not None:
        out = F.silu(out[:, :rows]) * out[:, rows:]
    wanted = out + residual.float()
    found = layered(plain)(x, gate=gate, residual=residual)
    off = (found.float() - wanted).abs()[0] / wanted.abs().max()
    wrong = (~(off < CLOSE[DTYPE])).nonzero()[:, 0].tolist()  # nor may they be NaN
    assert not wrong, f"{scheme.name}: outputs {wrong} of {rows} are wrong; a round has 12"


def finished(pending: PendingScales) -> Tensor:
    """The product itself."""
    return (pending.values.float() * pending.rows[:, None] * pending.columns).to(DTYPE)


@pytest.mark.parametrize("kind", ["fp8", "int8", None])
def test_add_norm_and_round_take_a_pending_product(
    kind: str | None, rng: torch.Generator
) -> None:
    tokens, size = 5, 96
    x = torch.randn(tokens, size, device=DEVICE, generator=rng).to(DTYPE)
    values = torch.randn(tokens, size, device=DEVICE, generator=rng).to(DTYPE)
    rows = torch.rand(tokens, device=DEVICE, generator=rng) + 0.5
    columns = torch.rand(size, device=DEVICE, generator=rng) + 0.5
    norm = NormWeights(torch.randn(size, device=DEVICE, generator=rng).to(DTYPE), 1e-6)
    pending = PendingScales(values, rows, columns)
    total, found = norm_rows(x, pending, norm, kind)  # type: ignore[arg-type]
    wanted = x + finished(pending)
    assert_close(total, wanted, "the sum")
    wide = wanted.float()
    normed = (
        wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.float()
    ).to(DTYPE)
    if kind is None:
        assert isinstance(found, Tensor)
        assert_close(found, normed, "the norm")
    else:
        assert not isinstance(found, Tensor)
        step = 0.07 if kind == "fp8" else 0.01  # a number between two may go either way
        off = (
            (found.values.float() * found.scale[:, None] - rounded(normed.float(), kind))
            .abs()
            .max()
        )  # type: ignore[arg-type]
        assert off / normed.float().abs().max() < step, f"the rounded norm is off by {off}"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_gates_take_a_pending_product(kind: str, rng: torch.Generator) -> None:
    tokens, size = 4, 72
    values = torch.randn(tokens, 2 * size, device=DEVICE, generator=rng).to(DTYPE)
    rows = torch.rand(tokens, device=DEVICE, generator=rng) + 0.5
    columns = torch.rand(2 * size, device=DEVICE, generator=rng) + 0.5
    pending = PendingScales(values, rows, columns)
    found = gated_rows(pending, "silu", kind, DTYPE)  # type: ignore[arg-type]
    both = finished(pending).float()
    wanted = F.silu(both[:, :size]) * both[:, size:]
    off = (
        found.values.float() * found.scale[:, None] - wanted
    ).abs().max() / wanted.abs().max()
    assert off < 0.07, f"off by {off}"


@pytest.mark.parametrize("scheme", [FP8, W8A8, INT8], ids=lambda s: s.name)
@pytest.mark.parametrize("d", [16, 24])
def test_the_output_projection_combines_splits(
    scheme: Scheme, d: int, rng: torch.Generator
) -> None:
    heads = 6
    splits = 4
    size = 48
    layer = KernelLinear(layer_of(scheme, size, heads * d, rng))
    spec = LayerSpec(0, heads, 2, d, 1.0)
    d_pad = max(16, 1 << (d - 1).bit_length())
    workspace = Workspace(heads * splits * 2, d_pad, DEVICE)
    parts = torch.randn(splits, heads, d, device=DEVICE, generator=rng).to(DTYPE)
    logs = torch.randn(splits, heads, device=DEVICE, generator=rng)
    workspace.partial.view(DTYPE)[: splits * heads * d_pad].view(splits, heads, d_pad)[
        ..., :d
    ] = parts
    workspace.lse[: splits * heads * 2 : 2] = logs.flatten()
    residual = torch.randn(1, size, device=DEVICE, generator=rng).to(DTYPE)
    contexts = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    given = SingleRequestSplits(
        residual, spec, contexts, workspace, SingleRequestConfig(16, splits=splits)
    )
    combine = QuantLatencyKernel(layer).combiner()
    assert combine is not None
    found = combine(given, residual)
    weights = torch.softmax(logs * 0.6931471805599453, dim=0)[..., None]
    mixed = (parts.float() * weights).sum(0).to(DTYPE).view(1, -1)
    wanted = layered(QuantLinear(layer.weight, layer.bias))(mixed, residual=residual)
    assert_close(found, wanted, f"{scheme.name}, combined")


def layered(plain: QuantLinear) -> FusedLinear:
    """A layer by kernels with its way for one token."""
    linear = KernelLinear(plain)
    fused = FusedLinear(linear)
    fused.kernels.append(QuantLatencyKernel(linear))
    return fused


def test_attention_waits_for_the_first_layers_projection_alone() -> None:
    """Before its wait it reads what was written before that one; see `starts_early`."""
    model = load_model(
        "random:tiny", device=DEVICE, dtype="float32", weight_loader=Quantize(FP8, None)
    )
    blocks = install(kernels(latency(optimize(model)))).modules()
    first = [
        block.qkv_proj.kernels[0] for block in blocks if isinstance(block, FusedAttention)
    ]
    early = [
        kernel.trigger_early for kernel in first if isinstance(kernel, QuantLatencyKernel)
    ]
    assert early == [index > 0 for index in range(model.config.num_layers)], (
        f"layers whose weights are read before the wait: {early}"
    )


@pytest.mark.parametrize(
    "scheme", ["fp8", "w8a8", pytest.param("int8", marks=pytest.mark.long), "int4"]
)
def test_every_step_takes_a_way_and_gives_the_same_tokens(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts through blocks of eight bits where products are, and lone tokens through their kernel."""
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    counts = dict.fromkeys(("one", "block"), 0)
    for kind, name in ((QuantLatencyKernel, "one"), (EightBitBlock, "block")):
        call = kind.__call__

        def counted(
            self: Any, *given: Any, call: Any = call, name: str = name, **around: Any
        ) -> Any:
            counts[name] += 1
            return call(self, *given, **around)

        monkeypatch.setattr(kind, "__call__", counted)
    options: dict[str, Any] = {
        "kernels": True,
        "graphs": False,
        "rehearsal": False,
        "max_len": 64,
    }
    options |= {
        "max_rows": 2,
        "cache_bytes": 1 << 20,
        "quantization": scheme,
        "group_size": 32,
    }
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    made = []
    for on in (False, True):
        engine = registry.load_engine(phase_named("10"), model, quant_kernels=on, **options)
        assert on or not any(counts.values()), "a way is taken with the feature off"
        made.append([one.token_ids for one in generate(engine, [[5, 6, 7]], params)])
    assert made[0] == made[1], "tokens with the ways differ from those without"
    assert counts["one"] > 0 and (counts["block"] > 0) == (scheme in ("fp8", "w8a8")), (
        f"ways: {counts}"
    )

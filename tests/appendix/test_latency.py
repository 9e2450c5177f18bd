"""Kernels for one token, in the interpreter or natively on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import paged_cache
from common.events import generate
from common.sampling.params import SamplingParams
from forward.attention import LayerSpec
from forward.loading import load_model, random_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import LayerBlocks, PagedEngine
from phases import phase_named, registry
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.layers import LatencyBlock, LatencyKernel
from phases.appendix.latency.layers import install as latency
from phases.appendix.latency.output_projection import project_heads
from phases.appendix.latency.single_request import attend_step
from phases.appendix.latency.tables import SingleRequestConfig
from tests.head_sizes import HEADS, KV_HEADS, angles, by_torch, each_size
from tests.paged_batches import (
    DEVICE,
    FEATURES,
    GARBAGE,
    TOLERANCE,
    assert_near,
    expected,
    make,
    walled,
)
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms, norm_rope
from triton_paged_attention.layers import FusedBlock, optimize
from triton_paged_attention.linear import FusedLinear

pytestmark = pytest.mark.usefixtures("poison")


def engine_of(model: Model, **options: Any) -> PagedEngine:
    """Phase 09's engine with these ways, without graphs, which would only call them."""
    own = {"kernels": True, "latency": True, "graphs": False, "rehearsal": False}
    made = registry.load_engine(phase_named("09"), model, **own, **options)
    assert isinstance(made, PagedEngine)
    return made


def attention_over(batch: Any, cache: LayerBlocks, slots: torch.Tensor) -> Any:
    """Return what `attend_step` reads of an engine's attention: a layer's blocks and slots, and a batch."""
    seen = SimpleNamespace(block_tables=batch.tables, context_lens=batch.context_lens)
    return SimpleNamespace(place=lambda layer: (cache, slots), batch=seen)


@pytest.mark.parametrize(
    "wait_for_all_splits",
    [False, True],
    ids=["combined in the projection", "combined by the last"],
)
@pytest.mark.parametrize(
    ("feature", "heads", "context"),
    [
        *(("plain", (6, 2), context) for context in (0, 1, 15, 16, 17, 101)),
        *(("window", (6, 2), context) for context in (17, 101)),
        *(("plain", (3, 3), context) for context in (16, 101)),
    ],
)
@pytest.mark.slow
def test_attention_of_a_lone_token(
    context: int, heads: tuple[int, int], feature: str, wait_for_all_splits: bool
) -> None:
    """From the QKV projection to the residual, against the kernels apart, with poison all around."""
    d, size = 32, 24
    batch = make([max(context, 1)], heads=heads, d=d)
    if context == 0:  # a graph's padding: no keys, a slot below 0, a table of garbage
        batch.context_lens[0] = 0
        batch.tables[:] = GARBAGE
    window = FEATURES[feature].get("sliding_window")
    layer = LayerSpec(0, *heads, d, 0.2, window)  # type: ignore[arg-type]
    qkv = torch.randn(1, (heads[0] + 2 * heads[1]) * d, device=DEVICE)
    cos, sin = angles(1, d)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE), 1e-6)
    newest = max(context - 1, 0)
    slot = int(batch.tables[0, newest // 16]) * 16 + newest % 16 if context else -1
    slots = torch.tensor([slot], device=DEVICE)
    weight, residual = (
        torch.randn(size, heads[0] * d, device=DEVICE),
        torch.randn(1, size, device=DEVICE),
    )
    bias = torch.randn(size, device=DEVICE)
    cache = LayerBlocks(batch.cache.k.clone(), batch.cache.v.clone())
    q = norm_rope(layer, qkv, (cos, sin), batch.cache, slots, norms)
    attended = paged_decode(layer, q, *batch.arguments[1:])
    wanted = attended.flatten(1) @ weight.t() + bias + residual
    workspace = Workspace(400, d, DEVICE)
    config = SingleRequestConfig(block_n=16, splits=4)
    parts = attend_step(
        attention_over(batch, cache, slots),
        layer,
        qkv,
        (cos, sin),
        norms,
        workspace=workspace,
        config=config,
        wait_for_all_splits=wait_for_all_splits,
    )
    if wait_for_all_splits:
        got = parts.out @ weight.t() + bias + residual
        assert (workspace.arrived == 0).all(), (
            f"counters are left at {workspace.arrived[:8].tolist()}"
        )
    else:
        got = project_heads(residual, weight, bias, parts, rows=4, chunk=2)
    assert_near(
        got, wanted, 1e-5, f"{context} keys, {heads} heads, {feature}: output [token, number]"
    )
    for name, mine, theirs in zip(("keys", "values"), cache[:2], batch.cache[:2], strict=True):
        wrong = ~torch.isclose(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)
        slots = wrong.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
        what = f"{context} keys, {heads} heads, {feature}: {name} in slots"
        assert not slots, (
            f"{what} {slots} are wrong; the newest belongs in slot {slot}, padding nowhere"
        )


@each_size
@pytest.mark.parametrize(
    "wait_for_all_splits",
    [False, True],
    ids=["combined in the projection", "combined by the last"],
)
@pytest.mark.slow
def test_a_lone_token_with_heads_of_each_size(
    wait_for_all_splits: bool, d: int, dtype: torch.dtype
) -> None:
    """From the QKV projection through attention to the residual, 40 keys in three of four splits."""
    context, size = 40, 24
    batch = make([context], heads=(HEADS, KV_HEADS), d=d, dtype=dtype)
    layer = LayerSpec(0, HEADS, KV_HEADS, d, 0.2)
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * d, device=DEVICE, dtype=dtype)
    cos, sin = angles(1, d)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE), 1e-6)  # float32, as Gemma's
    weight = torch.randn(size, HEADS * d, device=DEVICE, dtype=dtype) / d
    bias, residual = torch.randn(2, 1, size, device=DEVICE, dtype=dtype)
    slots = batch.tables[0, [(context - 1) // 16]].long() * 16 + (context - 1) % 16

    workspace = Workspace(4 * HEADS * 2, max(16, 1 << (d - 1).bit_length()), DEVICE)
    cache = LayerBlocks(batch.cache.k.clone(), batch.cache.v.clone())
    inside = HeadNorms(walled(norms.q_weight), walled(norms.k_weight), norms.eps)
    parts = attend_step(
        attention_over(batch, cache, slots),
        layer,
        walled(qkv),
        (walled(cos), walled(sin)),
        inside,
        workspace=workspace,
        config=SingleRequestConfig(block_n=16, splits=4),
        wait_for_all_splits=wait_for_all_splits,
    )

    batch.q, k, v = by_torch(qkv, cos, sin, d, norms)
    for name, mine, stored, new in zip("kv", cache, batch.cache, (k, v), strict=False):
        at = batch.tables[0, (context - 1) // 16], (context - 1) % 16
        stored[at] = new[0]
        assert_near(
            mine[at],
            stored[at],
            TOLERANCE[dtype],
            f"heads of {d}: the newest {name} in the cache",
        )
    attended = expected(batch)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    if wait_for_all_splits:
        assert_near(
            parts.out.view_as(attended),
            attended,
            limit,
            f"heads of {d}: attention [token, head, number]",
        )
        return
    got = project_heads(walled(residual), walled(weight), walled(bias[0]), parts, chunk=2)
    product = (
        attended.to(dtype).float().flatten(1) @ weight.float().t()
        + bias.float()
        + residual.float()
    )
    assert_near(got, product, limit, f"heads of {d}: projection [token, number]")


@pytest.mark.parametrize("size", [48, 512, 1536])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_gemv_with_norm_bias_residual_and_gate(size: int, gate: str | None) -> None:
    x, norm = torch.randn(2, 1, size, device=DEVICE)
    weight = torch.randn(2 * 20, size, device=DEVICE) / size**0.5
    bias, residual = torch.randn(40, device=DEVICE), torch.randn(1, 40, device=DEVICE)
    product = F.rms_norm(x, (size,), norm[0], 1e-5) @ weight.t()
    x = walled(x)
    weight = walled(weight)
    weights = NormWeights(walled(norm[0]), 1e-5)
    if gate is None:
        got = gemv(x, weight, norm=weights, bias=walled(bias), residual=walled(residual))
        assert_near(
            got,
            product + bias + residual,
            1e-5,
            f"{size} inputs: norm, product, bias and residual",
        )
        assert_near(gemv(x, weight), x @ weight.t(), 1e-5, f"{size} inputs: the product alone")
    else:
        got = gemv(x, weight, norm=weights, gate=gate)
        assert_near(
            got,
            F.silu(product[:, :20]) * product[:, 20:],
            1e-5,
            f"{size} inputs: act(gate) * up",
        )


@torch.inference_mode()
def test_a_gate_with_biases_is_applied_behind_them() -> None:
    """The kernels add a bias last, so a gated layer that has one takes the way of many tokens."""
    weight = torch.randn(40, 48)
    bias = torch.randn(40)
    x = torch.randn(1, 48)
    plain = torch.nn.Linear(48, 40, device=DEVICE)
    plain.weight, plain.bias = (
        torch.nn.Parameter(part.to(DEVICE), False) for part in (weight, bias)
    )
    layer = FusedLinear(plain)
    layer.kernels.append(LatencyKernel(plain))
    out = F.linear(x, weight, bias)
    got = layer(x.to(DEVICE), gate="silu").cpu()
    assert_near(
        got, F.silu(out[:, :20]) * out[:, 20:], 1e-5, "act(gate + its bias) * (up + its bias)"
    )


def test_which_layers_of_a_block_have_ways() -> None:
    """Before its wait, attention reads what came before its projection. In all layers but the first that is
    over when it starts.
    """
    model = latency(optimize(random_model(SHAPES["tiny"], device="cpu", dtype=torch.float32)))
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    assert len(blocks) == model.config.num_layers
    for block in blocks:
        (direct,) = block.kernels
        assert isinstance(direct, LatencyBlock)
        weight_loader = [
            (name, part)
            for name, part in block.named_modules()
            if isinstance(part, FusedLinear)
        ]
        kernels = {name: way for name, part in weight_loader for way in part.kernels}
        assert len(kernels) == 4, f"layers with a direct way: {list(kernels)}"
        waits = [name for name, way in kernels.items() if not way.trigger_early]
        index = block.self_attn.spec.index
        wanted = ["self_attn.qkv_proj"] if index == 0 else []
        assert waits == wanted, f"layer {index}: the next kernel may not run ahead of {waits}"


def test_a_step_of_one_token_takes_the_direct_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a lone request are phase 05's, and every decode went through the fused path."""
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    before = generate(paged_cache.load(model, max_len=64, max_rows=1), [[5, 6, 7]], params)
    calls, single = [], LatencyBlock.__call__
    monkeypatch.setattr(
        LatencyBlock, "__call__", lambda self, *a: calls.append(1) or single(self, *a)
    )
    after = generate(engine_of(model, max_len=64, max_rows=1), [[5, 6, 7]], params)
    assert [c.token_ids for c in after] == [c.token_ids for c in before], (
        "not the tokens of phase 05"
    )
    assert len(calls) == 2 * model.config.num_layers

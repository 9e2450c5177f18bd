"""Phase 10's kernels in CUDA C++, on a GPU with clusters, against those in Triton, alone and in a model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cuda_graphs.latency.attention import LatencyAttention
from cuda_graphs.latency.lone import attend_lone
from cuda_graphs.latency.surgery import install as latency
from cuda_graphs.latency.tables import LoneConfig
from forward.attention import LayerSpec
from forward.loading import load_model
from forward.model import Model
from paged_cache import BlockPool, LayerCache
from paged_cache.attention import PagedBatch
from quant.cuda import attend, gemv
from quant.formats import FP8, Scheme
from quant.kernels.gemv import gemv8
from quant.loading import Quantize
from quant.rtn import quantize
from quant.surgery import install
from quant.weights import QuantizedWeight
from tests.cuda_kit import ON_A_GPU, random, replayed
from tests.paged_batches import DEVICE, assert_near, make
from triton_paged_attention.batch import fixed_batch
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms
from triton_paged_attention.surgery import optimize

WEIGHTS_ONLY = replace(FP8, name="fp8-weights", activations=None)
CLOSE = 1e-2
"""Of the output's norm: both round to bfloat16, and sum up in another order."""


def weight_of(rows: int, size: int, scheme: Scheme) -> QuantizedWeight:
    weight = quantize(torch.randn(rows, size, device=DEVICE) / size**0.5, FP8)
    return replace(weight, scheme=scheme)


class TestOnAGPU:
    pytestmark = ON_A_GPU

    @pytest.mark.parametrize("scheme", [FP8, WEIGHTS_ONLY], ids=lambda s: s.name)
    @pytest.mark.parametrize(
        ("rows", "size", "gate", "normed", "adds"),
        [
            (1024, 2048, None, False, True),
            (1024, 3072, None, False, True),
            (6144, 1024, "silu", True, False),
            (4096, 1024, None, True, False),
            (1001, 512, None, True, True),
            (2002, 512, "silu", False, True),
        ],
    )
    def test_products(
        self, rows: int, size: int, gate: str | None, normed: bool, adds: bool, scheme: Scheme
    ) -> None:
        weight = weight_of(rows, size, scheme)
        outputs = rows if gate is None else rows // 2
        norm = NormWeights(random(size), 1e-6, rows % 2 == 1) if normed else None
        x, residual = 3 * random(1, size), random(1, outputs) if adds else None
        each = gemv.fits(weight, gate)
        assert each is not None, "the kernel is for such a weight"
        got = gemv.gemv(x, weight, each, norm=norm, gate=gate, residual=residual)
        wanted = gemv8(x, weight, norm=norm, gate=gate, residual=residual)
        assert_near(got, wanted, CLOSE, f"{rows} x {size}, gate {gate}, norm {normed}")

    @pytest.mark.parametrize("scheme", [FP8, WEIGHTS_ONLY], ids=lambda s: s.name)
    @pytest.mark.parametrize(
        ("heads", "d", "block"), [((16, 8), 128, 16), ((8, 4), 64, 64), ((4, 4), 128, 32)]
    )
    @pytest.mark.parametrize("context", [1, 2, 16, 17, 129, 356, 1025, 1026, 3333])
    def test_attention(
        self, context: int, heads: tuple[int, int], d: int, block: int, scheme: Scheme
    ) -> None:
        """One kernel against the projection and attention apart, with poison around what may be read."""
        batch = make([context], heads=heads, d=d, block=block, dtype=torch.bfloat16, seed=context)
        layer, size = LayerSpec(context % 2, *heads, d, d**-0.5), 1024
        weight = weight_of((heads[0] + 2 * heads[1]) * d, size, scheme)
        x, norm = random(1, size), NormWeights(random(size), 1e-6, context % 3 == 0)
        norms = HeadNorms(random(d), random(d), 1e-6, context % 3 == 1) if context % 5 else None
        angles = 3 * torch.randn(1, d // 2, device=DEVICE)
        cos_sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        newest = context - 1
        slot = int(batch.tables[0, newest // block]) * block + newest % block if context != 2 else -1
        slots = torch.tensor([slot], device=DEVICE)
        caches = [LayerCache(batch.cache.k.clone(), batch.cache.v.clone()) for _ in range(2)]
        assert attend.fits(layer, weight, caches[0])
        got = attend.attend_cluster(
            x, norm, weight, cos_sin, norms, layer, caches[0], batch.tables, batch.context_lens, slots
        )
        qkv = gemv8(x, weight, norm=norm, run_ahead=False)
        wanted = attend_lone(
            qkv, cos_sin, norms, layer, caches[1], batch.tables, batch.context_lens, slots,
            workspace=Workspace(2000, d, torch.device(DEVICE)), config=LoneConfig(splits=16), meet=True,
        ).out  # fmt: skip
        assert_near(got, wanted, CLOSE, f"{context} keys, {heads} heads of {d}")
        for name, mine, theirs in zip(("keys", "values"), caches[0][:2], caches[1][:2], strict=True):
            other = ~torch.isclose(mine, theirs, equal_nan=True, atol=2e-2, rtol=2e-2)
            wrong = other.flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, (
                f"{context} keys: {name} in slots {wrong} are wrong; the newest belongs in {slot}"
            )

    def test_padding_of_a_graph_touches_nothing(self) -> None:
        """No context, a slot below 0, a table of garbage."""
        batch = make([1], heads=(16, 8), d=128, dtype=torch.bfloat16)
        batch.context_lens[0], batch.tables[:] = 0, 2**30
        before = batch.cache.k.clone(), batch.cache.v.clone()
        ones = torch.ones(1, 128, device=DEVICE)
        attend.attend_cluster(
            random(1, 1024), NormWeights(random(1024), 1e-6), weight_of(4096, 1024, FP8), (ones, ones), None,
            LayerSpec(0, 16, 8, 128, 0.1), batch.cache, batch.tables, batch.context_lens,
            torch.tensor([-1], device=DEVICE),
        )  # fmt: skip
        torch.cuda.synchronize()
        for mine, theirs in zip(batch.cache[:2], before, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)

    def test_a_token_through_a_model(self) -> None:
        """Layers one behind the other, each of which begins before the last ends, and again in a graph.

        Inputs are not rounded to FP8: of two that differ by a last bit one may be rounded up and one down,
        and after 28 layers of random weights nothing is left of where they came from.
        """
        scheme = Quantize(WEIGHTS_ONLY, None)
        plain = load_model("random:qwen3-0.6b", device=DEVICE, dtype="bfloat16", linears=scheme)
        context, block = 700, 64
        pool = BlockPool(plain.config, 12, block, device=torch.device(DEVICE), dtype=torch.bfloat16)
        filled = torch.randn_like(pool.data)
        hidden, caches = [], []
        for on in (False, True):
            model = install(latency(optimize(copy.deepcopy(plain))), clusters=on)
            attention = LatencyAttention(pool, plain.config.num_heads)
            batch = fixed_batch(1, 12, torch.device(DEVICE))
            batch.block_tables.copy_(torch.arange(12).flip(0)[None])
            batch.input_ids.fill_(7)
            batch.context_lens.fill_(context)
            batch.positions.fill_(context - 1)
            batch.slots.fill_((11 - (context - 1) // block) * block + (context - 1) % block)

            @torch.inference_mode()
            def step(
                model: Model = model, batch: PagedBatch = batch, on: LatencyAttention = attention
            ) -> Tensor:
                on.begin(batch)
                return model(batch.input_ids, batch.positions, on)

            pool.data.copy_(filled)
            hidden.append(step().clone())
            caches.append(pool.data.clone())
            if on:
                assert torch.equal(replayed(step), hidden[-1]), "not the same in a graph"
        assert_near(hidden[1], hidden[0], 5 * CLOSE, "28 layers")
        assert_near(caches[1], caches[0], CLOSE, "28 layers' keys and values")


def test_who_has_no_clusters_takes_the_kernels_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other formats nor sizes that do not divide; nobody without the hardware."""
    weight = quantize(torch.randn(4096, 1024), FP8)
    assert gemv.fits(weight, None) is None, "there are no clusters on a CPU"
    monkeypatch.setattr(gemv, "available", lambda device: True)
    monkeypatch.setattr(gemv, "multiprocessors", lambda device: 132)
    assert gemv.fits(weight, None) == 32
    assert gemv.fits(weight, "silu") == 16
    assert gemv.fits(weight, "gelu") is None, "no such gate"
    assert gemv.fits(quantize(torch.randn(8, 576), FP8), None) is None, "576 inputs are not 64 for each warp"
    assert gemv.fits(quantize(torch.randn(151_936, 512), FP8), None) is None, "more than registers hold"

"""Phase 06: every kernel against float32 torch, under the interpreter on the CPU and natively on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

triton = pytest.importorskip("triton")

import paged_cache  # noqa: E402
import triton_paged_attention  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.events import generate  # noqa: E402
from common.models.config import RopeConfig  # noqa: E402
from common.sampling.params import SamplingParams  # noqa: E402
from common.sampling.rows import KEY, TEMPERATURE  # noqa: E402
from common.sampling.sampler import Sampler  # noqa: E402
from forward.attention import LayerSpec  # noqa: E402
from forward.loading import load_model  # noqa: E402
from forward.rope import Rope  # noqa: E402
from tests.equivalence.compare import perturbed  # noqa: E402
from triton_paged_attention import layers  # noqa: E402
from triton_paged_attention.activation import gated  # noqa: E402
from triton_paged_attention.decode import Workspace, paged_decode  # noqa: E402
from triton_paged_attention.decode_v1 import paged_decode_v1  # noqa: E402
from triton_paged_attention.decode_v2 import paged_decode_v2  # noqa: E402
from triton_paged_attention.decode_v3 import paged_decode_v3  # noqa: E402
from triton_paged_attention.few import few  # noqa: E402
from triton_paged_attention.gemv import gemv  # noqa: E402
from triton_paged_attention.kv_store import kv_store  # noqa: E402
from triton_paged_attention.norms import add_rms_norm, rms_norm  # noqa: E402
from triton_paged_attention.prefill import paged_prefill, query_tiles  # noqa: E402
from triton_paged_attention.reference import paged_attention  # noqa: E402
from triton_paged_attention.rope import FusedRope, norm_rope  # noqa: E402
from triton_paged_attention.sampler import TritonSampler  # noqa: E402
from triton_paged_attention.sampling import argmax_rows, draw_rows  # noqa: E402
from triton_paged_attention.single import HeadNorms, attend_single, project_heads  # noqa: E402
from triton_paged_attention.tuning import (  # noqa: E402
    DecodeConfig,
    HeadsConfig,
    PrefillConfig,
    SingleConfig,
    decode_config,
    prefill_config,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GARBAGE = 2**30  # a block id that no pool has


@dataclass
class Batch:
    """Inputs of paged attention in which everything that may not be read is poisoned."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.tables, self.context_lens


def make(
    contexts: list[int],
    queries: list[int] | None = None,
    *,
    heads: tuple[int, int] = (4, 2),
    d: int = 64,
    block: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    queries = queries or [1] * len(contexts)
    width = max(-(-c // block) for c in contexts) + 1
    blocks = len(contexts) * width + 2
    caches = torch.randn(2, blocks, block, heads[1], d, generator=generator, dtype=torch.float32)
    tables = (
        torch.randperm(blocks, generator=generator)[: len(contexts) * width].view(len(contexts), width).int()
    )
    used = torch.zeros(blocks * block, dtype=torch.bool)
    for b, context in enumerate(contexts):
        slots = tables[b].long()[:, None] * block + torch.arange(block)
        used[slots.flatten()[:context]] = True
        tables[b, -(-context // block) :] = GARBAGE
    caches[:, ~used.view(blocks, block)] = float("nan")
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    q = torch.randn(sum(queries), heads[0], d, generator=generator)
    k_cache, v_cache = caches.to(DEVICE, dtype).unbind()
    lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    return Batch(q.to(DEVICE, dtype), k_cache, v_cache, tables.to(DEVICE), lens, starts.to(DEVICE))


def expected(batch: Batch, **options: float | int | None) -> Tensor:
    q, k, v, tables, lens = batch.arguments
    return paged_attention(q, k, v, tables, batch.query_starts, lens, scale=0.2, **options)  # type: ignore[arg-type]


def error(out: Tensor, reference: Tensor) -> float:
    """Relative error in the Euclidean norm; NaN never passes a comparison."""
    return float((out.float() - reference).norm() / reference.norm())


def prefill(batch: Batch, config: PrefillConfig, **options: float | int | None) -> Tensor:
    queries = batch.query_starts.diff().tolist()
    group = batch.q.shape[1] // batch.k_cache.shape[2]
    tiles = torch.from_numpy(query_tiles(queries, batch.context_lens.tolist(), config.block_m // group)).to(
        DEVICE
    )
    out = torch.full_like(batch.q, float("nan"))
    paged_prefill(*batch.arguments[:4], tiles, scale=0.2, out=out, config=config, **options)  # type: ignore[arg-type,misc]
    return out


VERSIONS = {
    "v1": paged_decode_v1,
    "v2": lambda *a, **k: paged_decode_v2(*a, block_n=16, **k),
    "v3": lambda *a, **k: paged_decode_v3(*a, block_n=16, splits=3, **k),
    "v4": lambda *a, **k: paged_decode(*a, config=DecodeConfig(block_n=16), **k),
    "v4 split": lambda *a, **k: paged_decode(*a, config=DecodeConfig(block_n=16, splits=4), **k),
    "v4 tma": lambda *a, **k: paged_decode(*a, config=DecodeConfig(block_n=16, splits=2, tma=True), **k),
    "default": paged_decode,
}
FEATURES = {"plain": {}, "window": {"sliding_window": 20}, "cap": {"soft_cap": 4.0}}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_decode_matches_the_reference(version: str, feature: str) -> None:
    """Contexts of one token, of a whole block, one past it, and long ones; nothing outside them is read."""
    batch = make([1, 16, 17, 100], block=16)
    out = VERSIONS[version](*batch.arguments, scale=0.2, **FEATURES[feature])
    assert error(out, expected(batch, **FEATURES[feature])) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("block", [4, 16, 64, 256])
@pytest.mark.parametrize("heads,d", [((3, 1), 64), ((6, 2), 80), ((2, 2), 96), ((8, 1), 128), ((4, 1), 256)])
def test_decode_over_head_shapes_and_block_sizes(block: int, heads: tuple[int, int], d: int) -> None:
    batch = make([3, 70], heads=heads, d=d, block=block, seed=d)
    out = paged_decode(*batch.arguments, scale=0.2, config=DecodeConfig(block_n=32, splits=2, num_stages=2))
    assert error(out, expected(batch)) < TOLERANCE[torch.float32]


def test_several_query_tokens_per_request() -> None:
    """Drafts and short chunks go through the decode kernel, causally among themselves."""
    batch = make([5, 33, 64, 40], [3, 1, 4, 2], heads=(6, 2))
    for splits in (1, 3):
        for features in FEATURES.values():
            out = torch.full_like(batch.q, float("nan"))
            paged_decode(
                *batch.arguments, scale=0.2, query_starts=batch.query_starts, max_queries=4, out=out,
                config=DecodeConfig(block_n=16, splits=splits), **features,
            )  # fmt: skip
            assert error(out, expected(batch, **features)) < TOLERANCE[torch.float32]


def test_decode_of_a_subset_leaves_the_rest_alone() -> None:
    batch = make([9, 33, 50], [1, 5, 1])
    out = torch.full_like(batch.q, 7.0)
    only = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    paged_decode(*batch.arguments, scale=0.2, query_starts=batch.query_starts, requests=only, out=out)
    reference = expected(batch)
    assert error(out[[0, 6]], reference[[0, 6]]) < TOLERANCE[torch.float32]
    assert (out[1:6] == 7.0).all()


def test_padding_rows_of_a_graph_read_nothing() -> None:
    """A row with context 0 gives zeros, whatever its block table holds."""
    batch = make([9, 1])
    batch.context_lens[1] = 0
    batch.tables[1] = GARBAGE
    for splits in (1, 2):
        out = paged_decode(*batch.arguments, scale=0.2, config=DecodeConfig(block_n=16, splits=splits))
        assert (out[1] == 0).all() and not out[0].isnan().any()


def test_a_workspace_is_clean_after_use() -> None:
    """The counters that splits meet at return to zero, so the next layer may use them at once."""
    batch = make([1, 16, 50, 100])
    config = DecodeConfig(block_n=16, splits=4)
    workspace = Workspace(4 * 2 * 4 * 2, 64, DEVICE)
    first = paged_decode(*batch.arguments, scale=0.2, config=config, workspace=workspace)
    assert (workspace.arrived == 0).all()
    again = paged_decode(*batch.arguments, scale=0.2, config=config, workspace=workspace)
    assert torch.equal(first, again)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_prefill_of_ragged_queries(feature: str, tma: bool) -> None:
    """Whole prompts, chunks behind a cached prefix and single tokens, in one launch."""
    contexts, queries = [1, 37, 70, 100, 16], [1, 1, 70, 45, 16]
    batch = make(contexts, queries, heads=(6, 2), block=32 if tma else 16)
    out = prefill(batch, PrefillConfig(block_m=32, block_n=16, tma=tma), **FEATURES[feature])
    assert error(out, expected(batch, **FEATURES[feature])) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("block", [4, 16, 128])
@pytest.mark.parametrize("heads,d", [((3, 1), 64), ((6, 2), 80), ((2, 2), 96), ((4, 1), 256)])
def test_prefill_over_head_shapes_and_block_sizes(block: int, heads: tuple[int, int], d: int) -> None:
    batch = make([40, 90], [40, 30], heads=heads, d=d, block=block, seed=d)
    out = prefill(batch, PrefillConfig(block_m=32, block_n=32))
    assert error(out, expected(batch)) < TOLERANCE[torch.float32]


def test_query_tiles_cover_every_token_once_and_longest_first() -> None:
    queries, contexts = [1, 0, 70, 33], [50, 9, 70, 200]
    tiles = query_tiles(queries, contexts, 32)
    rows = sorted(int(first) + i for _, first, count, _ in tiles for i in range(count))
    assert rows == list(range(sum(queries)))
    starts = np.cumsum(queries) - queries
    for request, first, count, position in tiles:
        assert 0 < count <= 32
        assert position - (first - starts[request]) == contexts[request] - queries[request]
    reads = [position + count for _, _, count, position in tiles]
    assert reads == sorted(reads, reverse=True)
    only = query_tiles(queries, contexts, 32, np.array([False, False, True, False]))
    assert sorted(only[:, 1]) == [1, 33, 65] and (only[:, 0] == 2).all()


def test_defaults_fill_the_gpu_and_fit_its_memory() -> None:
    device = torch.device(DEVICE)
    assert decode_config(4096, 128, 2, device).splits == 1
    assert decode_config(1, 128, 2, device).splits > 1
    for d_pad in (64, 128, 256):
        for itemsize in (2, 4):
            config = decode_config(8, d_pad, itemsize, device)
            assert 2 * config.block_n * d_pad * itemsize * config.num_stages <= 232448


# The small operators.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, None] + x.roll(x.shape[-1] // 2, -1) * sin[:, None]


@pytest.mark.parametrize("size", [48, 1024])
@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm_alone_and_with_the_residual(size: int, one_plus: bool) -> None:
    x, delta, weight = (torch.randn(n, size, device=DEVICE) for n in (5, 5, 1))
    weight = weight[0]
    scale = weight + 1 if one_plus else weight
    reference = F.rms_norm(x, (size,), scale, 1e-5)
    assert error(rms_norm(x, weight, 1e-5, one_plus=one_plus), reference) < 1e-6
    total, normed = add_rms_norm(x, delta, weight, 1e-5, one_plus=one_plus)
    assert torch.equal(total, x + delta)
    assert error(normed, F.rms_norm(x + delta, (size,), scale, 1e-5)) < 1e-6


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activation(kind: str) -> None:
    both = torch.randn(3, 2 * 80, device=DEVICE) * 3
    act = (
        F.silu(both[:, :80])
        if kind == "silu"
        else F.gelu(both[:, :80], approximate="tanh" if "tanh" in kind else "none")
    )
    assert error(gated(both, kind), act * both[:, 80:]) < 1e-6


def test_kv_store_scatters_by_slot_and_skips_padding() -> None:
    pool = torch.zeros(2, 6, 4, 3, 16, device=DEVICE)
    k, v = torch.randn(2, 4, 3, 16, device=DEVICE)
    slots = torch.tensor([5, 0, -1, 23], device=DEVICE)
    kv_store(k, v, *pool, slots)
    for cache, new in zip(pool, (k, v), strict=True):
        assert torch.equal(cache.view(24, 3, 16)[[5, 0, 23]], new[[0, 1, 3]])
        assert cache.count_nonzero() == 3 * 48


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 16), (16, 8, 64)])
def test_norm_rope_and_store(heads: int, kv_heads: int, d: int, norm: bool) -> None:
    tokens = 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d, device=DEVICE)
    angles = torch.randn(tokens, d // 2, device=DEVICE)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    weights = torch.randn(2, d, device=DEVICE)
    q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv.split([heads * d, kv_heads * d, kv_heads * d], -1))
    if norm:
        q, k = F.rms_norm(q, (d,), weights[0], 1e-6), F.rms_norm(k, (d,), weights[1], 1e-6)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    options = {"heads": heads, "kv_heads": kv_heads, "norm": (*weights, 1e-6) if norm else None}
    for got, want in zip(norm_rope(qkv, cos, sin, **options), (q, k, v), strict=True):  # type: ignore[arg-type]
        assert error(got, want) < 1e-6
    pool = torch.zeros(2, 6, 4, kv_heads, d, device=DEVICE)
    slots = torch.tensor([5, 0, -1, 23, 7], device=DEVICE)
    got = norm_rope(qkv, cos, sin, cache=(*pool, slots), **options)[0]  # type: ignore[arg-type]
    assert error(got, q) < 1e-6
    real = [0, 1, 3, 4]
    for cache, want in zip(pool, (k, v), strict=True):
        assert error(cache.flatten(0, 1)[slots[real]], want[real]) < 1e-6
        assert cache.count_nonzero() == len(real) * kv_heads * d


def test_angles_are_those_of_phase_01() -> None:
    rope = Rope(RopeConfig(theta=10_000.0), 32).to(DEVICE)
    positions = torch.tensor([0, 1, 700, 40_000], device=DEVICE)
    for got, want in zip(FusedRope(rope)(positions), rope(positions), strict=True):
        assert got.shape == want.shape and (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("meet", [False, True], ids=["combined in the projection", "combined by the last"])
@pytest.mark.parametrize("feature", ["plain", "window", "cap"])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 100])
def test_attention_of_a_lone_token(context: int, heads: tuple[int, int], feature: str, meet: bool) -> None:
    """From the QKV projection to the residual, against the kernels apart, with poison all around."""
    d, size = 32, 24
    batch = make([max(context, 1)], heads=heads, d=d)
    if context == 0:  # a graph's padding: no keys, a slot below 0, a table of garbage
        batch.context_lens[0] = 0
        batch.tables[:] = GARBAGE
    window, cap = FEATURES[feature].get("sliding_window"), FEATURES[feature].get("soft_cap")
    layer = LayerSpec(0, *heads, d, 0.2, window, cap)  # type: ignore[arg-type]
    qkv = torch.randn(1, (heads[0] + 2 * heads[1]) * d, device=DEVICE)
    angles = torch.randn(1, d // 2, device=DEVICE)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE), 1e-6, True)
    newest = max(context - 1, 0)
    slot = int(batch.tables[0, newest // 16]) * 16 + newest % 16 if context else -1
    slots = torch.tensor([slot], device=DEVICE)
    weight, residual = torch.randn(size, heads[0] * d, device=DEVICE), torch.randn(1, size, device=DEVICE)
    bias = torch.randn(size, device=DEVICE)
    k_cache, v_cache = batch.k_cache.clone(), batch.v_cache.clone()
    q, _, _ = norm_rope(
        qkv, cos, sin, heads=heads[0], kv_heads=heads[1], norm=norms[:3], one_plus=True,
        cache=(batch.k_cache, batch.v_cache, slots),
    )  # fmt: skip
    attended = paged_decode(q, *batch.arguments[1:], scale=0.2, **FEATURES[feature])
    wanted = attended.flatten(1) @ weight.t() + bias + residual
    workspace = Workspace(400, d, DEVICE)
    config = SingleConfig(block_n=16, splits=4)
    out = attend_single(
        qkv, (cos, sin), norms, layer, (k_cache, v_cache), batch.tables, batch.context_lens, slots,
        workspace=workspace, config=config, meet=meet,
    )  # fmt: skip
    if meet:
        got = out @ weight.t() + bias + residual
        assert (workspace.arrived == 0).all()
    else:
        shape = HeadsConfig(rows=4, chunk=2)
        got = project_heads(
            residual, weight, bias, layer, batch.context_lens, workspace=workspace, config=config, shape=shape
        )
    assert error(got, wanted) < 1e-5
    for mine, theirs in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
        torch.testing.assert_close(mine, theirs, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN in the interpreter's numpy
@pytest.mark.parametrize("vocab", [16, 300, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_drawn_tokens_are_the_samplers(vocab: int, dtype: torch.dtype) -> None:
    """Greedy, hot and cold rows, in another order than the table's, with ties, NaN and infinities."""
    sampler = Sampler(9, vocab, DEVICE, seed=0)
    for row, heat in enumerate((0.0, 0.7, 1.0, 1.3, 1e-5, 0.9, 2.0, 1.0)):
        sampler.set_row(row, SamplingParams(temperature=heat, seed=row))
    order = [0, 3, 2, 7, 4, 6, 1, 5]
    rows, steps = torch.tensor(order, device=DEVICE), torch.arange(8, device=DEVICE) * 5
    wide = torch.randn(8, 2 * vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = wide.to(DEVICE, dtype)[:, :vocab]  # rows that do not follow one another
    logits[0, 3] = logits[0, 7] = logits[0].max() + 1
    logits[5, 2], logits[4, 5] = float("nan"), float("inf")
    logits[7, : vocab - 3] = float("-inf")  # whole chunks
    logits[3, ::2] = float("-inf")
    for step in range(20 if CUDA else 3):
        want = sampler.sample(logits.float(), rows, order, steps + step).tokens
        got = draw_rows(logits, rows, steps + step, sampler.floats, sampler.ints)
        assert_same_draw(logits, sampler, order, steps + step, want, got)
    assert torch.equal(argmax_rows(logits), logits.argmax(1))
    assert torch.equal(argmax_rows(logits.t().contiguous().t()), logits.argmax(1))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("alone", [False, True])
def test_the_kernels_sampler_is_torchs_with_every_setting(alone: bool) -> None:
    """Truncation by torch, the draw by the kernel; rows of bad logits get their argmax all the same."""
    settings: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.0, "logit_bias": {4: 2.0}},
        {"temperature": 0.0},
        {},
    ]
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
    logits[1, 7] = float("nan")
    tokens = []
    for kind in (Sampler, TritonSampler):
        sampler = kind(6, 300, DEVICE, seed=0)
        for row, one in enumerate(settings):
            sampler.set_row(row, SamplingParams(**{"temperature": 0.9, "seed": row, **one}), prompt_ids=[1])
        for part in [[row] for row in range(6)] if alone else [list(range(6))]:
            rows = torch.tensor(part, device=DEVICE)
            for step in range(4):
                steps = torch.full_like(rows, step)
                tokens.append(sampler.sample(logits[rows], rows, part, steps).tokens.tolist())
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]


@pytest.mark.parametrize("count", [1, 5])
def test_a_drawn_token_depends_on_nothing_but_its_row(count: int) -> None:
    """Few rows are cut into smaller chunks than many, and the tokens stay."""
    vocab = 2500
    sampler = Sampler(8, vocab, DEVICE, seed=0)
    for row in range(8):
        sampler.set_row(row, SamplingParams(temperature=1.0, seed=row))
    sampler.plan(range(8))
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows, steps = torch.arange(8, device=DEVICE), torch.arange(8, device=DEVICE) * 3
    together = draw_rows(logits, rows, steps, sampler.floats, sampler.ints)
    some = slice(2, 2 + count)
    assert torch.equal(
        draw_rows(logits[some], rows[some], steps[some], sampler.floats, sampler.ints), together[some]
    )


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_of_a_real_vocabulary_on_a_gpu(dtype: torch.dtype) -> None:
    """256 rows of 151,936: the same tokens as torch's but for near ties."""
    count, vocab = 256, 151_936
    sampler = Sampler(count, vocab, DEVICE, seed=0)
    for row in range(count):
        sampler.set_row(row, SamplingParams(temperature=0.3 + row / 100, seed=row))
    order = list(range(count))
    rows = torch.arange(count, device=DEVICE)
    logits = (torch.randn(count, vocab, device=DEVICE) * 3).to(dtype)
    for step in range(4):
        steps = torch.full_like(rows, step)
        want = sampler.sample(logits.float(), rows, order, steps).tokens
        got = draw_rows(logits, rows, steps, sampler.floats, sampler.ints)
        assert_same_draw(logits, sampler, order, steps, want, got)


def assert_same_draw(
    logits: Tensor, sampler: Sampler, order: list[int], steps: Tensor, want: Tensor, got: Tensor
) -> None:
    """Where two draws differ, the two tokens' perturbed logits have to be a near tie."""
    for place in (want != got).nonzero().flatten().tolist():
        temperature = float(sampler.floats[order[place], TEMPERATURE])
        key = sampler.ints[order[place], KEY]
        assert temperature > 0, "greedy tokens are exact"
        values = perturbed(logits[place], temperature, int(key), int(steps[place]))
        gap = float((values[want[place]] - values[got[place]]).abs())
        assert gap < 1e-5, f"place {place}: {int(got[place])}, not {int(want[place])}; {gap:.1e} apart"


# Natively on a GPU: half precision, real sizes, random shapes.


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("seed", range(3))
def test_attention_on_the_gpu_over_random_shapes(dtype: torch.dtype, d: int, seed: int) -> None:
    rng = np.random.default_rng(seed * 1000 + d)
    kv_heads = int(rng.choice([1, 2, 8]))
    heads = (kv_heads * int(rng.choice([1, 2, 3, 4])), kv_heads)
    block = int(rng.choice([16, 32, 64, 128, 256]))
    contexts = [int(c) for c in rng.integers(1, 4097, 5)] + [1, block]
    features = list(FEATURES.values())[seed]
    batch = make(contexts, heads=heads, d=d, block=block, dtype=dtype, seed=seed)
    want = expected(batch, **features)
    assert error(paged_decode(*batch.arguments, scale=0.2, **features), want) < TOLERANCE[dtype]  # type: ignore[arg-type]
    config = DecodeConfig(block_n=16, num_stages=2, splits=7)
    assert (
        error(paged_decode(*batch.arguments, scale=0.2, config=config, **features), want) < TOLERANCE[dtype]
    )  # type: ignore[arg-type]
    queries = [int(rng.integers(1, c + 1)) for c in contexts]
    batch = make(contexts, queries, heads=heads, d=d, block=block, dtype=dtype, seed=seed)
    group = heads[0] // heads[1]
    chosen = prefill_config(triton.next_power_of_2(d), batch.q.element_size(), torch.device("cuda"))
    out = prefill(batch, chosen, **features)
    assert error(out, expected(batch, **features)) < TOLERANCE[dtype], (group, chosen)


@GPU
@pytest.mark.gpu
def test_splits_meet_without_a_race() -> None:
    """A thousand launches over one workspace: the last split to arrive must see what all others stored."""
    batch = make([4096] * 4, heads=(16, 8), d=128, dtype=torch.bfloat16)
    config = DecodeConfig(splits=32)
    workspace = Workspace(4 * 8 * 32 * 2, 128, DEVICE)
    first = paged_decode(*batch.arguments, scale=0.1, config=config, workspace=workspace)
    for _ in range(1000):
        assert torch.equal(
            paged_decode(*batch.arguments, scale=0.1, config=config, workspace=workspace), first
        )
    assert (workspace.arrived == 0).all()


# The engine.


@pytest.mark.parametrize("name", ["tiny", "tiny-window"])
def test_same_tokens_as_phase_05(name: str) -> None:
    """Greedy, float32: a short prompt (decode kernel), a long one (prefill kernel), and their decodes."""
    model = load_model(f"random:{name}", device=DEVICE, dtype="float32")
    prompts = [[1, 2, 3], [(7 * i) % 250 for i in range(37)]]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    options: dict[str, Any] = {"max_len": 64, "max_rows": 2}
    before = generate(paged_cache.load(model, **options), prompts, params)
    engine = triton_paged_attention.load(model, **options)
    after = generate(engine, prompts, params)
    engine.check_integrity()
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


@pytest.mark.parametrize(
    "choice", ["attention_prefill", "attention_decode", "norms", "rope", "activation", "projections"]
)
def test_every_backend_can_be_switched_off_by_itself(choice: str) -> None:
    """Logits of a mixed step, one prompt and one decode, with one kind of layer left to torch."""
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    logits = []
    for load, options in (
        (paged_cache.load, {}),
        (triton_paged_attention.load, {choice: "torch"}),
        (triton_paged_attention.load, {}),
    ):
        engine = load(model, max_len=64, max_rows=2, block_size=16, **options)  # type: ignore[operator]
        seen: list[Tensor] = []
        inner = engine.runner.model.logits
        engine.runner.model.logits = lambda hidden, inner=inner, seen=seen: (
            seen.append(inner(hidden)) or seen[-1]
        )
        engine.add([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        engine.add([9] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
        engine.step()
        del engine.runner.model.logits
        logits.append(torch.cat(seen))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=1e-4, rtol=1e-4)


def test_surgery_leaves_the_given_model_alone_and_shares_its_weights() -> None:
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    names = [type(m).__name__ for m in model.modules()]
    fused = triton_paged_attention.optimize(model)
    assert [type(m).__name__ for m in model.modules()] == names
    assert {type(m).__name__ for m in fused.modules()} >= {
        "FusedAttention",
        "FusedMLP",
        "FusedRMSNorm",
        "FusedBlock",
    }
    shared = {p.data_ptr() for p in model.parameters()}
    assert fused.lm_head.weight.data_ptr() in shared


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UserError, match="norms is 'cuda'"):
        triton_paged_attention.load("random:tiny", device=DEVICE, dtype="float32", norms="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [48, 512, 1536])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_gemv_with_norm_bias_residual_and_gate(size: int, gate: str | None) -> None:
    x, norm = torch.randn(2, 1, size, device=DEVICE)
    weight = torch.randn(2 * 20, size, device=DEVICE) / size**0.5
    bias, residual = torch.randn(40, device=DEVICE), torch.randn(1, 40, device=DEVICE)
    product = F.rms_norm(x, (size,), norm[0] + 1, 1e-5) @ weight.t()
    if gate is None:
        got = gemv(x, weight, norm=(norm[0], 1e-5, True), bias=bias, residual=residual)
        assert error(got, product + bias + residual) < 1e-5
        assert error(gemv(x, weight), x @ weight.t()) < 1e-5
    else:
        got = gemv(x, weight, norm=(norm[0], 1e-5, True), gate=gate)
        assert error(got, F.silu(product[:, :20]) * product[:, 20:]) < 1e-5


@pytest.mark.parametrize("size", [48, 512, 1536, 2560])
@pytest.mark.parametrize("tokens", [2, 5, 8])
def test_few_tokens_with_norm_bias_residual_and_gate(size: int, tokens: int) -> None:
    kind = torch.float16 if DEVICE == "cuda" else torch.float32  # natively for tensor cores only
    x, norm = torch.randn(tokens, size, device=DEVICE), torch.randn(size, device=DEVICE)
    weight = torch.randn(2 * 20, size, device=DEVICE) / size**0.5
    bias, residual = torch.randn(40, device=DEVICE), torch.randn(tokens, 40, device=DEVICE)
    x, norm, weight, bias, residual = (part.to(kind) for part in (x, norm, weight, bias, residual))
    normed = F.rms_norm(x.float(), (size,), norm.float() + 1, 1e-5).to(kind).float()
    product, limit = normed @ weight.float().t(), 1e-5 if kind == torch.float32 else 2e-3
    got = few(x, weight, norm=(norm, 1e-5, True), bias=bias, residual=residual)
    assert error(got, product + bias + residual) < limit
    assert error(few(x, weight), x.float() @ weight.float().t()) < limit
    got = few(x, weight, norm=(norm, 1e-5, True), gate="silu")
    assert error(got, F.silu(product[:, :20]) * product[:, 20:]) < limit


def test_a_step_of_a_few_tokens_runs_the_kernels_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests, one of which ends first: their tokens are phase 05's."""
    if DEVICE == "cpu":  # the interpreter knows float32, in which tokens can be compared
        monkeypatch.setattr(layers, "few_pays", lambda *_: True)
    model = load_model("random:tiny", device=DEVICE, dtype="float32" if DEVICE == "cpu" else "float16")
    prompts, params = (
        [[5, 6, 7], [8], [9, 3]],
        [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 2, 3)],
    )
    options: dict[str, Any] = {"max_len": 64, "max_rows": 3}
    tokens = []
    few_steps = layers.FusedBlock._few
    monkeypatch.setattr(
        layers.FusedBlock, "_few", lambda self, x, *a: tokens.append(len(x)) or few_steps(self, x, *a)
    )
    after = generate(triton_paged_attention.load(model, **options), prompts, params)
    assert tokens == [6, 6, 3, 3, 2, 2]  # two layers; the prompts, then decodes
    if DEVICE == "cpu":
        before = generate(paged_cache.load(model, **options), prompts, params)
        assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_a_step_of_one_token_runs_the_single_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a lone request are phase 05's, and every decode went through the fused path."""
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    before = generate(paged_cache.load(model, max_len=64, max_rows=1), [[5, 6, 7]], params)
    calls = []
    single = layers.FusedBlock._single
    monkeypatch.setattr(layers.FusedBlock, "_single", lambda self, *a: calls.append(1) or single(self, *a))
    after = generate(triton_paged_attention.load(model, max_len=64, max_rows=1), [[5, 6, 7]], params)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert len(calls) == 2 * model.config.num_layers

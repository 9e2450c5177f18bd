"""Phase 06: every kernel against float32 torch, under the interpreter on the CPU and natively on a GPU."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_cache.memory import weight_bytes

pytest.importorskip("triton")

import triton

import paged_cache
import triton_paged_attention
from common.errors import UserError
from common.sampling.params import SamplingParams
from forward.layers import RMSNorm
from forward.loading import load_model, random_model
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.shapes import SHAPES
from forward.surgery import clone
from paged_cache import TorchPagedAttention
from paged_cache.reference import gather
from tests.paged_batches import (
    CUDA,
    DEVICE,
    FEATURES,
    GARBAGE,
    TOLERANCE,
    Batch,
    assert_attention,
    assert_near,
    error,
    expected,
    make,
)
from tests.programs import environment
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.decode_v1 import paged_decode_v1
from triton_paged_attention.decode_v2 import paged_decode_v2
from triton_paged_attention.decode_v3 import paged_decode_v3
from triton_paged_attention.hardware import shared_memory
from triton_paged_attention.kernels.norms import NormWeights, add_rms_norm
from triton_paged_attention.layers import FusedRMSNorm, optimize
from triton_paged_attention.linear import FusedLinear, gated
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import (
    DecodeConfig,
    PrefillConfig,
    decode_default,
    prefill_default,
)

GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
pytestmark = pytest.mark.usefixtures("poison")


def prefill(batch: Batch, config: PrefillConfig, **options: float | int | None) -> Tensor:
    queries = batch.query_starts.diff().tolist()
    group = batch.q.shape[1] // batch.cache.k.shape[2]
    tiles = torch.from_numpy(
        query_tiles(queries, batch.context_lens.tolist(), config.block_m // group)
    ).to(DEVICE)
    out = torch.full_like(batch.q, float("nan"))
    paged_prefill(batch.layer(**options), *batch.arguments[:3], tiles, config, out)
    return out


VERSIONS = {
    "v1": paged_decode_v1,
    "v2": lambda *a, **k: paged_decode_v2(*a, block_n=16, **k),
    "v3": lambda *a, **k: paged_decode_v3(*a, block_n=16, splits=3, **k),
    "v4": lambda *a, **k: paged_decode(*a, config=DecodeConfig(block_n=16), **k),
    "v4 split": lambda *a, **k: paged_decode(
        *a, config=DecodeConfig(block_n=16, splits=4), **k
    ),
    "default": paged_decode,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("feature", FEATURES)
def test_decode_matches_the_reference(version: str, feature: str) -> None:
    """Contexts of one token, of a whole block, one past it, and long ones; nothing outside them is read."""
    batch = make([1, 16, 17, 100], block=16)
    out = VERSIONS[version](batch.layer(**FEATURES[feature]), *batch.arguments)
    assert_attention(
        batch, out, TOLERANCE[torch.float32], f"{version}, {feature}", **FEATURES[feature]
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("feature", ["plain", "window"])
@pytest.mark.slow
def test_scores_in_the_hundreds(version: str, feature: str) -> None:
    """exp(200) is infinite: only the largest score saves it, and a key outside the window decides everything.

    Blocks of 12 tokens and heads of 80 numbers: no power of two anywhere.
    """
    batch = make([1, 12, 13, 70], heads=(3, 1), d=80, block=12)
    batch.q.mul_(100)
    hidden = 70 - 20 - 1  # the last key before the window, with the largest score of all
    block = int(batch.tables[3, hidden // 12])
    batch.cache.k[block, hidden % 12] = batch.q[3].sum(0) / 100
    out = VERSIONS[version](batch.layer(**FEATURES[feature]), *batch.arguments)
    assert_attention(
        batch, out, 1e-4, f"{version}, {feature}, blocks of 12", **FEATURES[feature]
    )


def log_sums(batch: Batch, low: int, high: int) -> Tensor:
    """The base-2 logarithm of one request's sum of exp(score) over keys [low, high), per head: `[H]`."""
    cache, group = batch.cache, batch.q.shape[1] // batch.cache.k.shape[2]
    keys = gather(cache.k, batch.tables[0], high)[low:].float().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,khd->hk", batch.q[0].float(), keys) * 0.2
    return scores.logsumexp(1) / math.log(2)


@pytest.mark.parametrize("version", ["v3", "v4"])
def test_every_split_sums_its_own_keys(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 keys are 7 tiles of 16: 3 splits take 3, 3 and 1. The result is right if one takes all, too."""
    batch = make([100], heads=(4, 2), d=16)
    made: list[Tensor] = []
    if version == "v3":
        empty = torch.empty
        monkeypatch.setattr(
            torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1]
        )
        paged_decode_v3(batch.layer(), *batch.arguments, block_n=16, splits=3)
        lse = next(tensor for tensor in made if tensor.shape == (1, 4, 3))[0]  # [H, splits]
    else:
        workspace = Workspace(3 * 4, 16, DEVICE)
        config = DecodeConfig(block_n=16, splits=3)
        paged_decode(batch.layer(), *batch.arguments, config=config, workspace=workspace)
        lse = (
            workspace.lse.view(2, 3, 2).transpose(1, 2).reshape(4, 3)
        )  # stored [KH, splits, GROUP]
    for split, (low, high) in enumerate([(0, 48), (48, 96), (96, 100)]):
        what = f"{version}: log2 of the sum of split {split}, which has keys {low} to {high - 1}, by head"
        assert_near(lse[:, split], log_sums(batch, low, high), 1e-5, what)


@pytest.mark.slow
def test_several_query_tokens_per_request() -> None:
    """Drafts and short chunks go through the decode kernel, causally among themselves."""
    # Of 54 keys, the first of 4 queries sees those from 31 on, the last one those from 34 on: another tile.
    batch = make([5, 33, 64, 40, 54], [3, 1, 4, 2, 4], heads=(6, 2))
    for splits in (1, 3):
        for features in FEATURES.values():
            out = torch.full_like(batch.q, float("nan"))
            paged_decode(
                batch.layer(**features), *batch.arguments, query_starts=batch.query_starts,
                max_queries=4, out=out, config=DecodeConfig(block_n=16, splits=splits),
            )  # fmt: skip
            what = f"{splits} splits, {features or 'plain'}"
            assert_attention(batch, out, TOLERANCE[torch.float32], what, **features)


def test_few_pairs_are_split_and_stages_fit_the_shared_memory() -> None:
    device = torch.device("cpu")  # 4 multiprocessors
    for pairs, d_pad, itemsize in product(range(1, 20), (16, 128, 256, 512, 1024), (1, 2, 4)):
        config = decode_default(pairs, d_pad, itemsize, device)
        assert abs(config.splits - 8 / pairs) <= 0.5 or (config.splits == 1 and pairs > 8)
        whole = (64, 4) if config.splits == 1 else (32, 2)
        assert (config.block_n, config.num_warps) == whole or config.num_stages == 1
        tile = 2 * d_pad * itemsize * config.block_n
        assert tile * config.num_stages <= shared_memory(device) // 2 or config.block_n == 16
        larger = tile * (config.num_stages + 1) if config.num_stages > 1 else 2 * tile
        full = config.num_stages == 3 and config.block_n == whole[0]
        assert full or larger > shared_memory(device) // 2, "smaller than it must be"


def test_decode_of_a_subset_leaves_the_rest_alone() -> None:
    batch = make([9, 33, 50], [1, 5, 1])
    out = torch.full_like(batch.q, 7.0)
    only = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    paged_decode(
        batch.layer(),
        *batch.arguments,
        query_starts=batch.query_starts,
        requests=only,
        out=out,
    )
    reference = expected(batch)
    assert_near(
        out[[0, 6]], reference[[0, 6]], TOLERANCE[torch.float32], "requests 0 and 2 alone"
    )
    assert (out[1:6] == 7.0).all(), "request 1, which is not in the subset, was written"


def test_padding_rows_of_a_graph_read_nothing() -> None:
    """A row with context 0 gives zeros, whatever its block table holds."""
    batch = make([9, 1])
    batch.context_lens[1] = 0
    batch.tables[1] = GARBAGE
    for splits in (1, 2):
        out = paged_decode(
            batch.layer(), *batch.arguments, config=DecodeConfig(block_n=16, splits=splits)
        )
        assert (out[1] == 0).all(), (
            f"{splits} splits: a row without keys gives {out[1, 0, 0]}, not 0"
        )
        assert not out[0].isnan().any(), f"{splits} splits: request 0 has read what it may not"


@pytest.mark.slow
def test_a_workspace_is_clean_after_use() -> None:
    """The counters that splits meet at return to zero, so the next layer may use them at once."""
    batch = make([1, 16, 50, 100])
    config = DecodeConfig(block_n=16, splits=4)
    workspace = Workspace(4 * 2 * 4 * 2, 64, DEVICE)
    first = paged_decode(batch.layer(), *batch.arguments, config=config, workspace=workspace)
    assert (workspace.arrived == 0).all(), "counters are left at " + str(
        workspace.arrived[:32].tolist()
    )
    again = paged_decode(batch.layer(), *batch.arguments, config=config, workspace=workspace)
    assert torch.equal(first, again), "the second launch gives another result than the first"


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.slow
def test_prefill_of_ragged_queries(feature: str, tma: bool) -> None:
    """Whole prompts, chunks behind a cached prefix and single tokens, in one launch."""
    contexts, queries = [1, 37, 70, 100, 16], [1, 1, 70, 45, 16]
    batch = make(contexts, queries, heads=(6, 2), block=32 if tma else 16)
    out = prefill(batch, PrefillConfig(block_m=32, block_n=16, tma=tma), **FEATURES[feature])
    what = f"prefill, {feature}, {'by' if tma else 'without'} TMA"
    assert_attention(batch, out, TOLERANCE[torch.float32], what, **FEATURES[feature])


def test_query_tiles_cover_every_token_once_and_longest_first() -> None:
    queries, contexts = [1, 0, 70, 33], [50, 9, 70, 200]
    tiles = query_tiles(queries, contexts, 32)
    rows = sorted(int(first) + i for _, first, count, _ in tiles for i in range(count))
    assert rows == list(range(sum(queries))), "a query token is in no tile, or in two"
    starts = np.cumsum(queries) - queries
    for request, first, count, position in tiles:
        assert 0 < count <= 32
        begins = position - (first - starts[request])
        past = contexts[request] - queries[request]
        assert begins == past, (
            f"request {request} begins at position {begins}, but has {past} tokens before"
        )
    reads = [position + count for _, _, count, position in tiles]
    assert reads == sorted(reads, reverse=True), (
        f"the longest tile comes first, but they read {reads} keys"
    )
    only = query_tiles(queries, contexts, 32, np.array([False, False, True, False]))
    assert sorted(only[:, 1]) == [1, 33, 65] and (only[:, 0] == 2).all()


# The small operators.


@pytest.mark.parametrize("size", [48, 1024])
@pytest.mark.parametrize("kind", [RMSNorm, Gemma3RMSNorm])
def test_rms_norm_alone_and_with_the_residual(
    size: int, kind: type[RMSNorm | Gemma3RMSNorm]
) -> None:
    x, delta, weight = (torch.randn(n, size, device=DEVICE) for n in (5, 5, 1))
    own = kind(size, 1e-5)
    own.weight = torch.nn.Parameter(weight[0], requires_grad=False)
    norm = FusedRMSNorm(own).weights
    scale = weight[0] + 1 if kind is Gemma3RMSNorm else weight[0]
    reference = F.rms_norm(x, (size,), scale, 1e-5)
    what = f"{kind.__name__}, {size} numbers"
    assert_near(add_rms_norm(x, None, norm)[1], reference, 1e-6, f"norm, {what}")
    total, normed = add_rms_norm(x, delta, norm)
    assert torch.equal(total, x + delta), "the sum before the norm is wrong"
    assert_near(
        normed, F.rms_norm(x + delta, (size,), scale, 1e-5), 1e-6, f"norm of a sum, {what}"
    )


def test_the_sum_is_normalized_as_it_is_stored() -> None:
    """In half precision: whoever reads the sum later must find what was normalized here."""
    x, delta = torch.randn(2, 64, 1024, device=DEVICE).half()
    norm = NormWeights(torch.ones(1024, device=DEVICE, dtype=torch.float16), 1e-5)
    total, normed = add_rms_norm(x, delta, norm)
    alone = add_rms_norm(total, None, norm)[1]
    wrong = int((normed != alone).sum())
    assert wrong == 0, (
        f"{wrong} numbers differ from the norm of the sum as it is stored: it was not rounded"
    )


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activation(kind: str) -> None:
    both = torch.randn(3, 2 * 80, device=DEVICE) * 3
    act = (
        F.silu(both[:, :80])
        if kind == "silu"
        else F.gelu(both[:, :80], approximate="tanh" if "tanh" in kind else "none")
    )
    assert_near(gated(both, kind), act * both[:, 80:], 1e-6, f"{kind}(gate) * up")


# Natively on a GPU: half precision, real sizes, random shapes.


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("seed", range(3))
def test_attention_on_the_gpu_over_random_shapes(
    dtype: torch.dtype, d: int, seed: int
) -> None:
    rng = np.random.default_rng(seed * 1000 + d)
    kv_heads = int(rng.choice([1, 2, 8]))
    heads = (kv_heads * int(rng.choice([1, 2, 3, 4])), kv_heads)
    block = int(rng.choice([16, 32, 64, 128, 256]))
    contexts = [int(c) for c in rng.integers(1, 4097, 5)] + [1, block]
    features = list(FEATURES.values())[seed % len(FEATURES)]
    batch = make(contexts, heads=heads, d=d, block=block, dtype=dtype, seed=seed)
    want = expected(batch, **features)
    assert (
        error(paged_decode(batch.layer(**features), *batch.arguments), want) < TOLERANCE[dtype]
    )  # type: ignore[arg-type]
    config = DecodeConfig(block_n=16, num_stages=2, splits=7)
    assert (
        error(paged_decode(batch.layer(**features), *batch.arguments, config=config), want)
        < TOLERANCE[dtype]
    )  # type: ignore[arg-type]
    queries = [int(rng.integers(1, c + 1)) for c in contexts]
    batch = make(contexts, queries, heads=heads, d=d, block=block, dtype=dtype, seed=seed)
    group = heads[0] // heads[1]
    size = batch.q.element_size()
    chosen = prefill_default(triton.next_power_of_2(d), size, torch.device("cuda"))
    out = prefill(batch, chosen, **features)
    assert error(out, expected(batch, **features)) < TOLERANCE[dtype], (group, chosen)


@GPU
@pytest.mark.gpu
def test_splits_meet_without_a_race() -> None:
    """A thousand launches over one workspace: the last split to arrive must see what all others stored."""
    batch = make([4096] * 4, heads=(16, 8), d=128, dtype=torch.bfloat16)
    config = DecodeConfig(splits=32)
    workspace = Workspace(4 * 8 * 32 * 2, 128, DEVICE)
    first = paged_decode(batch.layer(), *batch.arguments, config=config, workspace=workspace)
    for _ in range(1000):
        assert torch.equal(
            paged_decode(batch.layer(), *batch.arguments, config=config, workspace=workspace),
            first,
        )
    assert (workspace.arrived == 0).all()


# The engine.


@cache
def two_steps(shape: str) -> tuple[Model, Tensor, Tensor]:
    """A model, and its logits by torch and by kernels."""
    model = load_model(f"random:{shape}", device=DEVICE, dtype="float32")
    for name, parameter in model.named_parameters():
        if (
            "norm" in name
        ):  # all alike in a random model, so that a rotation before or after changes nothing
            torch.nn.init.normal_(parameter, mean=1.0, std=0.5)
    return (
        model,
        logits_of(paged_cache.load, model),
        logits_of(triton_paged_attention.load, model),
    )


def logits_of(load: Any, model: Model, **options: Any) -> Tensor:
    """Logits of a prompt, and of a mixed step behind it."""
    engine = load(model, max_len=64, max_rows=2, block_size=16, **options)
    seen: list[Tensor] = []
    inner = engine.runner.model.logits
    engine.runner.model.logits = lambda hidden: seen.append(inner(hidden)) or seen[-1]
    engine.add([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.add([9] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    del engine.runner.model.logits
    return torch.cat(seen)


def test_logits_are_the_same_by_kernels_and_by_torch() -> None:
    """Logits of a mixed step, one prompt and one decode, in a model with norms of heads and windows."""
    _, by_torch, by_kernels = two_steps("tiny-window")
    assert_near(by_kernels, by_torch, 1e-4, "logits [row, token] by kernels")


def test_kernels_are_one_option() -> None:
    model, _, _ = two_steps("tiny")
    sizes = {"max_len": 64, "max_rows": 2, "block_size": 16}
    plain = triton_paged_attention.load(model, kernels="torch", **sizes)
    assert isinstance(plain.runner.attention, TorchPagedAttention)
    fused = triton_paged_attention.load(model, kernels="triton", **sizes)
    assert isinstance(fused.runner.attention, TritonPagedAttention)
    with pytest.raises(UserError, match="kernels is 'cuda'"):
        triton_paged_attention.load(model, kernels="cuda", **sizes)


def test_a_small_batch_of_tokens_gets_small_tiles_and_the_same_attention() -> None:
    """Up to so many tokens in a step, tiles have 64 rows; the kernel is launched with tiles of that size."""
    model, most = load_model("random:tiny", device=DEVICE, dtype="float32"), 40
    sizes = {"max_len": 128, "max_rows": 2, "block_size": 16}
    prompts = [[7 * token % 251 for token in range(length)] for length in (most, 90)]
    plain = triton_paged_attention.load(model, kernels="torch", **sizes)
    fused = triton_paged_attention.load(model, kernels="triton", **sizes)
    attention = fused.runner.attention
    assert isinstance(attention, TritonPagedAttention)
    attention._small_batch = most
    group = model.config.num_heads // model.config.num_kv_heads
    assert [attention.tile_tokens(tokens) * group for tokens in (most, most + 1)] == [64, 128]
    params = [SamplingParams(max_tokens=3)]
    for prompt in prompts:
        (wanted,), (found,) = (e.generate([prompt], params) for e in (plain, fused))
        assert found.token_ids == wanted.token_ids, f"a prompt of {len(prompt)} tokens"


def test_surgery_leaves_the_given_model_alone_and_shares_its_weights() -> None:
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    names = [type(m).__name__ for m in model.modules()]
    fused = optimize(clone(model))
    assert [type(m).__name__ for m in model.modules()] == names
    assert {type(m).__name__ for m in fused.modules()} >= {
        "FusedAttention",
        "FusedMLP",
        "FusedRMSNorm",
        "FusedBlock",
    }
    shared = {p.data_ptr() for p in model.parameters()}
    assert fused.lm_head.linear.weight.data_ptr() in shared


def test_surgery_lets_go_of_a_layer_before_it_joins_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In place, so beside the weights there is never more than one layer's worth of projections."""
    config = replace(SHAPES["tiny"], num_layers=6, sliding_windows=(None,) * 6)
    model = random_model(config, device=DEVICE, dtype=torch.float32)
    alive = {id(p): weakref.ref(p) for p in model.parameters()}
    before = weight_bytes(model)
    layer = sum(
        p.numel() * p.element_size() for p in model.get_submodule("layers.0").parameters()
    )
    peak = 0
    cat = torch.cat

    def watched(*args: Any, **options: Any) -> Tensor:
        nonlocal peak
        made = cat(*args, **options)
        living = [tensor for ref in alive.values() if (tensor := ref()) is not None]
        joined = [p for p in model.parameters() if id(p) not in alive]
        peak = max(
            peak,
            sum(tensor.numel() * tensor.element_size() for tensor in (*living, *joined, made)),
        )
        return made

    monkeypatch.setattr(torch, "cat", watched)
    assert optimize(model) is model
    assert weight_bytes(model) == before
    assert before < peak <= before + layer, (
        f"{peak - before} bytes more, and a layer has {layer}"
    )


@torch.inference_mode()
def test_a_linear_asks_its_ways_and_the_library_last() -> None:
    """In their order, by tokens and gate; a sum gets what a way has made, and the residual after it."""
    asked: list[str] = []

    class Named:
        def __init__(self, name: str, most: int) -> None:
            self.name, self.most = name, most

        def supports(self, tokens: int, gate: str | None) -> bool:
            return tokens <= self.most and gate is None

        def __call__(
            self, x: Tensor, *, norm: Any, gate: Any, residual: Tensor | None
        ) -> Tensor:
            asked.append(self.name)
            return x if residual is None else x + residual

    fused = FusedLinear(torch.nn.Linear(4, 4, bias=False, device=DEVICE))
    fused.kernels = [Named("one", 1), Named("few", 3)]
    x = torch.randn(5, 4, device=DEVICE)
    for tokens, gate, wanted in [
        (1, None, ["one"]),
        (3, None, ["few"]),
        (4, None, []),
        (1, "silu", []),
    ]:
        asked.clear()
        got = fused(x[:tokens], gate=gate)
        assert asked == wanted, f"{tokens} tokens, gate {gate}: computed by {asked}"
        if not wanted and gate is None:
            assert torch.equal(got, fused.linear(x[:tokens]))
    fused.total = lambda part, residual: 2 * part if residual is None else 2 * part + residual
    assert torch.equal(fused(x[:1], residual=x[1:2]), 2 * x[:1] + x[1:2])


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="where there is a GPU kernels are compiled")
def test_triton_that_was_imported_to_compile_is_refused_by_name() -> None:
    program = (
        "import triton.language; from forward import load_model; model = load_model('random:tiny');"
        "import triton_paged_attention as phase; phase.load(model)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "import phase 06 before a model is made" in done.stderr.splitlines()[-1], (
        done.stderr[-500:]
    )

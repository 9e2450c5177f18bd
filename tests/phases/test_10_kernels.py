"""Phase 10's kernels against dequantize-then-multiply in float32, in the interpreter or natively on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import quant
from cuda_graphs.latency import install as latency
from cuda_graphs.latency.lone import Parts
from cuda_graphs.latency.tables import LoneConfig
from forward.attention import LayerSpec
from forward.loading import load_model
from paged_cache.pool import LayerCache
from quant.activations import quantize_tokens, rounded
from quant.formats import FP8, FP8_BLOCK, INT4, INT8, W8A8, Scheme
from quant.fused import QuantFusedLinear
from quant.kernel_layers import KernelLinear, KernelOutput
from quant.kernels import gemv, gemv4
from quant.kernels.configs import LoopConfig
from quant.kernels.gemv4 import from_words, to_words
from quant.kernels.inputs import Pending, gated_rows, norm_rows, round_rows
from quant.linear import QuantLinear
from quant.loading import Quantize
from quant.pairs import PAIRS
from quant.rtn import quantize
from quant.surgery import install
from quant.weights import QuantizedWeight
from tests.compiling import spilled
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms, ProductScales, norm_rope
from triton_paged_attention.layers import FusedAttention
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.surgery import optimize
from triton_paged_attention.tables import DecodeConfig, PrefillConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {torch.float32: 2e-4, torch.bfloat16: 2e-2}
"""Of the largest number of the output."""
INT4_64, INT4_32 = INT4.with_group(64), INT4.with_group(32)
ZEROS = Scheme("int4-zeros", "int4", "group", group=128, zeros=True)
ZEROS_32 = Scheme("int4-zeros", "int4", "group", group=32, zeros=True)
SCHEMES = [FP8, FP8_BLOCK, INT8, W8A8, INT4, INT4_64, INT4_32, ZEROS, ZEROS_32]
named = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.group}")
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.slow]  # a minute in the interpreter


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(0)


def layer_of(scheme: Scheme, n: int, k: int, rng: torch.Generator, bias: bool = False) -> QuantLinear:
    weight = torch.randn(n, k, device=DEVICE, generator=rng) / k**0.5
    weight[3, 5] = 1.0  # an outlier
    bias_of = torch.randn(n, device=DEVICE, generator=rng).to(DTYPE) if bias else None
    return QuantLinear(quantize(weight, scheme), bias_of)


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    wanted = wanted.float()
    off = ((found.float() - wanted).abs().max() / wanted.abs().max()).item()
    assert off < CLOSE[DTYPE], f"{what}: off by {off:.1e} of the largest number"


@named
@pytest.mark.parametrize(("n", "k"), [(48, 256), (32, 384), (80, 1152)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_product_is_that_of_the_dequantized_weight(
    scheme: Scheme, n: int, k: int, tokens: int, rng: torch.Generator
) -> None:
    plain = layer_of(scheme, n, k, rng, bias=n == 32)
    x = torch.randn(tokens, k, device=DEVICE, generator=rng).to(DTYPE)
    layer = KernelLinear(plain)
    assert_close(layer(x), plain.exact(x), f"{scheme.name}, {tokens} tokens times [{n}, {k}]")
    kept = layer.quantized()
    for name, tensor in plain.weight.per_channel().tensors().items():
        assert torch.equal(kept.tensors()[name].float(), tensor.float()), f"{name} is kept as it was"


@named
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("one_plus", [False, True])
def test_one_token_with_norm_gate_and_residual(
    scheme: Scheme, gate: str | None, one_plus: bool, rng: torch.Generator
) -> None:
    n, k = 64, 640
    plain = layer_of(scheme, n, k, rng)
    x = torch.randn(1, k, device=DEVICE, generator=rng).to(DTYPE) * 30
    weight = torch.randn(k, device=DEVICE, generator=rng).to(DTYPE)
    rows = n // (1 if gate is None else 2)
    residual = torch.randn(1, rows, device=DEVICE, generator=rng).to(DTYPE)
    found = KernelLinear(plain)(x, norm=NormWeights(weight, 1e-5, one_plus), gate=gate, residual=residual)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean() + 1e-5) * (weight.float() + (1.0 if one_plus else 0.0))
    out = plain.exact(normed.to(DTYPE))
    if gate is not None:
        out = F.silu(out[:, :rows]) * out[:, rows:]
    assert_close(found, out + residual.float(), f"{scheme.name}, one token")


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_kernels_for_few_bits_compile_for_a_gpu(capability: int) -> None:
    """The interpreter knows nothing of the instructions that make pairs of float16. Nor may they spill."""
    found = spilled(capability, "--quant")
    wanted = 6 if capability >= 90 else 4  # without e4m3
    assert len(found) == wanted and max(found) <= 16, f"bytes that do not fit into registers: {found}"


@named
@pytest.mark.parametrize(("gate", "block_k"), [(None, 512), ("silu", 128)])
def test_a_program_takes_row_after_row(
    scheme: Scheme, gate: str | None, block_k: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
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
    found = KernelLinear(plain)(x, gate=gate, residual=residual)
    off = (found.float() - wanted).abs()[0] / wanted.abs().max()
    wrong = (~(off < CLOSE[DTYPE])).nonzero()[:, 0].tolist()  # nor may they be NaN
    assert not wrong, f"{scheme.name}: outputs {wrong} of {rows} are wrong; a round has 12"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("size", [40, 256])
def test_rows_are_rounded_as_the_lesson_does_it(kind: str, size: int, rng: torch.Generator) -> None:
    x = torch.randn(7, size, device=DEVICE, generator=rng).to(DTYPE)
    x[2] = 0  # a token of zeros
    x[3, 0] = 1000.0
    values, scale = round_rows(x, kind)  # type: ignore[arg-type]
    wanted, wanted_scale = quantize_tokens(x, kind)  # type: ignore[arg-type]
    assert torch.equal(scale, wanted_scale[:, 0]), "scales"
    assert torch.equal(values.float(), wanted.float()), "numbers"


@pytest.mark.parametrize("kind", ["fp8", "int8", None])
def test_add_norm_and_round_take_a_pending_product(kind: str | None, rng: torch.Generator) -> None:
    tokens, size = 5, 96
    x = torch.randn(tokens, size, device=DEVICE, generator=rng).to(DTYPE)
    values = torch.randn(tokens, size, device=DEVICE, generator=rng).to(DTYPE)
    rows = torch.rand(tokens, device=DEVICE, generator=rng) + 0.5
    columns = torch.rand(size, device=DEVICE, generator=rng) + 0.5
    norm = NormWeights(torch.randn(size, device=DEVICE, generator=rng).to(DTYPE), 1e-6)
    pending = Pending(values, rows, columns)
    total, found = norm_rows(x, pending, norm, kind)  # type: ignore[arg-type]
    wanted = x + pending.finished(DTYPE)
    assert_close(total, wanted, "the sum")
    wide = wanted.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight.float()).to(DTYPE)
    if kind is None:
        assert isinstance(found, Tensor)
        assert_close(found, normed, "the norm")
    else:
        assert not isinstance(found, Tensor)
        step = 0.07 if kind == "fp8" else 0.01  # a number between two may go either way
        off = (found.values.float() * found.scale[:, None] - rounded(normed.float(), kind)).abs().max()  # type: ignore[arg-type]
        assert off / normed.float().abs().max() < step, f"the rounded norm is off by {off}"


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_gates_take_a_pending_product(kind: str, rng: torch.Generator) -> None:
    tokens, size = 4, 72
    values = torch.randn(tokens, 2 * size, device=DEVICE, generator=rng).to(DTYPE)
    rows = torch.rand(tokens, device=DEVICE, generator=rng) + 0.5
    columns = torch.rand(2 * size, device=DEVICE, generator=rng) + 0.5
    pending = Pending(values, rows, columns)
    found = gated_rows(pending, "silu", kind, DTYPE)  # type: ignore[arg-type]
    both = pending.finished(DTYPE).float()
    wanted = F.silu(both[:, :size]) * both[:, size:]
    off = (found.values.float() * found.scale[:, None] - wanted).abs().max() / wanted.abs().max()
    assert off < 0.07, f"off by {off}"


def test_words_hold_every_nibble() -> None:
    numbers = torch.arange(3 * 160, device=DEVICE).view(3, 160) % 16
    data = (numbers[:, ::2] | (numbers[:, 1::2] << 4)).to(torch.uint8)
    weight = QuantizedWeight(INT4_32, data, torch.ones(3, 5, device=DEVICE))
    assert torch.equal(from_words(to_words(weight), 160), numbers.to(torch.uint8))


def test_a_joined_layer_becomes_one_of_kernels(rng: torch.Generator) -> None:
    parts = [
        QuantLinear.of(nn.Linear(64, n, bias=False, device=DEVICE, dtype=DTYPE), FP8, "x") for n in (32, 16)
    ]
    layer = KernelLinear(QuantFusedLinear.of(*parts).linear)
    x = torch.randn(4, 64, device=DEVICE, generator=rng).to(DTYPE)
    assert_close(layer(x), torch.cat([part.exact(x) for part in parts], dim=-1), "joined")


# Keys and values of eight bits, those of two tokens side by side.


def caches(
    lens: list[int], size: int, kv_heads: int, d: int, rng: torch.Generator
) -> tuple[LayerCache, LayerCache, Tensor]:
    """The same keys and values one by one and in pairs, and the block tables that both have."""
    per = [-(-n // size) for n in lens]
    tables = torch.full((len(lens), max(per) + 1), 10**6, dtype=torch.int32)
    order, at = torch.randperm(sum(per)).to(torch.int32), 0
    for row, count in enumerate(per):
        tables[row, :count], at = order[at : at + count], at + count
    scales = torch.rand(2, kv_heads, device=DEVICE, generator=rng) / 50 + 0.01
    shape = (sum(per), size, kv_heads, d)
    made = []
    for paired in (False, True):
        data = torch.full((2, *shape), float("nan"), device=DEVICE).to(torch.float8_e4m3fn)
        if paired:  # the other half of a pair is multiplied by 0: it may be anything that `kv_store` stores
            data[1] = 448.0
        made.append(LayerCache(data[0], data[1], *scales, PAIRS if paired else None))
    for row, n in enumerate(lens):
        k, v = torch.randn(2, n, kv_heads, d, device=DEVICE, generator=rng).to(DTYPE)
        places = torch.arange(n)
        slots = (tables[row, places // size].long() * size + places % size).to(DEVICE)
        for cache in made:
            kv_store(k, v, cache, slots)
    return made[0], made[1], tables.to(DEVICE)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("d", "size", "block_n"),
    [
        pytest.param(d, size, block_n, marks=[] if d == 40 or size == 16 else [pytest.mark.long])
        for d in (16, 40, 64)
        for size, block_n in ((16, 16), (32, 16), (6, 16), (2, 32))
    ],
)
def test_attention_reads_values_in_pairs(
    d: int, size: int, block_n: int, window: int | None, rng: torch.Generator
) -> None:
    lens, queries, heads, kv_heads = [1, 2, 33, 40, 7], [1, 1, 1, 1, 1], 6, 2
    one, two, tables = caches(lens, size, kv_heads, d, rng)
    contexts = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lens), heads, d, device=DEVICE, generator=rng).to(DTYPE)
    for splits in (1, 4):
        config = DecodeConfig(block_n, 2, 2, splits)
        found, wanted = (
            paged_decode(q, cache, tables, contexts, scale=d**-0.5, sliding_window=window, config=config)
            for cache in (two, one)
        )
        assert_close(found, wanted, f"decode, {splits} splits")
    queries = [1, 2, 20, 5, 7]
    q = torch.randn(sum(queries), heads, d, device=DEVICE, generator=rng).to(DTYPE)
    tiles = torch.from_numpy(query_tiles(queries, lens, 16 // (heads // kv_heads))).to(DEVICE)
    config = PrefillConfig(16, block_n, 2, 2)
    found, wanted = (
        paged_prefill(q, cache, tables, tiles, scale=d**-0.5, sliding_window=window, config=config)
        for cache in (two, one)
    )
    assert_close(found, wanted, "prefill")


@pytest.mark.parametrize("paired", [False, True])
def test_rope_stores_in_the_caches_format(paired: bool, rng: torch.Generator) -> None:
    """A pending projection, normalized, rotated and stored at once, as if each were done by itself."""
    tokens, heads, kv_heads, d, size = 5, 4, 2, 24, 4
    spec = LayerSpec(0, heads, kv_heads, d, d**-0.5, None, None)
    columns = (heads + 2 * kv_heads) * d
    values = torch.randn(tokens, columns, device=DEVICE, generator=rng).to(DTYPE)
    rows, each = (torch.rand(n, device=DEVICE, generator=rng) + 0.5 for n in (tokens, columns))
    angles = torch.randn(tokens, d // 2, device=DEVICE, generator=rng)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE, generator=rng).to(DTYPE), 1e-6, False)
    slots = torch.tensor([3, 0, 7, -1, 9], device=DEVICE)
    scales = torch.rand(2, kv_heads, device=DEVICE, generator=rng) / 50 + 0.01
    made = []
    for _ in range(2):
        data = torch.zeros(2, 3, size, kv_heads, d, device=DEVICE).to(torch.float8_e4m3fn)
        made.append(LayerCache(data[0], data[1], *scales, PAIRS if paired else None))
    pending = ProductScales(rows, each, DTYPE)
    q, _, _ = norm_rope(values, cos, sin, spec, norms=norms, cache=made[0], slots=slots, pending=pending)
    product = Pending(values, rows, each).finished(DTYPE)
    wanted, k, v = norm_rope(product, cos, sin, spec, norms=norms)
    kv_store(k, v, made[1], slots)
    assert_close(q, wanted, "queries")
    assert torch.equal(made[0].k.view(torch.uint8), made[1].k.view(torch.uint8)), "keys"
    assert torch.equal(made[0].v.view(torch.uint8), made[1].v.view(torch.uint8)), "values"


@pytest.mark.parametrize("scheme", [FP8, W8A8, INT8], ids=lambda s: s.name)
@pytest.mark.parametrize("d", [16, 24])
def test_the_output_projection_combines_splits(scheme: Scheme, d: int, rng: torch.Generator) -> None:
    heads, splits, size = 6, 4, 48
    layer = KernelOutput(layer_of(scheme, size, heads * d, rng))
    spec = LayerSpec(0, heads, 2, d, 1.0, None, None)
    d_pad = max(16, 1 << (d - 1).bit_length())
    workspace = Workspace(heads * splits * 2, d_pad, DEVICE)
    parts = torch.randn(splits, heads, d, device=DEVICE, generator=rng).to(DTYPE)
    logs = torch.randn(splits, heads, device=DEVICE, generator=rng)
    workspace.partial.view(DTYPE)[: splits * heads * d_pad].view(splits, heads, d_pad)[..., :d] = parts
    workspace.lse[: splits * heads * 2 : 2] = logs.flatten()
    residual = torch.randn(1, size, device=DEVICE, generator=rng).to(DTYPE)
    contexts = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    found = layer.combine(Parts(residual, spec, contexts, workspace, LoneConfig(16, splits=splits)), residual)
    weights = torch.softmax(logs * 0.6931471805599453, dim=0)[..., None]
    mixed = (parts.float() * weights).sum(0).to(DTYPE).view(1, -1)
    wanted = KernelLinear(layer_of_kept(layer))(mixed, residual=residual)
    assert_close(found, wanted, f"{scheme.name}, combined")


def layer_of_kept(layer: KernelLinear) -> QuantLinear:
    return QuantLinear(layer.quantized(), layer.bias)


def test_the_ledger_knows_of_unpacked_weights() -> None:
    model = load_model("random:tiny", device=DEVICE, dtype="float32")
    options = {"kernels": True, "graphs": False, "cache_bytes": 1 << 20, "max_len": 64}
    engines = [quant.load(model, quantization=scheme, **options) for scheme in (None, "int8")]
    largest = model.config.vocab_size * model.config.hidden_size * 4  # the head, in float32
    more = engines[1].ledger.reserved - engines[0].ledger.reserved
    assert more == largest, f"{more} bytes are left free for weights of one byte, which need {largest}"


def test_attention_waits_for_the_first_layers_projection_alone() -> None:
    """Before its wait it reads what was written before that one; see `starts_early`."""
    model = load_model("random:tiny", device=DEVICE, dtype="float32", linears=Quantize(FP8, None))
    blocks = install(latency(optimize(model))).modules()
    projections = [block.qkv_proj for block in blocks if isinstance(block, FusedAttention)]
    ahead = [layer.run_ahead for layer in projections if isinstance(layer, KernelLinear)]
    assert ahead == [index > 0 for index in range(model.config.num_layers)], f"layers run ahead: {ahead}"

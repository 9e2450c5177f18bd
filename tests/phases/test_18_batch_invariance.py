"""Phase 18: a request has the same bits in every batch, and a planted cause of other bits is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import batch_invariance
from batch_invariance import linear
from batch_invariance.attention import CHUNK, ChunkedTorch, Softmax
from batch_invariance.linear import (
    FixedLinear,
    ProductCosts,
    agreeing_sizes,
    fastest_calls,
    in_blocks,
    measured_costs,
    multiply,
)
from batch_invariance.probing import same_bits
from batch_invariance.quantized import FixedQuantLinear, dense_weight
from common.errors import UserError
from common.models.config import RopeConfig
from common.models.hub import model_folder
from common.sampling import ops
from common.sampling.params import SamplingParams
from forward.attention import LayerSpec
from forward.loading import load_model, random_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import LayerBlocks, PagedEngine
from quant.formats import SCHEMES
from quant.linear import QuantLinear
from speculative.speculation import SpeculativeRunner
from tests.compiling import spilled

pytestmark = pytest.mark.timeout(240)
DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [3, 40, 17, 90, 64, 5, 33]


# Products.


@pytest.mark.parametrize("rows", [1, 5, 63, 64, 100, 1000])
@pytest.mark.parametrize("fixed", [0.5, 1.05, 2.0])
def test_calls_cover_each_row_once_and_the_library_gets_only_its_sizes(
    rows: int, fixed: float
) -> None:
    sizes = {size: float(size) for size in (4, 16, 64, 256)}
    costs = ProductCosts(sizes, {1: fixed})
    found = fastest_calls(costs, 3, 3 + rows)[1]
    assert [row for first, last, _ in found for row in range(first, last)] == list(
        range(3, 3 + rows)
    )
    for first, last, size in found:
        assert size == 0 or (size in sizes and size >= last - first > 0)
    assert all(last - first == size for first, last, size in found[:-1])


COSTS = ProductCosts(
    {192: 40.0, 384: 45.0, 4096: 500.0}, {16: 20.0, 48: 42.0, 64: 57.0, 1024: 200.0}
)
"""Microseconds, much as they were measured for a weight of 4096 x 12288."""


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        (0, []),
        (10, [(0, 10, 0)]),  # the fixed product reads the weights, and no more
        (48, [(0, 48, 0)]),  # padding costs a copy
        (64, [(0, 64, 192)]),  # padding is faster than a slow product
        (192, [(0, 192, 192)]),
        (200, [(0, 200, 384)]),
        (400, [(0, 384, 384), (384, 400, 0)]),
        (8192, [(0, 4096, 4096), (4096, 8192, 4096)]),  # not half of what is left, but fast
        (8384, [(0, 4096, 4096), (4096, 8192, 4096), (8192, 8384, 192)]),
        (8200, [(0, 4096, 4096), (4096, 8192, 4096), (8192, 8200, 0)]),
    ],
)
def test_the_calls_of_a_batch_are_the_fastest(
    rows: int, calls: list[tuple[int, int, int]]
) -> None:
    assert COSTS.plan(rows) == calls


def test_the_fixed_product_takes_longer_with_rows_beyond_those_that_were_timed() -> None:
    assert [COSTS.of_fixed(rows) for rows in (1, 17, 1024, 4096)] == [20, 42, 200, 800]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)
    costs = measured_costs([layer.weight], layer.bias, [1, 2, 3, 4, 16, 48])
    fixed = FixedLinear(layer, costs)
    x = torch.randn(70, 48).to(dtype)
    whole = fixed(x)
    torch.testing.assert_close(whole, layer(x), atol=2e-2, rtol=2e-2)
    for count in (1, 2, 3, 7, 16, 33, 48):
        for first in (0, 5, 22):
            part = fixed(x[first : first + count])
            assert same_bits(part, whole[first : first + count]), (count, first)


def split_in_two(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """What a split-K kernel does: two halves of the sum, added at the end."""
    half = x.shape[1] // 2
    out.copy_(x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t())


def test_a_library_that_splits_the_sum_for_few_rows_is_not_asked_for_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = linear.library

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        (split_in_two if len(x) < 16 else plain)(x, weight, bias, out)

    monkeypatch.setattr(linear, "library", library)
    torch.manual_seed(0)
    weight = torch.randn(64, 96)
    found = agreeing_sizes(in_blocks, weight, None, [4, 8, 16, 32])
    assert 4 not in found and 8 not in found and 16 in found


def test_a_fault_in_one_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = linear.library, list[int]()

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        calls.append(len(x))
        (split_in_two if calls.count(len(x)) == 3 else plain)(x, weight, bias, out)

    monkeypatch.setattr(linear, "library", library)
    assert agreeing_sizes(plain, torch.randn(64, 96), None, [16, 32]) == ()


def test_a_rare_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of some thousand numbers differs: a size of one row shows 64 numbers a window."""
    seen = [0]

    def fixed(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_((x[:, None] * weight).sum(-1))

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        fixed(x, weight, bias, out)
        seen[0] += out.numel()
        if seen[0] > 4000:
            out[-1, -1] += 1

    monkeypatch.setattr(linear, "library", library)
    assert agreeing_sizes(fixed, torch.randn(64, 96), None, [1]) == ()
    assert seen[0] > 4000


@pytest.mark.parametrize("bias", [False, True])
def test_another_order_is_found_though_half_precision_hides_it(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """Float32 sums that differ in their last bits are the same in bfloat16, but for one in some 40,000."""

    def last_half_first(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        half = x.shape[1] // 2
        x, weight = x.float(), weight.float()
        added = 0 if bias is None else bias.float()
        parts = x[:, half:] @ weight[:, half:].t(), x[:, :half] @ weight[:, :half].t()
        out.copy_(parts[0] + parts[1] + added)

    def in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(x.float() @ weight.float().t() + (0 if bias is None else bias.float()))

    torch.manual_seed(0)
    weight, added = torch.randn(80, 48).bfloat16(), torch.randn(80).bfloat16()
    monkeypatch.setattr(linear, "library", last_half_first)
    for seed in range(3):
        torch.manual_seed(seed)
        found = agreeing_sizes(in_float32, weight, added if bias else None, [16, 32])
        assert found == (), seed


def test_sizes_are_ascending_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear.MOST_NUMBERS, "cpu", 64 * 40)
    weight = torch.randn(64, 8)
    assert agreeing_sizes(in_blocks, weight, None, [32, 16, 16, 64]) == (16, 32)


def test_a_padded_call_of_the_library_gives_the_rows_of_a_full_one() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 80).bfloat16().requires_grad_(False)
    x = torch.randn(2, 20, 48).bfloat16()
    for library, calls in (({64: 1.0}, 1), ({16: 1.0}, 3)):
        costs = ProductCosts(library, {1: 100.0})
        assert len(costs.plan(40)) == calls
        assert same_bits(FixedLinear(layer, costs)(x), layer(x))


def test_the_comparison_tells_the_two_zeros_apart() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# Softmax over chunks.


def softmax(largest: float, total: float, weighted: float) -> Softmax:
    return Softmax(torch.tensor(largest), torch.tensor(total), torch.tensor([weighted]))


def test_a_chunk_without_visible_keys_changes_no_bit() -> None:
    some, none = softmax(0.3, 1.7, 0.123), softmax(-1e30, 0.0, 0.0)
    for both in (some.then(none), none.then(some)):
        assert both.total == some.total and torch.equal(both.weighted, some.weighted)


def test_two_chunks_are_the_softmax_over_all_keys() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(2, 5, 9) * 3, torch.randn(9, 4)

    def over(keys: slice) -> Softmax:
        part = scores[..., keys]
        largest = part.amax(-1)
        weights = (part - largest[..., None]).exp()
        return Softmax(largest, weights.sum(-1), weights @ values[keys])

    both = over(slice(0, 4)).then(over(slice(4, 9)))
    torch.testing.assert_close(both.largest, scores.amax(-1))
    torch.testing.assert_close(
        both.weighted / both.total[..., None], scores.softmax(-1) @ values
    )


def test_chunks_combined_in_another_order_round_differently() -> None:
    torch.manual_seed(0)
    parts = [softmax(*x) for x in torch.rand(200, 3).tolist()]

    def combined(order: Sequence[Softmax]) -> Softmax:
        done = order[0]
        for part in order[1:]:
            done = done.then(part)
        return done

    assert combined(parts).weighted != combined(parts[::-1]).weighted


# Log-probabilities.


def test_log_probabilities_of_a_row_have_the_same_bits_in_every_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 3001) * 5
    tokens = torch.arange(40)
    whole = ops.raw_logprobs(logits, tokens, 3)
    expected = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(whole[0].double(), expected, atol=5e-6, rtol=0)
    for count in (1, 2, 3, 8, 31):
        part = ops.raw_logprobs(logits[:count], tokens[:count], 3)
        for a, b in zip(part, whole, strict=True):
            assert torch.equal(a, b[:count])


# Engines.


@cache
def model_of(shape: str, dtype: str) -> Model:
    return load_model(f"random:{shape}", device="cpu", dtype=dtype)


TINY = SHAPES["tiny"]
FAMILIES = {
    "llama-3.2": replace(
        TINY,
        num_heads=8,
        num_kv_heads=2,
        tie_word_embeddings=True,
        rope=RopeConfig(500_000.0, kind="llama3", factor=32.0, original_max_position=64),
    ),
    "qwen2.5": replace(TINY, family="qwen2", attention_bias=True),
    "qwen3": replace(TINY, family="qwen3", head_dim=32, attention_scale=32**-0.5),
    "gemma-3": replace(
        SHAPES["tiny-window"],
        num_kv_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        sliding_windows=(40, 40, None),
    ),
    "gpt-2": replace(
        SHAPES["gpt2"],
        vocab_size=257,
        hidden_size=48,
        intermediate_size=192,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_dim=16,
        attention_scale=0.25,
        sliding_windows=(),
    ),
}
"""Small models with what is particular to these families: groups of heads, biases, norms, windows, caps."""


def prompts(model: Model) -> list[list[int]]:
    vocab = model.config.vocab_size
    return [[(n * 97 + i * 31) % vocab for i in range(n)] for n in LENGTHS]


def params() -> list[SamplingParams]:
    """Greedy and random requests, with log-probabilities, so that a difference of one bit is seen."""
    return [
        SamplingParams(
            temperature=0.8 * (j % 2), seed=j, ignore_eos=True, max_tokens=8, logprobs=1
        )
        for j in range(len(LENGTHS))
    ]


def outputs(engine: PagedEngine, groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Serve groups of requests one after the other, each group at once: request -> tokens and bits."""
    given, how = prompts(engine.runner.model), params()
    found = {}
    for group in groups:
        done = engine.generate([given[k] for k in group], [how[k] for k in group])
        for k, completion in zip(group, done, strict=True):
            found[k] = completion.token_ids, completion.logprobs
    return found


EVERY = list(range(len(LENGTHS)))
ALONE = [[k] for k in EVERY]
ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "small chunks": {"step_tokens": 20, "chunk_tokens": 7},
    "no prefix cache": {"prefix_cache": False},
    "no overlap": {"overlap": False},
    "n-grams": {"drafter": "ngram", "draft_adaptive": False},
    "other rows": {"max_rows": 3},
}


def make(model: Model | str, **options: Any) -> PagedEngine:
    return batch_invariance.load(
        model, **{"max_rows": 8, "max_len": 128, "step_tokens": 64, **options}
    )


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "shape", ["tiny", pytest.param("tiny-window", marks=pytest.mark.slow)]
)
def test_a_request_has_the_same_bits_in_every_company_and_engine(
    shape: str, dtype: str
) -> None:
    model = model_of(shape, dtype)
    expected = outputs(make(model), ALONE)
    for name, options in ENGINES.items():
        engine = make(model, **options)
        for groups in ([EVERY], [EVERY[::-1]], ALONE):
            assert outputs(engine, groups) == expected, (name, groups)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_bits_in_both_half_precisions(
    family: str, dtype: torch.dtype
) -> None:
    model = random_model(FAMILIES[family], device="cpu", dtype=dtype)
    engine = make(model)
    expected = outputs(engine, ALONE)
    assert outputs(engine, [EVERY]) == expected
    assert outputs(make(model, **ENGINES["small chunks"]), [EVERY[::-1]]) == expected
    assert outputs(make(model, **ENGINES["n-grams"]), [EVERY]) == expected


@pytest.mark.slow
@pytest.mark.weights
def test_a_real_model_has_the_same_bits_in_every_company() -> None:
    model = load_model(str(model_folder("smollm2")), device="cpu", dtype="bfloat16")
    engine = make(model, max_rows=4)
    expected = outputs(engine, ALONE[:4])
    assert outputs(engine, [EVERY[3::-1]]) == expected
    chunked = make(model, max_rows=4, step_tokens=20, chunk_tokens=7)
    assert outputs(chunked, [EVERY[:4]]) == expected


def test_a_preempted_request_has_the_same_bits() -> None:
    model = model_of("tiny", "float32")
    expected = outputs(make(model), ALONE)
    blocks = 10 * 16 * model.config.kv_bytes_per_token(model.dtype)
    engine = make(model, cache_bytes=blocks, max_len=100)
    assert outputs(engine, [EVERY]) == expected
    assert engine.scheduler.preemptions > 0


def test_samples_of_one_prompt_have_the_same_bits_in_every_company() -> None:
    model = model_of("tiny-window", "bfloat16")
    given = prompts(model)[:4]
    how = [replace(each, n=3, temperature=0.9) for each in params()[:4]]
    engine = make(model, max_rows=16)
    alone = [c for k in range(4) for c in engine.generate([given[k]], [how[k]])]
    together = engine.generate(given, how)
    assert len(alone) == len(together) == 12
    for one, other in zip(alone, together, strict=True):
        assert (one.sample, one.token_ids, one.logprobs) == (
            other.sample,
            other.token_ids,
            other.logprobs,
        )
    assert len({tuple(each.token_ids) for each in alone}) > 4


@pytest.mark.parametrize("shape", ["tiny", "tiny-window"])
def test_drafts_that_are_verified_together_change_no_bit(shape: str) -> None:
    """A model that drafts for itself is nearly always right, and for another one nearly never."""
    model = model_of(shape, "bfloat16")
    expected = outputs(make(model), ALONE)
    engine = make(
        model, drafter="model", draft_model="random:tiny", draft_length=3, draft_adaptive=False
    )
    assert outputs(engine, [EVERY]) == expected
    assert outputs(engine, ALONE) == expected
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, SpeculativeRunner)
    drafted, accepted = sum(drafter.stats.drafted), sum(drafter.stats.accepted)
    assert drafted > 20 and (accepted > 20 if shape == "tiny" else accepted < drafted)


def test_keys_of_eight_bits_have_the_same_bits_in_every_batch() -> None:
    model = model_of("tiny", "float32")
    expected = outputs(make(model, kv_cache="int8"), ALONE)
    engine = make(model, kv_cache="int8", step_tokens=20, chunk_tokens=7)
    assert outputs(engine, [EVERY]) == expected


@pytest.mark.parametrize("scheme", ["fp8", "fp8-weights", "fp8-block", "int8", "w8a8", "int4"])
def test_quantized_weights_give_the_same_bits_in_every_batch(scheme: str) -> None:
    """`w8a8` adds up whole numbers by the library; the weights of the others are unpacked."""
    options = {"device": "cpu", "dtype": "bfloat16", "quantization": scheme}
    one = make("random:tiny", **options)
    unpacked = [
        part for part in one.runner.model.modules() if isinstance(part, FixedQuantLinear)
    ]
    assert bool(unpacked) == (scheme != "w8a8")
    expected = outputs(one, ALONE)
    assert outputs(one, [EVERY]) == expected
    assert outputs(
        make("random:tiny", step_tokens=20, chunk_tokens=7, **options), [EVERY]
    ) == (expected)


def test_an_unpacked_layer_computes_what_the_quantized_one_does() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80).bfloat16().requires_grad_(False)
    x = torch.randn(5, 48).bfloat16()
    for name in ("fp8", "fp8-block", "int8"):
        layer = QuantLinear.of(linear, SCHEMES[name], "linear")
        costs = measured_costs([dense_weight(layer, x.dtype)], layer.bias, [4])
        found = FixedQuantLinear(layer, costs)(x)
        torch.testing.assert_close(found, layer(x), atol=2e-2, rtol=2e-2)


def test_without_the_mode_company_changes_bits() -> None:
    model = model_of("tiny", "float32")
    engine = make(model, batch_invariant=False)
    assert outputs(engine, ALONE) != outputs(engine, [EVERY])


def by_company(self: ChunkedTorch) -> None:
    """A planted bug: chunks are shorter when there are few requests, to fill more cores."""
    PLAN(self)
    self.chunk = 16 if len(self.batch.host.query_lens) < 3 else 32


PLAN = ChunkedTorch.plan


def test_chunks_that_depend_on_the_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedTorch, "plan", by_company)
    engine = make(model_of("tiny", "float32"))
    assert outputs(engine, ALONE) != outputs(engine, [EVERY])


def test_unchecked_sizes_of_the_library_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "agreeing_sizes", lambda *_: tuple(range(1, 200)))
    engine = make(model_of("tiny", "float32"))
    assert outputs(engine, ALONE) != outputs(engine, [EVERY])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("tiny-moe", {}),
        ("tiny-delta", {}),
        ("tiny", {"tensor_parallel": 2}),
    ],
)
def test_what_has_no_fixed_order_is_refused_by_name(
    shape: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="batch_invariant is True, but"):
        make(f"random:{shape}", device="cpu", **options)


# Kernels. In the interpreter products of the same numbers may round by their shapes; here all are exact.


@pytest.fixture
def kernels() -> Iterator[Any]:
    pytest.importorskip("triton")
    import triton_paged_attention  # noqa: F401  # chooses the interpreter where there is no GPU
    from batch_invariance.kernels import attention

    yield attention


LENGTH, KEYS = 70, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the kernels: natively on a GPU, otherwise in the interpreter."""
SCALE = 0.05
DECODED = [n for n in range(1, LENGTH + 1) if n % KEYS in (15, 0, 1, 3, 4, 5) or n == LENGTH]
"""Lengths beside the edges of tiles of keys, and beside those where a window of 20 loses a tile."""


def exact_inputs() -> tuple[Tensor, LayerBlocks, Tensor]:
    """One request's queries, its cache and its block table: scores and values of few bits."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-LENGTH // 16)
    q = torch.randint(-1, 2, (LENGTH, 2, 16), generator=generator)
    k = torch.randint(-1, 2, (blocks, 16, 1, 16), generator=generator)
    v = torch.randint(-4, 5, (blocks, 16, 1, 16), generator=generator) / 4
    table = torch.randperm(blocks, generator=generator).int()[None]
    q, k, v = (part.half().to(DEVICE) for part in (q, k, v))
    return q, LayerBlocks(k, v), table.to(DEVICE)


def layer_of(window: int | None) -> LayerSpec:
    return LayerSpec(0, 2, 1, 16, SCALE, window)


def as_prompt(
    kernels: Any, block_m: int = 32, cuts: Sequence[int] = (), window: int | None = None
) -> Tensor:
    from triton_paged_attention.prefill import query_tiles

    q, cache, table = exact_inputs()
    parts = []
    for first, last in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        tiles = torch.from_numpy(query_tiles([last - first], [last], block_m // 2)).to(DEVICE)
        launch = kernels.Launch(block_m)
        parts.append(
            kernels.chunked_attention(
                q[first:last].contiguous(), cache, table, layer_of(window), chunk=32, block_n=KEYS,
                tiles=tiles, launch=launch,
            )
        )  # fmt: skip
    return torch.cat(parts)


def as_decodes(
    kernels: Any, splits: int = 1, window: int | None = None, chunk: int = 32
) -> Tensor:
    """Of `DECODED`, each a request of its own."""
    q, cache, table = exact_inputs()
    lens = torch.tensor(DECODED, dtype=torch.int32, device=DEVICE)
    scratch = kernels.Scratch(1 << 10, 16, q.device)
    out: Tensor = kernels.chunked_attention(
        q[lens - 1],
        cache,
        table.expand(len(lens), -1),
        layer_of(window),
        chunk=chunk,
        block_n=KEYS,
        context_lens=lens,
        launch=kernels.Launch(16, splits=splits),
        scratch=scratch,
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_one_query_token_and_many_get_the_same_bits(kernels: Any, window: int | None) -> None:
    expected = as_prompt(kernels, window=window)
    assert same_bits(as_prompt(kernels, 16, [7, 40], window), expected)
    for splits in (1, 2, 3):
        found = as_decodes(kernels, splits, window)
        assert same_bits(found, expected[[n - 1 for n in DECODED]])


@pytest.mark.parametrize(("begin", "end"), [(0, 900), (300, 901), (512, 513), (0, 0)])
def test_shares_are_whole_chunks_and_cover_all_keys(
    kernels: Any, begin: int, end: int
) -> None:
    from tests.chunk_shares import shares

    for splits in (1, 2, 3, 8):
        found = shares(begin, end, splits, 256)
        used = found[0][2]
        assert {share[2] for share in found} == {used}
        assert used == max(1, sum(high > low for low, high, _ in found))
        keys = [key for low, high, _ in found[:used] for key in range(low, high)]
        assert keys == list(range(begin, end))
        assert all(high % 256 == 0 or high == end for _, high, _ in found[:used])
        assert used == 1 or all(
            high - low <= 256 * 4 // splits + 256 for low, high, _ in found
        )


def test_a_split_decode_has_the_bits_of_a_prompt(kernels: Any) -> None:
    assert same_bits(as_decodes(kernels, 3), as_prompt(kernels)[[n - 1 for n in DECODED]])


def test_other_chunks_give_other_bits(kernels: Any) -> None:
    found = as_decodes(kernels, chunk=16)
    assert not same_bits(found, as_prompt(kernels)[[n - 1 for n in DECODED]])


def test_the_kernel_computes_attention(kernels: Any) -> None:
    from paged_cache.reference import paged_attention

    q, cache, table = exact_inputs()
    starts = torch.tensor([0, LENGTH], device=DEVICE)
    lens = torch.tensor([LENGTH], device=DEVICE)
    expected = paged_attention(q, cache, table, starts, lens, scale=SCALE)
    torch.testing.assert_close(as_prompt(kernels).float(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_tiles_of_a_product_agree_and_the_sum_is_not_cut(kernels: Any, biased: bool) -> None:
    from batch_invariance.kernels.product import ProductTile, product

    torch.manual_seed(0)
    sizes = (40, 72), (24, 72)
    x, weight = (torch.randint(-2, 3, size).half().to(DEVICE) for size in sizes)
    bias = torch.randn(24).half().to(DEVICE) if biased else None
    expected = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    for tile in (
        ProductTile(16, 16, 32, 4, 2),
        ProductTile(32, 32, 64, 4, 2),
        ProductTile(16, 16, 32, 4, 2, descriptors=True),
        ProductTile(32, 32, 64, 4, 2, descriptors=True),
    ):
        out = torch.full((41, 24), 7.0, dtype=torch.float16, device=DEVICE)
        product(x, weight, bias, out[:40], tile)
        assert same_bits(out[:40], expected.half()), tile
        assert bool((out[40] == 7).all()), "nothing is written behind the last row"


@pytest.mark.parametrize("programs", [1, 3, 100])
def test_every_program_computes_its_share_of_tiles(
    kernels: Any, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batch_invariance.kernels import product as module

    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    torch.manual_seed(0)
    x, weight = (torch.randint(-2, 3, (n, 32)).half().to(DEVICE) for n in (200, 40))
    out = torch.zeros(200, 40, dtype=torch.float16, device=DEVICE)
    module.product(x, weight, None, out, module.ProductTile(16, 16, 16, 4, 2, True))
    assert same_bits(out, (x.float() @ weight.float().t()).half())


def test_tiles_that_give_other_bits_or_cannot_be_read_are_left_out(kernels: Any) -> None:
    from batch_invariance.kernels.product import ProductTile, tiled_products

    first = ProductTile(16, 16, 32, 4, 2)
    described = first._replace(descriptors=True)
    weight = torch.randint(-2, 3, (24, 72)).half().to(DEVICE)
    assert len(tiled_products(weight, [first, described])) == 2
    odd = torch.randint(-2, 3, (24, 71)).half().to(DEVICE)  # rows of 142 bytes
    assert len(tiled_products(odd, [first, described])) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 3072), (257, 48)])
def test_a_product_on_a_gpu_has_the_same_bits_in_every_batch(
    kernels: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = list(torch.randn(3, *shape, device="cuda").to(dtype) / 32)
    costs = measured_costs(weights, None, [1, 2, 4, 8, 16, 64, 128, 256, 512, 1024])
    x = torch.randn(1100, shape[1], device="cuda").to(dtype)
    whole = multiply(x, weights[0], None, costs)
    torch.testing.assert_close(whole, x @ weights[0].t(), atol=2e-2, rtol=2e-2)
    for count in (1, 3, 16, 17, 64, 100, 200, 300, 777, 1024):
        for first in (0, 5, 76):
            part = multiply(x[first : first + count], weights[0], None, costs)
            assert same_bits(part, whole[first : first + count]), (count, first)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "fp8", "fp8-block", "int8", "w8a8", "int4"])
def test_on_a_gpu_a_request_has_the_same_bits_in_every_company(
    kernels: Any, scheme: str | None
) -> None:
    model, options = "random:llama-160m", {"device": "cuda", "dtype": "bfloat16"}
    if scheme is not None:
        options["quantization"] = scheme
    engine = make(model, **options)
    expected = outputs(engine, ALONE)
    assert outputs(engine, [EVERY]) == expected
    assert outputs(make(model, step_tokens=20, chunk_tokens=7, **options), [EVERY]) == expected
    drafting = make(model, drafter="ngram", draft_adaptive=False, **options)
    assert outputs(drafting, [EVERY[::-1]]) == expected


def test_a_draw_does_not_ask_how_many_rows_there_are(kernels: Any) -> None:
    from batch_invariance.sampling import LEAST_ROWS, FixedSamplerBackend
    from common.sampling.sampler import Sampler

    torch.manual_seed(0)
    sampler = Sampler(8, 3000, DEVICE)
    sampler.sampler_backend = FixedSamplerBackend()
    for row in range(8):
        sampler.set_row(row, SamplingParams(temperature=1.0, seed=row), [1])
    logits, rows = torch.randn(8, 3000, device=DEVICE), torch.arange(8, device=DEVICE)
    steps = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    whole = sampler.sample(logits, rows, steps, sampler.plan(range(8))).tokens
    for count in (1, 3, LEAST_ROWS):
        plan = sampler.plan(range(count))
        part = sampler.sample(logits[:count], rows[:count], steps[:count], plan)
        assert torch.equal(part.tokens, whole[:count])


def test_the_chunk_is_whole_tiles_of_every_head_size() -> None:
    assert all(CHUNK % keys == 0 for keys in (16, 32, 64))


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(kernels: Any) -> None:
    found = spilled(90, "--chunks")
    assert found and max(found) <= 64, "what a program works with stays in registers"

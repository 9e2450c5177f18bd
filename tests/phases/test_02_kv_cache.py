"""Phase 02: the cache changes what is computed, never what comes out.

From the smallest part to the whole, so that the first failure is the nearest to its cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import forward
import kv_cache
from common.errors import UserError
from common.events import generate
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from forward import Model
from forward.attention import RecomputeAttention, causal_mask
from forward.shapes import SHAPES
from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache, LayerCache
from tests.equivalence.compare import assert_all_same

FLOAT32: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
WINDOWS = SHAPES["tiny-window"]
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


def tiny(config: ModelConfig = SHAPES["tiny"], dtype: torch.dtype = torch.float32) -> Model:
    return forward.random_model(config, device="cpu", dtype=dtype)


def small_gpt2() -> ModelConfig:
    small = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_heads": 3,
        "num_kv_heads": 3,
        "head_dim": 16,
    }
    return replace(
        SHAPES["gpt2"], vocab_size=300, intermediate_size=96, sliding_windows=(), **small
    )


@pytest.fixture(params=["tiny", "tiny-window", "two-windows", "gpt2-small"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    others = {
        "two-windows": replace(WINDOWS, sliding_windows=(24, 9, None)),
        "gpt2-small": small_gpt2(),
    }
    return tiny((SHAPES | others)[request.param])


def ring(capacity: int) -> LayerCache:
    return LayerCache(
        torch.full((1, 1, capacity, 1), -1.0), torch.full((1, 1, capacity, 1), -1.0)
    )


def chunks_of(sizes: Iterable[int]) -> Iterable[tuple[int, Tensor]]:
    """Each chunk's first column, and keys ``[1, 1, count, 1]`` that are their columns' numbers."""
    start = 0
    for count in sizes:
        yield start, torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1)
        start += count


# What a cache takes


def test_a_window_layer_keeps_its_window_only() -> None:
    cache = KVCache(WINDOWS, 2, 500, **FLOAT32)
    kept = [layer.capacity for layer in cache.layers]
    assert kept == [24, 24, 500], (
        f"layers with windows {WINDOWS.sliding_windows} keep {kept} of 500 columns"
    )


@pytest.mark.parametrize("max_len", [10, 24, 500], ids=lambda n: f"max_len-{n}")
def test_bytes_are_known_before_they_are_allocated(max_len: int) -> None:
    """Also where the window is larger than the whole context: no layer holds more than ``max_len``."""
    window = min(24, max_len)
    expected = (
        2 * 2 * (window + window + max_len) * 2 * 16 * 4
    )  # k and v, rows, columns, KH, D, float32
    said = KVCache.bytes_needed(WINDOWS, 2, max_len, torch.float32)
    assert said == expected, (
        f"bytes_needed says {said} bytes for max_len {max_len}, not {expected}"
    )
    layers = KVCache(WINDOWS, 2, max_len, **FLOAT32).layers
    taken = sum(
        t.numel() * t.element_size() for layer in layers for t in (layer.keys, layer.values)
    )
    assert taken == said, (
        f"a cache of max_len {max_len} takes {taken} bytes, but bytes_needed says {said}"
    )


def test_published_memory() -> None:
    """Qwen3-0.6B in bfloat16: 112 KiB a token."""
    config = SHAPES["qwen3-0.6b"]
    said = KVCache.bytes_needed(config, 1, 1, torch.bfloat16)
    assert said == 112 * 1024, f"a token of Qwen3-0.6B takes 112 KiB, not {said / 1024:g}"
    assert config.kv_bytes_per_token(torch.bfloat16) == said


# A ring


def test_a_ring_holds_the_newest_columns() -> None:
    layer = ring(4)
    for start, columns in chunks_of((1, 2, 3, 1, 6, 1, 9, 4)):
        count = columns.shape[2]
        layer.write(start, columns, columns + 100)
        end, step = start + count, f"after columns {start} to {start + count - 1}"
        keys, values = (x.flatten().tolist() for x in layer.read(end))
        newest = list(range(max(0, end - 4), end))
        assert sorted(keys) == newest, (
            f"{step}, the ring of 4 holds the keys of {keys}, not of {newest}"
        )
        assert values == [key + 100 for key in keys], (
            f"{step}, keys {keys} stand beside values {values}"
        )
        said = layer.columns(end).tolist()
        assert said == keys, f"{step}, columns() says {said}, but the slots hold {keys}"


class Writes(TorchDispatchMode):
    """Counts the elements that are written into a tensor's memory."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.memory, self.count = target.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = func._schema.arguments and func._schema.arguments[0].is_write
        if written and args[0].untyped_storage().data_ptr() == self.memory:
            self.count += max(arg.numel() for arg in args[1:] if isinstance(arg, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [3, 4, 5, 11])
def test_no_slot_is_written_twice_in_a_step(count: int) -> None:
    """A chunk longer than the window is cut first: of two writes to a slot, either may be the last."""
    layer = ring(4)
    columns = torch.arange(count, dtype=torch.float32).view(1, 1, -1, 1)
    with Writes(layer.keys) as writes:
        layer.write(0, columns, columns)
    expected = min(4, count)
    assert writes.count == expected, (
        f"{count} columns: {writes.count} writes to a ring of 4, not {expected}"
    )


def test_the_past_stays_where_it_is() -> None:
    """A step appends: it neither moves the cache nor copies it for reading."""
    layer = ring(4)
    places = layer.keys.data_ptr(), layer.values.data_ptr()
    for start, columns in chunks_of((2, 1, 1, 3)):
        layer.write(start, columns, columns)
        moved = (layer.keys.data_ptr(), layer.values.data_ptr()) != places
        assert not moved, f"writing column {start} moved the whole cache to new memory"
        read = tuple(x.data_ptr() for x in layer.read(start + columns.shape[2]))
        assert read == places, (
            f"reading after column {start} copied the past instead of giving a view"
        )


def test_rows_that_stay_keep_their_own_past() -> None:
    cache = KVCache(SHAPES["tiny"], 3, 2, **FLOAT32)
    for layer in cache.layers:
        for row in range(3):
            layer.keys[row], layer.values[row] = row, row + 100
    cache.keep(torch.tensor([0, 2]))
    for index, layer in enumerate(cache.layers):
        keys, values = ([float(row.mean()) for row in x] for x in (layer.keys, layer.values))
        assert keys == [0, 2], (
            f"layer {index}: rows 0 and 2 stay, but the keys are those of rows {keys}"
        )
        assert values == [100, 102], (
            f"layer {index}: rows 0 and 2 stay, but the values are {values}"
        )


def test_full_cache_is_a_clear_error_and_writes_nothing() -> None:
    attention = CachedAttention(KVCache(SHAPES["tiny"], 1, 4, **FLOAT32))
    attention.begin(3)
    attention.cache.advance(3)
    with pytest.raises(
        UserError, match=r"the KV cache is full: 3 \+ 2 tokens, but max_len is 4"
    ):
        attention.begin(2)
    attention.begin(1)


# A step: what is computed


def test_a_layer_leaves_the_length_to_the_loop() -> None:
    """Within a step all layers must see the same length."""
    spec = tiny().layer_specs[0]
    attention = CachedAttention(KVCache(SHAPES["tiny"], 1, 4, **FLOAT32))
    attention.begin(3)
    q, kv = torch.randn(1, 3, spec.num_heads, 16), torch.randn(1, 3, spec.num_kv_heads, 16)
    attention(spec, q, kv, kv)
    length = attention.cache.length
    assert length == 0, (
        f"layer 0 advanced the length to {length}, so layer 1 would see {length} too many"
    )


@torch.inference_mode()
def cached_hidden(model: Model, ids: Tensor, chunks: list[int]) -> Tensor:
    """Hidden states ``[S, hidden]`` of ``ids [S]``, computed in steps of the given sizes."""
    attention = CachedAttention(KVCache(model.config, 1, len(ids), **FLOAT32))
    parts, start = [], 0
    for count in chunks:
        attention.begin(count)
        positions = torch.arange(start, start + count).unsqueeze(0)
        parts.append(model(ids[None, start : start + count], positions, attention)[0])
        attention.cache.advance(count)
        start += count
    return torch.cat(parts)


def test_masks_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """For three layers of two kinds: two masks for a chunk, anew in each step, and none for a decode."""
    made: list[tuple[int, ...]] = []

    def counted(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
        made.append((len(queries), len(keys)))
        return causal_mask(queries, keys, window)

    monkeypatch.setattr("kv_cache.attention.causal_mask", counted)
    cached_hidden(tiny(WINDOWS), torch.arange(13), [1, 5, 6, 1])
    assert made == [(5, 6)] * 2 + [(6, 12)] * 2, (
        f"two masks 5 x 6, then two 6 x 12 are needed, not {made}"
    )


def test_a_request_begins_with_the_cache_that_it_will_fill() -> None:
    """Empty, in the model's dtype, and without a column for the last token, which is never computed."""
    for dtype in (torch.float32, torch.bfloat16):
        engine = kv_cache.load(tiny(dtype=dtype))
        for prompt, limit in ((3, 5), (2, 4)):
            engine.begin(prompt, limit)
            cache, columns = engine.cache, prompt + limit - 1
            assert cache.length == 0, (
                f"a request begins behind {cache.length} tokens of the one before it"
            )
            assert cache.max_len == columns, (
                f"{prompt} + {limit} tokens, but max_len is {cache.max_len}"
            )
            held = cache.layers[0].keys.dtype
            assert held == dtype, f"the cache of a {dtype} model is {held}"
            cache.advance(3)


def test_each_token_is_computed_once() -> None:
    """The work shrank: a prompt once, then one token a step; the last token never."""
    model = tiny()
    sizes: list[int] = []
    ids: list[int] = []
    positions: list[int] = []

    def note(_: object, step: tuple[Tensor, Tensor, object]) -> None:
        sizes.append(step[0].numel())
        ids.extend(step[0].flatten().tolist())
        positions.extend(step[1].flatten().tolist())

    model.register_forward_pre_hook(note)
    tokens = generate(kv_cache.load(model), [[5, 6, 7]], GREEDY)[0].token_ids
    assert sizes == [3, 1, 1, 1, 1], (
        f"a prompt of 3, then 4 tokens, each once; the steps had {sizes}"
    )
    assert positions == list(range(7)), f"the 7 tokens computed were at positions {positions}"
    assert ids == [5, 6, 7, *tokens[:-1]], (
        f"computed {ids}, but the tokens are {[5, 6, 7, *tokens]}"
    )


# Every model: what comes out


@pytest.mark.parametrize(
    "chunks",
    [[90], [1] * 90, [64] + [1] * 26, [10, 1, 1, 40, 1, 37], [23, 24, 25, 18], [1, 88, 1]],
    ids=["prefill", "decode", "prefill-decode", "mixed", "around-the-window", "odd"],
)
def test_hidden_states_equal_recomputation(model: Model, chunks: list[int]) -> None:
    """Whatever the steps, also where a window layer's ring has wrapped (its window is 24, or 9)."""
    ids = torch.randint(0, 257, (90,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(ids, torch.arange(90), RecomputeAttention())
    off = (cached_hidden(model, ids, chunks) - expected).abs().amax(-1)  # [S]
    wrong = (~(off <= 2e-5)).nonzero().flatten().tolist()  # NaN is wrong as well
    ends = torch.tensor(chunks).cumsum(0).tolist()
    assert not wrong, (
        f"token {wrong[0]} is the first of {len(wrong)} wrong ones, off by {off[wrong[0]]:.1e}; "
        f"it is in step {sum(end <= wrong[0] for end in ends)}, and steps end at {ends}"
    )


def test_tokens_equal_phase_01(model: Model) -> None:
    """A long request first: what it leaves behind must not reach the short ones after it."""
    prompts = [list(range(1, 60)), [3], [5, 6, 7]]
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)
    slow = generate(forward.load(model), prompts, greedy)
    fast = generate(kv_cache.load(model), prompts, greedy)
    assert_all_same(model, slow, fast)


def test_sampled_tokens_equal_phase_01(model: Model) -> None:
    """A seed's randomness depends on the request and the token's number, not on how it was computed."""
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.9, seed=7, n=2
    )
    slow = generate(forward.load(model), [[5, 6]], params)
    fast = generate(kv_cache.load(model), [[5, 6]], params)
    assert_all_same(model, slow, fast)
    assert slow[0].token_ids != slow[1].token_ids


def test_uninitialized_cache_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` may hold NaN; a mask of minus infinity does not stop NaN, so it must not be read."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    model = tiny(WINDOWS)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    expected = generate(kv_cache.load(model), [[1, 2, 3]], params)
    monkeypatch.setattr(torch, "empty", poisoned)
    got = generate(kv_cache.load(model), [[1, 2, 3]], params)
    assert got[0].token_ids == expected[0].token_ids, (
        "tokens change with what the memory held before"
    )

"""Phase 02: the cache changes what is computed, never what comes out."""

from __future__ import annotations

import pytest
import torch

import forward
import kv_cache
from common.errors import UserError
from common.events import generate
from common.sampling.params import SamplingParams
from forward import Model, load_model
from forward.attention import RecomputeAttention
from forward.shapes import SHAPES
from kv_cache.attention import CachedAttention
from kv_cache.cache import KVCache, LayerCache

FLOAT32 = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture(params=["tiny", "tiny-window", "gpt2-small"], scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    if request.param != "gpt2-small":
        return load_model(f"random:{request.param}", device="cpu", dtype="float32")
    from dataclasses import replace

    small = {"num_layers": 2, "hidden_size": 48, "num_heads": 3, "num_kv_heads": 3, "head_dim": 16}
    config = replace(SHAPES["gpt2"], vocab_size=300, intermediate_size=96, sliding_windows=(), **small)
    return forward.random_model(config, device="cpu", dtype=torch.float32)


@torch.inference_mode()
def cached_hidden(model: Model, ids: torch.Tensor, chunks: list[int]) -> torch.Tensor:
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


@pytest.mark.parametrize(
    "chunks",
    [[90], [1] * 90, [64] + [1] * 26, [10, 1, 1, 40, 1, 37], [23, 24, 25, 18], [1, 88, 1]],
    ids=["prefill", "decode", "prefill-decode", "mixed", "around-the-window", "odd"],
)
def test_hidden_states_equal_recomputation(model: Model, chunks: list[int]) -> None:
    """Whatever the steps, also where a window layer's ring has wrapped (its window is 24)."""
    ids = torch.randint(0, 257, (90,))
    with torch.inference_mode():
        expected = model(ids, torch.arange(90), RecomputeAttention())
    torch.testing.assert_close(cached_hidden(model, ids, chunks), expected, atol=2e-5, rtol=0)


def test_tokens_equal_phase_01(model: Model) -> None:
    prompts = [[3], [5, 6, 7], list(range(1, 60))]
    greedy = SamplingParams(max_tokens=40, ignore_eos=True)
    slow = generate(forward.load(model), prompts, greedy)
    fast = generate(kv_cache.load(model), prompts, greedy)
    assert [c.token_ids for c in fast] == [c.token_ids for c in slow]


def test_sampled_tokens_equal_phase_01(model: Model) -> None:
    """A seed's randomness depends on the request and the token's number, not on how it was computed."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.9, seed=7, n=2)
    slow = generate(forward.load(model), [[5, 6]], params)
    fast = generate(kv_cache.load(model), [[5, 6]], params)
    assert [c.token_ids for c in fast] == [c.token_ids for c in slow]
    assert slow[0].token_ids != slow[1].token_ids


def test_each_token_is_computed_once() -> None:
    """The work shrank: a prompt once, then one token a step; the last token never."""
    model = load_model("random:tiny", device="cpu", dtype="float32")
    computed: list[int] = []
    model.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    generate(kv_cache.load(model), [[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert computed == [3, 1, 1, 1, 1]


def test_window_layers_keep_their_window_only() -> None:
    config = SHAPES["tiny-window"]
    cache = KVCache(config, 2, 500, **FLOAT32)
    assert [layer.capacity for layer in cache.layers] == [24, 24, 500]
    stored = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert (
        stored == KVCache.bytes_needed(config, 2, 500, torch.float32) == 2 * 2 * (24 + 24 + 500) * 2 * 16 * 4
    )


def test_ring_holds_the_newest_columns() -> None:
    layer = LayerCache(torch.full((1, 1, 4, 1), -1.0), torch.full((1, 1, 4, 1), -1.0))
    start = 0
    for count in (1, 2, 3, 1, 6, 1):
        columns = torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1)
        layer.write(start, columns, columns)
        start += count
        keys, _ = layer.read(start)
        assert keys.flatten().tolist() == layer.columns(start).tolist()
        assert sorted(layer.columns(start).tolist()) == list(range(max(0, start - 4), start))


def test_full_cache_is_a_clear_error_and_writes_nothing() -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    attention = CachedAttention(KVCache(model.config, 1, 4, **FLOAT32))
    attention.begin(3)
    attention.cache.advance(3)
    with pytest.raises(UserError, match=r"the KV cache is full: 3 \+ 2 tokens, but max_len is 4"):
        attention.begin(2)
    attention.begin(1)


def test_published_memory() -> None:
    """Qwen3-0.6B in bfloat16: 112 KiB a token."""
    config = SHAPES["qwen3-0.6b"]
    assert KVCache.bytes_needed(config, 1, 1, torch.bfloat16) == 112 * 1024
    assert config.kv_bytes_per_token(torch.bfloat16) == 112 * 1024


def test_uninitialized_cache_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` may hold NaN; a mask of minus infinity does not stop NaN, so it must not be read."""
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    model = load_model("random:tiny-window", device="cpu", dtype="float32")
    expected = generate(kv_cache.load(model), [[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True))
    monkeypatch.setattr(torch, "empty", poisoned)
    got = generate(kv_cache.load(model), [[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True))
    assert got[0].token_ids == expected[0].token_ids

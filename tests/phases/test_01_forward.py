"""Phase 01: our transformers against Hugging Face's, layer by layer of detail."""

from __future__ import annotations

import gc
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from common.errors import NotANumber, UserError
from common.models.config import RopeConfig
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward import Generator, load, load_model
from forward.attention import LayerSpec, attend, causal_mask
from forward.layers import LayerNorm, RMSNorm
from forward.loading import random_model
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.rope import Rope, apply_rope
from forward.shapes import SHAPES
from tests.oracles import assert_same_logits, logits_of, written

AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 72,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 12,  # not hidden / heads
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}  # GPT-2's own lie outside of a small vocabulary
ORACLES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased-untied": (transformers.LlamaConfig,
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (transformers.LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0,
        "factor": 4.0}}),
    "yarn-rope": (transformers.LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "yarn-rope-of-all-fields": (transformers.Qwen3Config,
        {"rope_parameters": {**YARN_ROPE, **{"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}}}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "mistral-no-window": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window-by-default": (transformers.MistralConfig, {"head_dim": None, "hidden_size": 108}),
    "qwen2": (transformers.Qwen2Config, {"hidden_size": 108, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-untied": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 7, "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 5.0, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3-yarn-rope": (transformers.Gemma3TextConfig,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": YARN_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}}),
    "gpt2": (transformers.GPT2Config, {"vocab_size": 97, "n_embd": 36, "n_layer": 3, "n_head": 3,
        "n_positions": 64, **ENDS}),
    "gpt2-layer-scale": (transformers.GPT2Config, {"vocab_size": 97, "n_embd": 36, "n_layer": 3, "n_head": 3,
        "n_positions": 64, **ENDS, "n_inner": 50, "scale_attn_by_inverse_layer_idx": True}),
}  # fmt: skip


def oracle(name: str, folder: Path) -> Any:
    """A small and awkward transformers model, also written to `folder`."""
    kind, options = ORACLES[name]
    shape = {} if kind is transformers.GPT2Config else AWKWARD
    return written(kind(**{**shape, **options}, attn_implementation="eager"), folder)


@pytest.mark.parametrize("window", [None, 2])
def test_mask_of_a_chunk_is_not_the_lower_triangle(window: int | None) -> None:
    """Two queries and five keys: each query sees the past, within its window, and itself."""
    mask = causal_mask(torch.tensor([3, 4]), torch.arange(5), window=window)
    for query, row in zip((3, 4), mask.tolist(), strict=True):
        sees = [key for key, shown in enumerate(row) if shown]
        expected = list(range(0 if window is None else query - window + 1, query + 1))
        assert sees == expected, (
            f"window {window}: query {query} sees keys {sees}, not {expected}"
        )


def test_attend_equals_sums_over_single_heads() -> None:
    """Grouped heads, scale and mask, against loops in float64."""
    spec = LayerSpec(0, num_heads=6, num_kv_heads=2, head_dim=5, scale=0.3)
    q = torch.randn(6, 4, 5)
    k = torch.randn(2, 7, 5)
    v = torch.randn(2, 7, 5)
    mask = causal_mask(torch.arange(3, 7), torch.arange(7), window=4)
    out = attend(spec, q, k, v, mask)
    for head in range(6):
        for row in range(4):
            scores = []
            for key in range(7):
                score = float(q[head, row].double() @ k[head // 3, key].double()) * 0.3
                scores.append(score)
            weights = [
                math.exp(s) if seen else 0.0 for s, seen in zip(scores, mask[row], strict=True)
            ]
            expected = sum(
                w * v[head // 3, key].double() for key, w in enumerate(weights)
            ) / sum(weights)
            off = float((out[head, row].double() - expected).abs().max())
            assert off < 1e-5, (
                f"query head {head}, which reads key/value head {head // 3}: off by {off:.1e}"
            )


def test_rope_pairs_halves_not_neighbours() -> None:
    """At position 1, pair i of a head of 8 is dimensions i and i + 4, and turns by 10,000^(-i/4)."""
    turned = apply_rope(torch.ones(1, 8), Rope(RopeConfig(), 8)(torch.tensor(1)))[0].tolist()
    for pair, angle in enumerate((1.0, 0.1, 0.01, 0.001)):
        cos = math.cos(angle)
        sin = math.sin(angle)
        got = [turned[pair], turned[pair + 4]]
        assert got == pytest.approx([cos - sin, cos + sin]), (
            f"(1, 1) in pair {pair} turns into {got}"
        )


def test_rope_depends_on_distance_only() -> None:
    rope = Rope(RopeConfig(), 16)
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> float:
        rotated_q = apply_rope(q, rope(torch.tensor(query_at)))
        return float((rotated_q * apply_rope(k, rope(torch.tensor(key_at)))).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_rope_tables_stay_float32_at_far_positions() -> None:
    """In bfloat16 positions 4096 and 4097 are the same number."""
    model = load_model("random:tiny", device="cpu", dtype="bfloat16")
    cos, _ = model.rope(torch.tensor([4096, 4097]))  # type: ignore[operator]
    assert cos.dtype == torch.float32, f"the tables of a bfloat16 model are {cos.dtype}"
    assert not torch.equal(cos[0], cos[1]), "positions 4096 and 4097 have one angle"


def test_a_rotation_rounds_once() -> None:
    """Half precision is for what goes in and comes out: the tables and the products stay float32."""
    positions = torch.tensor([1, 77, 4097, 100_000])
    cos_sin, x = Rope(RopeConfig(), 16)(positions), torch.randn(4, 3, 16).bfloat16()
    expected = apply_rope(x.float(), cos_sin).bfloat16()
    wrong = [
        int(at)
        for at, a, b in zip(positions, apply_rope(x, cos_sin), expected, strict=True)
        if (a != b).any()
    ]
    assert not wrong, (
        f"bfloat16 queries at positions {wrong} are rounded before they are rotated"
    )


def test_softmax_stays_float32() -> None:
    """Scores of 0 to 8, exact in bfloat16, against float64; the values show the weights unrounded."""
    spec = LayerSpec(0, num_heads=1, num_kv_heads=1, head_dim=9, scale=1.0)
    q, unit = torch.arange(9.0).bfloat16().view(1, 1, 9), torch.eye(9).unsqueeze(0)
    weights = attend(spec, q, unit.bfloat16(), unit, None)[0, 0].double()
    expected = torch.softmax(torch.arange(9.0).double(), 0)
    off = float(((weights - expected) / expected).abs().max())
    assert off < 1e-6, f"attention weights are off by {off:.1%}: softmax was in bfloat16"


NORMS = [RMSNorm(4, eps=1.0), LayerNorm(4, eps=1.0), Gemma3RMSNorm(4, eps=1.0)]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@torch.inference_mode()
def test_a_norm_is_computed_in_float32_with_eps_under_the_root(norm: torch.nn.Module) -> None:
    x = torch.tensor([0.1, -0.2, 0.3, 0.4]).double()
    centred = x - x.mean() if isinstance(norm, LayerNorm) else x
    expected = centred / (centred.square().mean() + 1.0).sqrt()
    off = float((norm(x.float()) - expected).abs().max())
    assert off < 1e-6, f"off by {off:.1e} where eps counts: it belongs under the root, once"
    large = torch.tensor(
        [400.0, -400.0, 400.0, -400.0]
    ).half()  # their squares are no half-precision numbers
    got = norm(large).tolist()
    assert got == [1.0, -1.0, 1.0, -1.0], (
        f"+-400 in float16 normalize to {got}: squared in half precision"
    )


def test_leading_shape_is_free() -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    ids = torch.randint(0, 257, (3, 9))
    together = logits_of(model, ids)
    for row in range(3):
        torch.testing.assert_close(
            logits_of(model, ids[row]), together[row], atol=1e-5, rtol=1e-5
        )


def test_causality() -> None:
    """Changing a token changes nothing before it and something at it."""
    model = load_model("random:tiny-window", device="cpu", dtype="float32")
    ids = torch.randint(0, 256, (60,))
    changed = ids.clone()
    changed[30] += 1
    before, after = logits_of(model, ids), logits_of(model, changed)
    torch.testing.assert_close(before[:30], after[:30], atol=1e-6, rtol=0)
    assert (before[30] - after[30]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = oracle(name, tmp_path)
    assert_same_logits(load_model(tmp_path, device="cpu", dtype="float32"), reference, name)


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaling": ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "yarn-as-a-card-says": ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "yarn",
        "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama3-scaling": ("llama", {"rope_parameters": None, "rope_scaling": LLAMA3_ROPE}),
    "empty-scaling": ("llama3-rope", {"rope_scaling": {}}),
    "gemma-scaling": ("gemma3", {"rope_parameters": None,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "older-names": ("llama", {"rope_parameters": None, "rope_theta": 500.0,
        "rope_scaling": {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}}),
    "original-length-outside": ("llama", {"original_max_position_embeddings": 32,
        "rope_parameters": {key: value for key,
        value in YARN_ROPE.items() if not key.startswith("original")}}),
    "gpt2-in-general-names": ("gpt2", {"n_embd": None, "hidden_size": 36, "n_layer": None,
        "num_hidden_layers": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_every_spelling_means_what_it_means_in_transformers(case: str, tmp_path: Path) -> None:
    name, change = SPELLINGS[case]
    oracle(name, tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(
        json.dumps({key: value for key, value in raw.items() if value is not None})
    )
    kind = transformers.AutoModelForCausalLM
    reference = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same_logits(load_model(tmp_path, device="cpu", dtype="float32"), reference, case)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_half_precision_stays_close(name: str, tmp_path: Path) -> None:
    oracle(name, tmp_path)
    ids = torch.randint(0, 97, (1, 40))
    exact, half = (
        logits_of(load_model(tmp_path, device="cpu", dtype=dtype), ids)
        for dtype in ("float32", "bfloat16")
    )
    assert half.dtype == torch.float32
    assert (half - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("stored", ["embedding", "head", "both", "another head"])
def test_what_is_stored_decides_whether_the_head_is_tied(stored: str, tmp_path: Path) -> None:
    """In text checkpoints and in multimodal ones, whatever the flags of both levels say."""
    reference = oracle("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    head = torch.randn_like(embedding) if stored == "another head" else embedding.clone()
    reference.lm_head.weight = nn.Parameter(head)
    if stored != "head":
        tensors["model.embed_tokens.weight"] = embedding
    if stored != "embedding":
        tensors["lm_head.weight"] = head
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["tie_word_embeddings"]
    flags: list[dict[str, Any]] = [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {},
    ]
    configs = [({**raw, **inner}, "") for inner in flags]
    for inner, outer in itertools.product(flags, flags):
        text = {"model_type": "gemma3", "text_config": {**raw, **inner}, **outer}
        configs.append((text, "language_model."))
    for config, prefix in configs:
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(
            {prefix + name: one for name, one in tensors.items()},
            tmp_path / "model.safetensors",
        )
        model = load_model(tmp_path, device="cpu", dtype="float32")
        shared = model.lm_head.weight is model.get_parameter("embed_tokens.weight")
        assert shared == (stored != "another head"), config
        assert_same_logits(model, reference, str(config), length=20)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_itself(tied: bool) -> None:
    config = replace(SHAPES["tiny"], tie_word_embeddings=tied)
    model = random_model(config, device="cpu", dtype=torch.float32)
    same = model.lm_head.weight is model.get_parameter("embed_tokens.weight")
    assert same == tied, (
        f"tie_word_embeddings is {tied}, but head and embedding are one: {same}"
    )


def test_generator_recomputes_everything() -> None:
    """What phase 02 will save: n tokens cost the sum of all lengths."""
    model = load_model("random:tiny", device="cpu", dtype="float32")
    computed = []
    model.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    events = list(
        Generator(model).stream([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    )
    assert computed == [3, 4, 5, 6], (
        f"a prompt of 3 and 4 tokens: the steps are to grow, but had {computed}"
    )
    assert len(events) == 4


def test_each_token_is_the_most_likely_one_after_all_before_it() -> None:
    model = load_model("random:tiny-window", device="cpu", dtype="float32")
    tokens = [5, 6, 7]
    for event in Generator(model).stream(
        [[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True)
    ):
        expected = int(logits_of(model, torch.tensor(tokens))[-1].argmax())
        assert event.token_id == expected, (
            f"token {len(tokens) - 3} is {event.token_id}, but after {tokens} the most likely is {expected}"
        )
        tokens.append(expected)


def test_logits_that_are_no_numbers_are_no_token() -> None:
    engine = load("random:tiny", device="cpu")
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(NotANumber, match="request 1: the model's logits are not a number"):
        list(engine.stream([[1], [2]], [SamplingParams(max_tokens=n) for n in (0, 3)]))


def test_a_stop_string_ends_the_text(tmp_path: Path) -> None:
    """A string of three letters, one a token: the third ends the text, and what is shown is before it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={each: at for at, each in enumerate(letters)}, merges=[])
    )
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    generator, letter = (
        load("random:tiny", device="cpu", tokenizer=Tokenizer(tmp_path)),
        letters.index("a"),
    )
    params = SamplingParams(max_tokens=9, stop=("aaa",), logit_bias={letter: 100.0})
    events = list(generator.stream([[5]], params))
    found = [event.token_id for event in events]
    assert found == [letter] * 3, f"aaa ends the text after three tokens {letter}, not {found}"
    assert [event.finish_reason for event in events] == [None, None, "stop"]
    shown = "".join(event.text or "" for event in events)
    assert shown == "", f"a stop string is left out of the text, which is {shown!r}"


def test_the_end_is_held_back_until_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, logit_bias={0: 100.0})
    events = list(load("random:tiny", device="cpu").stream([[5]], params))
    tokens = [event.token_id for event in events]
    assert 0 not in tokens[:3], (
        f"min_tokens is 3, but the end-of-sequence token 0 is in {tokens[:3]}"
    )
    assert (tokens[3:], events[-1].finish_reason) == ([0], "stop"), (
        f"token 3 ends the text, not {tokens}"
    )


def test_each_sample_has_randomness_of_its_own() -> None:
    """Sample i of a request with seed s is what a request with seed s + i says."""
    generator = load("random:tiny", device="cpu")

    def said(sample: int, **settings: int) -> list[int | None]:
        params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, **settings)
        return [
            event.token_id
            for event in generator.stream([[5]], params)
            if event.sample == sample
        ]

    for sample in range(3):
        together, alone = said(sample, n=3, seed=7), said(0, seed=7 + sample)
        assert together == alone, (
            f"sample {sample} of seed 7 says {together}, but seed {7 + sample} {alone}"
        )


def test_prompt_that_leaves_room_for_one_token() -> None:
    generator = load("random:tiny", device="cpu")
    events = list(
        generator.stream([[1] * 1023], SamplingParams(max_tokens=4, ignore_eos=True))
    )
    assert [event.finish_reason for event in events] == ["length"]


def test_max_tokens_zero_is_an_empty_completion() -> None:
    events = list(
        load("random:tiny", device="cpu").stream([[1]], SamplingParams(max_tokens=0))
    )
    found = [(event.token_id, event.finish_reason) for event in events]
    assert found == [(None, "length")], "max_tokens is 0: one event says so, without a token"


def test_consumer_is_not_left_in_inference_mode() -> None:
    for _ in load("random:tiny", device="cpu").stream([[1]], SamplingParams(max_tokens=2)):
        assert not torch.is_inference_mode_enabled()


def test_a_gpu_of_several_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: with another one, no kernel could read the weights."""
    chosen = []

    def choose(device: torch.device) -> None:
        chosen.append(device)
        raise InterruptedError  # there is no such GPU here

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(InterruptedError):
        load_model("random:tiny", device="cuda:1", dtype="float32")
    assert chosen == [torch.device("cuda:1")]


def test_a_failed_load_leaves_no_model_behind(tmp_path: Path) -> None:
    oracle("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored.popitem()
    save_file(stored, tmp_path / "model.safetensors")
    gc.collect()
    before = sum(issubclass(type(thing), Model) for thing in gc.get_objects())
    with pytest.raises(UserError, match="1 missing"):
        load_model(tmp_path, device="cpu", dtype="float32")
    gc.collect()
    assert sum(issubclass(type(thing), Model) for thing in gc.get_objects()) == before

"""Decode steps in one call of C++: the tokens of PyTorch's operators, or the plain path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

import forward
from common.events import generate
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import PagedEngine
from phases import phase_named
from phases.appendix.cpu_step import feature
from phases.appendix.cpu_step.feature import MOST, OneCall
from phases.registry import load_engine
from quant.formats import INT4
from quant.linear import QuantLinear
from tests.equivalence.compare import assert_all_same, margin

TINY = replace(SHAPES["tiny"], vocab_size=256)
CONFIGS = {
    "llama": TINY,
    "qwen2": replace(TINY, family="qwen2", tie_word_embeddings=True),
    "qwen3": replace(TINY, family="qwen3"),
    "gemma3": replace(SHAPES["tiny-window"], vocab_size=256, final_soft_cap=None),
}
BLOCKS = replace(
    TINY,
    hidden_size=192,
    intermediate_size=320,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    attention_scale=0.125,
)
"""Outputs are blocks of 64; groups of 64 weights divide rows into 3 and 5, groups of 32 into 6 and 10."""
NEAR = 0.05
"""Two logits of a small model in bfloat16 that are nearer than that are as good as equal."""
PROMPTS = [[3 + 7 * i + j % 200 for j in range(4 + 9 * i)] for i in range(6)]
SIZES: dict[str, Any] = {"max_rows": 5, "max_len": 128, "block_size": 4, "step_tokens": 128}


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip where the step cannot be compiled."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or feature.library() is None:
        pytest.skip("needs a C++ compiler and AVX-512")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of requests of each step that the plan has run."""
    found: list[int] = []
    run = OneCall.run

    def counted(self: OneCall, works: Any, ticket: bool) -> Any:
        found.append(len(works))
        return run(self, works, ticket)

    monkeypatch.setattr(OneCall, "run", counted)
    yield found


def tiny(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Model:
    return random_model(config, device=torch.device("cpu"), dtype=dtype, seed=1)


def engine_of(model: Model, phase: str = "09", **options: Any) -> PagedEngine:
    made = load_engine(phase_named(phase), model, **{**SIZES, **options})
    assert isinstance(made, PagedEngine)
    return made


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_the_plain_path(
    name: str, threads: int, taken: list[int]
) -> None:
    model, params = tiny(CONFIGS[name]), SamplingParams(max_tokens=40, ignore_eos=True)
    plain = generate(engine_of(model, cpu_step=False), PROMPTS, [params] * len(PROMPTS))
    assert not taken
    torch.set_num_threads(threads)
    try:
        found = generate(engine_of(model), PROMPTS, [params] * len(PROMPTS))
    finally:
        torch.set_num_threads(1)
    assert {1, 5} <= set(taken), "some steps have one request, and some have every row"
    assert_all_same(model, plain, found)


@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("batch", [1, 3, MOST])
def test_greedy_tokens_with_four_bits(batch: int, group: int, taken: list[int]) -> None:
    about = {"quantization": "int4", "group_size": group, "head": "int4", "max_rows": batch}
    model, params = (
        tiny(BLOCKS, torch.bfloat16),
        [SamplingParams(max_tokens=24, ignore_eos=True)] * batch,
    )
    prompts = [[3 + i, 50 + i, 200 - i] for i in range(batch)]
    engine = engine_of(model, "10", **about)
    found = generate(engine, prompts, params)
    assert taken.count(batch) == 23, "every step but that of the prompts"
    plain = generate(engine_of(model, "10", cpu_step=False, **about), prompts, params)
    for one, other in zip(plain, found, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        gap = margin(engine.runner.model, one.prompt_ids + one.token_ids[:same])
        assert same == len(one.token_ids) or gap < NEAR


def test_zero_points_of_four_bits() -> None:
    scheme = replace(INT4, group=64, zeros=True)
    model = tiny(BLOCKS, torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, QuantLinear.of(layer, scheme, name))
    assert_near(engine_of(model, "10"))


def test_preempted_forked_and_sampled_requests(taken: list[int]) -> None:
    model = tiny(TINY)
    params = [
        SamplingParams(
            max_tokens=30, temperature=0.9, top_p=0.9, seed=i, ignore_eos=True, n=1 + i % 2
        )
        for i in range(len(PROMPTS))
    ]
    params[0] = replace(params[0], repetition_penalty=1.3, logprobs=2)
    engine = engine_of(model, cache_bytes=40 * 4 * TINY.kv_bytes_per_token(torch.float32))
    found = generate(engine, PROMPTS, params)
    assert taken and engine.scheduler.preemptions
    plain = generate(engine_of(model, cpu_step=False), PROMPTS, params)
    assert_all_same(model, plain, found, params)


def assert_near(engine: PagedEngine) -> None:
    """Compare logits and hidden states of a step with those of PyTorch's operators."""
    for prompt in PROMPTS[:5]:
        engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    runner = engine.runner
    while runner.last is None or runner.last.logits is None:
        engine.step()
    last = runner.last
    assert last.logits is not None
    with torch.inference_mode():
        hidden = runner.eager(last.works).hidden
        pairs = (last.hidden, hidden), (last.logits, runner.model.logits(hidden))
    for found, plain in pairs:
        assert (found.float() - plain.float()).abs().max() < 0.1 * plain.float().std()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_bfloat16_are_those_of_torch_rounded(
    name: str, quantization: str | None
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64}
    config = (
        CONFIGS[name]
        if quantization != "int4"
        else replace(CONFIGS[name], num_heads=4, num_kv_heads=2, **sizes)
    )
    options: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
    assert_near(engine_of(tiny(config, torch.bfloat16), "10", **options))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (replace(TINY, vocab_size=257), {}),
        (replace(TINY, activation="relu"), {}),
        (replace(TINY, final_soft_cap=30.0), {}),
        (replace(SHAPES["gpt2"], num_layers=1, vocab_size=256, sliding_windows=()), {}),
        (TINY, {"quantization": "w8a8"}),
        (TINY, {"quantization": "int4"}),
        (replace(BLOCKS, hidden_size=160), {"quantization": "int4"}),
        (TINY, {"kv_cache": "int8"}),
    ],
)
def test_what_it_does_not_compute_takes_the_plain_path(
    config: ModelConfig, options: dict[str, Any]
) -> None:
    engine = engine_of(tiny(config), "10", **options)
    assert not any(isinstance(plan, OneCall) for plan in engine.runner.executors)
    assert generate(engine, PROMPTS[:1], [SamplingParams(max_tokens=2, ignore_eos=True)])[
        0
    ].token_ids


def test_steps_with_many_requests_are_left_to_torch(taken: list[int]) -> None:
    engine = engine_of(tiny(TINY), max_rows=MOST + 4)
    every = range(MOST + 4)
    generate(
        engine, [[5, 6 + i] for i in every], [SamplingParams(max_tokens=3 + i) for i in every]
    )
    assert taken and max(taken) <= MOST


def test_without_a_compiler_a_line_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("LADDER_HOME", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CXX", compiler)
        assert feature.library.__wrapped__() is None
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"]
)
def test_real_weights(
    smollm2_folder: Path, gemma3_folder: Path, dtype: str, taken: list[int]
) -> None:
    prompts = [list(range(1000, 1040)), list(range(300, 320))]
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    for folder in (smollm2_folder, gemma3_folder):
        model = forward.load_model(folder, device="cpu", dtype=dtype)
        found = generate(engine_of(model), prompts, params)
        plain = generate(engine_of(model, cpu_step=False), prompts, params)
        assert taken
        if dtype == "float32":
            assert_all_same(model, plain, found)
        for one, other in zip(plain, found, strict=True):
            same = sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=True))
            assert same >= 4, (
                "a near tie in bfloat16 may end in another token, but not at once"
            )

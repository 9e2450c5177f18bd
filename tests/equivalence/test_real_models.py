"""Real weights: what phases 01 to 03 generate is what `transformers` would, token by token.

Greedy decoding is checked by induction rather than by generating twice. If, after every prefix of what we
generated, the oracle's best token is the one we chose, then the oracle, started on the same prompt, generates
the same text. One pass of the oracle over prompt and output gives its choice after every prefix at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import batching
import forward
from common.events import generate
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward import Model
from forward.attention import RecomputeAttention
from tests.prompts import CHAT, PLAIN

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1200)]
TIE = 1e-3
"""Tokens whose logits lie this close are a tie: rounding may decide it either way."""
GREEDY = SamplingParams(max_tokens=32)


@dataclass
class Case:
    """A real model, the oracle over the same files, and what phase 03 says to every prompt, in one batch."""

    model: Model
    oracle: Any
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    transformers = pytest.importorskip("transformers")
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PLAIN[::2]]
    if request.param == "smollm2":  # the other one was only pretrained
        prompts += [tokenizer.chat([{"role": "user", "content": text}]) for text in CHAT]
    else:
        prompts += [tokenizer.encode(text) for text in CHAT]
    model = forward.load_model(folder, device="cpu", dtype="float32")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    together = generate(batching.load(model, batch_size=len(prompts)), prompts, GREEDY)
    yield Case(model, oracle, prompts, [done.token_ids for done in together])


def choices_differ(logits: Tensor, prompt: list[int], output: list[int]) -> list[str]:
    """Where the output is not the argmax of ``logits [S, V]`` and no tie either; ``S`` = prompt + output."""
    rows = logits[len(prompt) - 1 : len(prompt) + len(output) - 1]  # the row before each output token
    chosen = rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    gaps = rows.max(dim=1).values - chosen  # [n], 0 where the choice is the same
    return [f"token {i}: {float(gap):.4f} below the best" for i, gap in enumerate(gaps) if gap > TIE]


@torch.inference_mode()
def test_phase_03_generates_what_transformers_does(case: Case) -> None:
    assert len(case.prompts) >= 12
    for prompt, output in zip(case.prompts, case.outputs, strict=True):
        logits = case.oracle(torch.tensor([prompt + output])).logits[0]
        assert not choices_differ(logits, prompt, output)


@torch.inference_mode()
def test_logits_are_close_to_transformers(case: Case) -> None:
    """Within 1e-4 of the largest logit."""
    ids = torch.tensor(case.prompts[-1])
    hidden = case.model(ids, torch.arange(len(ids)), RecomputeAttention())
    expected = case.oracle(ids.unsqueeze(0)).logits[0]
    assert (case.model.logits(hidden) - expected).abs().max() < 1e-4 * expected.abs().max()

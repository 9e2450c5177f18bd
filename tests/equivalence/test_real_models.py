"""Real weights: what engines generate is what `transformers` would, token by token.

Greedy decoding is checked by induction rather than by generating twice. If, after every prefix of what we
generated, the oracle's best token is the one we chose, then the oracle, started on the same prompt, generates
the same text. One pass of the oracle over prompt and output gives its choice after every prefix at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import batching
import chunked_prefill
import continuous
import cuda_graphs
import forward
import paged_cache
import prefix_cache
from common.events import Streams, generate
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward import Model
from forward.attention import RecomputeAttention
from tests.equivalence.compare import TIE

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
MEMORY = 96 << 20
ENGINES: dict[str, Callable[[Model], Streams]] = {
    "03": lambda model: batching.load(model, batch_size=10),
    "04": lambda model: continuous.load(model, max_rows=4, max_len=512),
    "05": lambda model: paged_cache.load(model, cache_bytes=MEMORY),
    "07": lambda model: chunked_prefill.load(model, cache_bytes=MEMORY, step_tokens=50),
    "08": lambda model: prefix_cache.load(model, cache_bytes=MEMORY, step_tokens=100),
    "09": lambda model: cuda_graphs.load(model, cache_bytes=MEMORY, step_tokens=100),
}
QUICK = ("03", "09")
END = (
    "In the beginning there was nothing, and then, slowly, there was a list of words: "
    + "alpha beta gamma " * 40
)
PLAIN = (
    "The capital of France is",
    "Q: What is 7 times 8?\nA:",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "Le chat est assis sur",
    "今日はとても",
    "   leading spaces and\ttabs\n\n",
    END,
    END + "delta",
)
"""Short, long, code, other languages, odd spacing, and two that begin alike."""
CHAT = ("What is the capital of Italy?", "Write one sentence about the sea.")


@dataclass
class Case:
    """A real model, and the oracle over the same files."""

    model: Model
    oracle: Any
    prompts: list[list[int]]


@pytest.fixture(
    scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.long)]
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    transformers = pytest.importorskip("transformers")
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PLAIN]
    for text in CHAT:  # one of the models was only pretrained
        chat = request.param == "smollm2"
        prompts.append(
            tokenizer.chat([{"role": "user", "content": text}])
            if chat
            else tokenizer.encode(text)
        )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    yield Case(forward.load_model(folder, device="cpu", dtype="float32"), oracle, prompts)


@pytest.mark.parametrize(
    "engine",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in ENGINES
    ],
)
@torch.inference_mode()
def test_an_engine_generates_what_transformers_does(case: Case, engine: str) -> None:
    made: Any = ENGINES[engine](case.model)
    for _ in range(2 if engine == "08" else 1):
        for done in generate(made, case.prompts, SamplingParams(max_tokens=12)):
            output = done.token_ids
            logits = case.oracle(torch.tensor([done.prompt_ids + output])).logits[0]
            rows = logits[len(done.prompt_ids) - 1 : -1]  # the row before each output token
            chosen = rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
            gap = float((rows.amax(dim=1) - chosen).max())
            assert gap <= TIE, f"prompt {done.index}: a token is {gap:.4f} below the best"
    assert engine != "08" or made.scheduler.cache.stats.hit_rate > 0.4


@torch.inference_mode()
def test_logits_are_close_to_transformers(case: Case) -> None:
    """Within 1e-4 of the largest logit."""
    ids = torch.tensor(case.prompts[-1])
    hidden = case.model(ids, torch.arange(len(ids)), RecomputeAttention())
    expected = case.oracle(ids.unsqueeze(0)).logits[0]
    assert (case.model.logits(hidden) - expected).abs().max() < 1e-4 * expected.abs().max()

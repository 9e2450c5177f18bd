"""A real engine with drafts, grammars, preemption and aborts at random: each output equals its solitary run.

    LADDER_SOAK=600 pytest tests/fuzz/test_soak.py -m slow

goes on for that many seconds. A failure names the engine, the number of the request and the token.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest

import forward
from benchmarks.engines import engine_of
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from forward.model import Model
from tests.equivalence.compare import TIE, next_logits
from tests.structured_kit import tokenizer

pytest.importorskip("llguidance")

SECONDS = float(os.environ.get("LADDER_SOAK", "12"))
MAX_LEN = 160
GRAMMARS = (
    Grammar.regex("(ab|xyz){4,12}"),
    Grammar.regex("[a-f]{0,20}(yes|no)"),
    Grammar.json_schema(
        {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 2, "maxItems": 6}
    ),
    Grammar.json_schema(
        {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    ),
    Grammar.lark('start: "x" start | "y"'),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram radix overlap": {"drafter": "ngram", "index": "radix"},
    "ngram hash in turn": {"drafter": "ngram", "index": "hash", "overlap": False},
    "none radix overlap": {"drafter": "none", "index": "radix"},
}


@dataclass
class Asked:
    """A request, and the step of the engine at which its client leaves; 0: never."""

    prompt: list[int]
    params: SamplingParams
    leaves: int
    request: Request | None = None


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny-window", device="cpu", dtype="float32")


def built(model: Model, tokens: int, **options: Any) -> Engine:
    """An engine of phase 12 whose cache holds so many tokens."""
    config = model.config
    token_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
    sizes = {"max_rows": 6, "max_len": MAX_LEN, "step_tokens": 64, "block_size": 4}
    sizes |= {"cache_bytes": tokens * token_bytes}
    return engine_of(
        "12, with the appendix",
        model,
        device="cpu",
        dtype="float32",
        tokenizer=tokenizer(),
        **sizes,
        **options,
    )


def asked(rng: random.Random) -> Asked:
    """A prompt that repeats itself, half of the time behind a prefix that others have, too."""
    shared = [[7, 8, 9] * 6, [11, 12] * 10, []][rng.randrange(3)]
    part = [rng.randrange(3, 40) for _ in range(rng.randrange(1, 6))]
    grammar = rng.choice(GRAMMARS) if rng.random() < 0.4 else None
    sampled = rng.random() < 0.2
    params = SamplingParams(
        max_tokens=rng.randrange(1, 50),
        temperature=0.8 if sampled else 0.0,
        seed=rng.getrandbits(31),
        grammar=grammar,
        ignore_eos=grammar is None and rng.random() < 0.5,
    )
    leaves = rng.randrange(1, 40) if rng.random() < 0.2 else 0
    return Asked((shared + part * rng.randrange(1, 5))[: MAX_LEN - 60], params, leaves)


def play(engine: Engine, rng: random.Random, count: int) -> list[Asked]:
    """Send so many requests, some at a time, and step until all have ended."""
    line = [asked(rng) for _ in range(count)]
    played = []
    steps = 0
    left: dict[int, list[Asked]] = {}
    while line or not engine.idle:
        for _ in range(min(len(line), rng.randrange(4) if steps % 3 == 0 else 0)):
            one = line.pop()
            (one.request,) = engine.add(one.prompt, one.params)
            played.append(one)
            if one.leaves:
                left.setdefault(steps + one.leaves, []).append(one)
        engine.step()
        steps += 1
        for one in left.pop(steps, []):
            assert one.request is not None
            engine.abort(one.request)
    engine.check_integrity()
    return played


def assert_alone(model: Model, oracle: Engine, one: Asked, where: str) -> None:
    """Raise `AssertionError` unless a request has the tokens of its solitary run, or a tie decides."""
    assert one.request is not None
    found = list(one.request.output_ids)
    (expected,) = oracle.generate([one.prompt], one.params)
    if one.request.finish_reason == "abort":
        expected.token_ids = expected.token_ids[: len(found)]
    else:
        assert (
            one.request.finish_reason == expected.finish_reason or found != expected.token_ids
        ), where
    pairs = zip(found, expected.token_ids, strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        assert len(found) == len(expected.token_ids), f"{where}: {len(found)} tokens"
        return
    logits = next_logits(model, one.prompt + found[:at])
    gap = float(abs(logits[found[at]] - logits[expected.token_ids[at]]))
    assert gap < TIE, (
        f"{where}: token {at} is {found[at]}, alone {expected.token_ids[at]}; {gap:.1e} apart"
    )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 200)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_output_is_that_of_its_solitary_run(model: Model, name: str) -> None:
    oracle = built(model, 4 * MAX_LEN, drafter="none", overlap=False)
    engine = built(model, MAX_LEN + 20, **OPTIONS[name])
    end = time.monotonic() + SECONDS / len(OPTIONS)
    compared = 0
    turn = 0
    while turn < 1 or time.monotonic() < end:
        for number, one in enumerate(play(engine, random.Random(turn), 25)):
            assert_alone(model, oracle, one, f"{name}, turn {turn}, request {number}")
            compared += 1
        turn += 1
    assert engine.scheduler.preemptions > 0, f"nothing was preempted in {compared} requests"

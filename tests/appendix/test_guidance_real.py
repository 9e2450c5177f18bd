"""Real tokenizers and models: their bytes, equal masks, and answers that parse and are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.models.config import ModelConfig
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from paged_cache import PagedEngine
from phases.appendix.guidance.spelling import Spelling
from tests.guidance_kit import served
from tests.structured_kit import equal_priority as equal_priority
from tests.structured_kit import must_validate

pytestmark = [pytest.mark.weights, pytest.mark.timeout(280)]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
# Small models, one of them without instructions, learn from examples what is asked for.
SHOTS = [("Ada", 36, "London"), ("Chen", 19, "Chengdu"), ("Dara", 64, "Dublin")]
TEXT = "Text: {} is {} years old and lives in {}.\nJSON:"


def question(person: tuple[str, int, str]) -> str:
    shots = [
        TEXT.format(*shot) + " " + json.dumps(dict(zip(PERSON["required"], shot, strict=True)))
        for shot in SHOTS
    ]
    return "\n".join([*shots, TEXT.format(*person)])


PEOPLE = [("Boris", 51, "Sofia"), ("Fatima", 27, "Paris")]


@pytest.fixture(
    scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.long)]
)
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(f"{request.param}_folder")
    return found


def vocabulary_of(folder: Path) -> tuple[Tokenizer, Spelling]:
    tokenizer = Tokenizer(folder)
    ends = ModelConfig.from_folder(folder).eos_token_ids
    return tokenizer, Spelling.of(tokenizer, tokenizer.vocab_size, ends)


def engine_of(folder: Path, **options: Any) -> PagedEngine:
    tokenizer = Tokenizer(folder)
    return served(
        folder,
        "12",
        tokenizer=tokenizer,
        device="cpu",
        dtype="float32",
        max_len=256,
        cache_bytes=64 << 20,
        grammar_seconds=120.0,  # the hand-written one takes ten on a busy machine
        **options,
    )


def test_bytes_of_tokens_spell_texts(folder: Path) -> None:
    tokenizer, vocabulary = vocabulary_of(folder)
    for text in (
        '{"a": [1, "é 🎉"]}',
        "  two  spaces\n",
        "中文 and more",
        "def f(x):\n\treturn x",
    ):
        ids = list(vocabulary.encode(text))
        assert b"".join(vocabulary.tokens[token] for token in ids).decode() == text, text
    for token in (*tokenizer.special_ids, *ModelConfig.from_folder(folder).eos_token_ids):
        assert vocabulary.tokens[token] == b"", f"special token {token} has bytes"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llguidance", "automata"])
def test_people_are_extracted(folder: Path, backend: str) -> None:
    if backend == "llguidance":
        pytest.importorskip("llguidance")
    engine = engine_of(folder, guidance=backend == "llguidance")
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(question(person)) for person in PEOPLE]
    params = SamplingParams(max_tokens=80, grammar=Grammar.json_schema(PERSON))
    for completion, person in zip(engine.generate(prompts, params), PEOPLE, strict=True):
        text = tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "stop", f"{person}: cut after {text!r}"
        must_validate(text, PERSON, str(person))
        assert tuple(json.loads(text).values()) == person, f"{person}: {text}"

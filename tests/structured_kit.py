"""A tokenizer for the tiny random models, and small things that the tests of phase 12 share."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import cuda_graphs
from common.errors import UserError
from common.events import Completion
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.detokenizer import _BYTE_OF
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from continuous.seams import Drafter
from cuda_graphs import OverlappedLoop
from forward.model import Model
from paged_cache import BlockPool, PagedEngine
from structured.masks import AutomataGrammarManager
from structured.matcher import Matcher, Words
from structured.vocabulary import Vocabulary
from tests.schedules import check

Make = Callable[..., PagedEngine]
SIZE = 257
"""Of the tiny model's vocabulary."""
EOS = 0
WORDS = [
    '{"',
    '":',
    '",',
    '": "',
    '", "',
    "true",
    "false",
    "null",
    "name",
    "age",
    "12",
    "00",
    "ab",
    "abc",
]
WORDS += ["[[", "]]", "}}", '"}', "},", "[{", "}]"]
WORDS += ["é", "éé", "  ", "the", "in", "an", "er", "ing", "-1", "1."]


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE: ASCII, the bytes of two-byte characters, and some words; token 0 ends a text."""
    byte_of = {value: key for key, value in _BYTE_OF.items()}
    single = [*range(32, 127), 10, 9, *range(0x80, 0xC0), 0xC3, 0xC2, 0xE2, 0xF0]
    vocabulary: dict[str, int] = {"<|end|>": EOS}
    for byte in single:
        vocabulary[byte_of[byte]] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        spelled = "".join(byte_of[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocabulary and len(vocabulary) < SIZE:
                vocabulary[spelled[:end]] = len(vocabulary)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    folder = Path(mkdtemp(prefix="tokenizer-kit-"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": SIZE, "eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    return Tokenizer(folder)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(tokenizer(), SIZE, (EOS,))


def bits(words: Words, size: int) -> list[int]:
    """The tokens that a mask allows."""
    found: list[int] = (
        np.unpackbits(words.view(np.uint8), bitorder="little")[:size].nonzero()[0].tolist()
    )
    return found


def mask(matcher: Matcher, size: int = SIZE) -> list[int]:
    """The tokens that may come next."""
    words = np.zeros(-(-size // 32), np.int32)
    matcher.fill(words)
    return bits(words, size)


def must_validate(text: str, schema: Any, name: str) -> None:
    """Fail unless a text is JSON that a schema allows."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise AssertionError(f"{name}: {text!r} is no JSON: {error}") from None
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    assert not errors, f"{name}: {text!r} breaks its schema: {errors[0].message}"


SCHEMAS: dict[str, Any] = {
    "person": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": False},
    "enum": {"enum": ["red", "green", 7, None, True]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"enum": [1, 2]},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
    "either": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"},
        "c": {"const": "x"}}, "additionalProperties": False},
    "number": {"type": "number"},
}  # fmt: skip

# Engines.

SMALL: dict[str, Any] = {"max_rows": 8, "max_len": 96, "step_tokens": 96, "block_size": 4}


GRAMMARS = {name: Grammar.json_schema(schema) for name, schema in SCHEMAS.items()}


def text_of(completion: Completion) -> str:
    return tokenizer().decode([token for token in completion.token_ids if token != EOS])


def must_obey(completion: Completion, name: str, schemas: Mapping[str, Any] = SCHEMAS) -> None:
    """A finished output validates; one that was cut says so."""
    said = f"{name}, prompt {completion.index}, sample {completion.sample}: {text_of(completion)!r}"
    assert completion.finish_reason in ("stop", "length"), (
        f"{said} ended with {completion.finish_reason}"
    )
    if completion.finish_reason == "stop":
        assert completion.token_ids[-1] == EOS, (
            f"{said} stopped without an end-of-sequence token"
        )
        must_validate(text_of(completion), schemas[name], said)
    else:
        assert EOS not in completion.token_ids, f"{said} goes on after its end"


PROMPT = [5, 6, 7, 8]


def blocks(model: Model, count: int) -> int:
    return count * BlockPool.bytes_per_block(model.config, 4, model.dtype)


@pytest.fixture(autouse=True)
def equal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compilations run beside whatever else runs on the machine: with their own priority, they hardly
    get a turn on a busy one.
    """
    monkeypatch.setattr("structured.pool.NICENESS", 0)


class Slow:
    """Holds a backend's compilations of what is called slow back until `go` is set; slower ones compute."""

    def __init__(self, engine: PagedEngine) -> None:
        self.go = threading.Event()
        masks = engine.grammar_manager
        assert isinstance(masks, AutomataGrammarManager)
        backend = masks.pool.backend
        compile = backend.compile

        def slowly(grammar: Grammar) -> Any:
            while "slower" in grammar.source and not self.go.is_set():
                pass
            if "slow" in grammar.source:
                assert self.go.wait(60), "somebody waits for what is held back"
            return compile(grammar)

        backend.compile = slowly  # type: ignore[method-assign]


def run(engine: PagedEngine, seconds: float = 100.0) -> list[Any]:
    """Step to the end."""
    outputs, deadline = [], time.monotonic() + seconds
    while not engine.idle:
        outputs += engine.step()
        assert time.monotonic() < deadline, "a request waits for ever"
    return outputs


def computed_after_their_end(engine: PagedEngine) -> list[int]:
    """Numbers of requests that have ended when a step that computes them begins."""
    late: list[int] = []
    forward = engine.runner.forward

    def watched(works: Sequence[Any], **options: Any) -> Any:
        late.extend(
            work.request.id for work in works if work.request.finish_reason is not None
        )
        return forward(works, **options)

    engine.runner.forward = watched  # type: ignore[method-assign]
    return late


class Guess(Drafter):
    """Drafts a fixed continuation, of which a grammar may refuse the rest."""

    def __init__(self, text: str) -> None:
        self.ids = tokenizer().encode(text)
        self.asked = 0

    def begin(self, running: Sequence[Request]) -> bool:
        return True

    def propose(self, request: Request, most: int) -> Sequence[int]:
        self.asked += 1
        return self.ids[:most]


def crowd(engine: PagedEngine, count: int, schemas: Mapping[str, Any] = SCHEMAS) -> None:
    """Serve so many requests with schemas, among more than the cache has room for: every output parses."""
    rng = random.Random(7)
    at_once = engine.scheduler.rows.count
    names = list(schemas)
    chosen = [rng.choice(names) for _ in range(count)]
    prompts = list[list[int]]()
    params = []
    for number, name in enumerate(chosen):
        prompts.append([rng.randrange(1, 257) for _ in range(rng.randrange(1, 40))])
        most, grammar = rng.randrange(20, 80), Grammar.json_schema(schemas[name])
        params.append(
            SamplingParams(max_tokens=most, temperature=1.0, seed=number, grammar=grammar)
        )
    done = engine.generate(prompts, params)
    for completion, name in zip(done, chosen, strict=True):
        tokens = len(prompts[completion.index]) + len(completion.token_ids)
        if completion.finish_reason != "length" or tokens < 96:
            must_obey(completion, name, schemas=schemas)
    assert sum(completion.finish_reason == "stop" for completion in done) > count / 2
    assert engine.scheduler.preemptions > 0 and engine.stats.most_running > at_once // 2
    check(engine)


CROWD: dict[str, Any] = {"max_rows": 12, "step_tokens": 192, "chunk_tokens": 16}
"""Options of an engine for `crowd`."""


def must_refuse(engine: PagedEngine, grammar: Grammar, says: str) -> None:
    """Fail unless a grammar is refused by name, and other requests go on."""
    with pytest.raises(UserError, match=says):
        engine.generate(
            [PROMPT, PROMPT], [SamplingParams(grammar=grammar), SamplingParams(max_tokens=2)]
        )
    (bad,) = engine.add(PROMPT, SamplingParams(grammar=grammar))
    (good,) = engine.add(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert bad.finish_reason == "error" and re.search(says, str(bad.error)), bad.error
    assert good.finish_reason == "length", "somebody else's grammar ended a request"
    assert "\n" not in str(bad.error)
    check(engine)


def must_match(engine: PagedEngine, grammar: Grammar, pattern: str) -> None:
    """Fail unless every output of a grammar that ends matches a pattern, and some end."""
    params = [
        SamplingParams(max_tokens=80, temperature=1.0, seed=s, grammar=grammar)
        for s in range(6)
    ]
    done = [
        one for one in engine.generate([PROMPT] * 6, params) if one.finish_reason == "stop"
    ]
    assert done, f"{grammar}: no output ends"
    for completion in done:
        text = text_of(completion)
        assert re.fullmatch(pattern, text), f"{grammar}: {text!r}"


def must_cut_guesses(plain: PagedEngine, guessing: PagedEngine) -> None:
    """Fail unless an engine with guesses writes what one without them does."""
    params = [
        SamplingParams(
            max_tokens=30, temperature=1.0, seed=s, grammar=Grammar.regex("(ab|c){4,9}d")
        )
        for s in range(5)
    ]
    expected, found = (engine.generate([PROMPT] * 5, params) for engine in (plain, guessing))
    for one, right in zip(found, expected, strict=True):
        assert one.token_ids == right.token_ids, (
            f"drafts change the text of request {one.index}"
        )
    (alone,) = guessing.generate([PROMPT], params[:1])
    assert alone.token_ids == expected[0].token_ids, (
        "drafts change the text of a request that is alone"
    )
    drafter = guessing.scheduler.drafter
    assert not isinstance(drafter, Guess) or drafter.asked > 5, "no draft was asked for"
    check(guessing)


def must_mask_every_step(model: Model, masks: Any) -> None:
    """Fail unless every overlapped step is masked: by these masks, odd tokens alone are sampled."""
    made = cuda_graphs.load(model, **SMALL)
    engine = Engine(made.scheduler, made.runner, grammar_manager=masks, loop=OverlappedLoop())
    for completion in engine.generate(
        [PROMPT, [3, 1]], SamplingParams(max_tokens=5, ignore_eos=True)
    ):
        assert all(token % 2 for token in completion.token_ids), completion.token_ids
    assert masks.filled == engine.stats.steps, "a step was sampled without a mask"
    check(engine)


def must_end_its_own_step(
    engine: PagedEngine, patch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """Fail unless masks that cannot be made, by this function, end the requests of their step and no other.

    owner, name: of the function.
    """
    late = computed_after_their_end(engine)
    (first,) = engine.add(
        PROMPT, SamplingParams(max_tokens=20, grammar=Grammar.regex("[ab]{18}"))
    )
    for _ in range(200):
        engine.step()
        if len(first.output_ids) >= 3:
            break
    known = len(first.output_ids)
    with patch.context() as failing:
        failing.setattr(owner, name, lambda *given: 1 / 0)
        outputs = engine.step()
    assert first.finish_reason == "error" and isinstance(first.error, ZeroDivisionError), (
        first.error
    )
    assert len(first.output_ids) == known + 1, (
        "the token of the step before, which went well, is lost"
    )
    assert outputs[0].token_id == first.output_ids[-1]
    (second,) = engine.add(
        PROMPT, SamplingParams(max_tokens=20, grammar=Grammar.regex("b{9}"))
    )
    run(engine)
    assert second.finish_reason == "stop", f"after a step that failed: {second.finish_reason}"
    assert not late, f"requests {late} are computed in rows that they have given back"
    check(engine)


def must_harm_nobody(engine: PagedEngine, hostile: Mapping[str, Grammar]) -> None:
    """Fail unless hostile grammars leave another request's tokens and the engine's time alone."""
    bystander = SamplingParams(max_tokens=80, temperature=1.0, seed=1, ignore_eos=True)
    (expected,) = engine.generate([PROMPT], bystander)
    started = time.process_time()
    (kept,) = engine.add(PROMPT, bystander)
    requests = {
        name: engine.add(
            PROMPT, SamplingParams(max_tokens=40, temperature=1.0, seed=2, grammar=grammar)
        )[0]
        for name, grammar in hostile.items()
    }
    run(engine)
    for name, request in requests.items():
        assert request.finish_reason in ("stop", "length", "error"), (
            f"{name}: {request.finish_reason}"
        )
        if request.finish_reason == "error":
            assert isinstance(request.error, UserError), f"{name}: {request.error!r}"
    assert kept.output_ids == expected.token_ids, "a hostile grammar changed somebody's tokens"
    assert time.process_time() - started < 2 * len(hostile)
    check(engine)

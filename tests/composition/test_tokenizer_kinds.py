"""Every way of a text through the engine, with tokenizers of every kind.

Some set a space before a text, some drop it again, some change letters: text to tokens and back depends on
what stands before, and need not keep the bytes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library

import batching
import continuous
from common.errors import UserError
from common.events import generate
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.detokenizer import Detokenizer
from common.text.made_up import TEMPLATE
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from forward.generator import Generator
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from phases.appendix.api.logprobs import spelled
from phases.appendix.guidance.matcher import GuidanceMatcher
from phases.appendix.guidance.spelling import Spelling
from phases.appendix.server import whole_app
from phases.commands.engines import serve
from serving.app import App
from structured.matcher import Matcher
from tests.coroutines import asynchronously
from tests.equivalence.engines import blocks
from tests.guidance_kit import backend_named, served
from tests.scripted import scripted_model, write_script
from tests.servers import Client, Loopback
from tests.structured_kit import mask

# Small tokenizers, trained on some lines, with normalizer, pre-tokenizer, decoder and post-processor of the
# published files of the models that they are named after.

TEXT = """The capital of France is Paris. The capital of Norway is Oslo, and Is it? yes or no, yes and no.
def f(x):\n    return 1\n    if x:\n        return 100\n{"name": "Ada", "age": 36, "city": "Paris"}
{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n<tool_call>\n</tool_call> a an in is the of
user: say yes assistant: no system: """
SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2

WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
UNDERLINE, SPACE = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
BYTES = decoders.ByteFallback()
FUSE = decoders.Fuse()
STRIP = decoders.Strip(" ", 1, 0)
LLAMA = decoders.Sequence([SPACE, BYTES, FUSE, STRIP])
BY_WORDS = [
    pre_tokenizers.Split(WORDS, "isolated"),
    pre_tokenizers.ByteLevel(False, use_regex=False),
]
BY_BYTES, BYTE_LEVEL = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()

KINDS = {  # normalizer, pre-tokenizer, decoder
    "llama-2": (normalizers.Sequence([normalizers.Prepend("▁"), UNDERLINE]), None, LLAMA),
    "mistral-0.3": (None, pre_tokenizers.Metaspace("▁", "first", split=False), LLAMA),
    "metaspace": (None, pre_tokenizers.Metaspace("▁", "always"),
        decoders.Sequence([BYTES, decoders.Metaspace("▁", "always")])),
    "gemma": (UNDERLINE, pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence([SPACE, BYTES, FUSE])),
    "smollm2": (None, BY_BYTES, BYTE_LEVEL),
    "llama-3": (None, pre_tokenizers.Sequence(BY_WORDS), BYTE_LEVEL),
    "qwen": (normalizers.NFC(), pre_tokenizers.Sequence(BY_WORDS), BYTE_LEVEL),
    "nfkc": (normalizers.NFKC(), BY_BYTES, BYTE_LEVEL),
    "lowercase": (normalizers.Lowercase(), BY_BYTES, BYTE_LEVEL),
    "add-prefix-space": (None, pre_tokenizers.ByteLevel(True), BYTE_LEVEL),
}  # fmt: skip


def write_kind(
    folder: Path, name: str, template: str, added: Sequence[AddedToken] = ()
) -> int:
    """Write the files of a tokenizer of this kind, with added tokens; returns the number of its tokens."""
    normalizer, cut, decoder = KINDS[name]
    by_bytes = decoder is BYTE_LEVEL
    first = [*SPECIAL] if by_bytes else [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = pre_tokenizers.ByteLevel.alphabet() if by_bytes else []
    trained = Library(
        models.BPE() if by_bytes else models.BPE(byte_fallback=True, unk_token="<unk>")
    )
    # SentencePiece's merges stay within words as well.
    trained.pre_tokenizer = cut if by_bytes else pre_tokenizers.Metaspace("▁", "always")
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=first, initial_alphabet=letters
    )
    trained.train_from_iterator([TEXT] * 4, trainer)
    made = Library(trained.model)
    made.add_special_tokens(SPECIAL)
    made.add_tokens(list(added))
    made.decoder = decoder
    if normalizer is not None:
        made.normalizer = normalizer
    if cut is not None:
        made.pre_tokenizer = cut
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    made.save(str(folder / "tokenizer.json"))
    size = made.get_vocab_size()
    config = {"vocab_size": size, "bos_token_id": BOS, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": template, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return size


FRANCE = "The capital of France is"
DECOMPOSED, LIGATURE = "U\u0308bung.txt", "\ufb01nd"
TEXTS = [
    "yes",
    " yes",
    "Yes, No",
    f"a {DECOMPOSED}",
    LIGATURE,
    "    return 1\n",
    "a▁b",
    "日本",
    "x</s>y",
    "",
]
BACKENDS = ["llguidance", "automata"]


@dataclass
class Kit:
    """A tokenizer and a model for it."""

    tokenizer: Tokenizer
    model: Model

    def app(self, **options: Any) -> App:
        size = blocks(self.model, 200)
        tokenizer = self.tokenizer
        engine = served(
            self.model, max_rows=8, cache_bytes=size, tokenizer=tokenizer, **options
        )
        return whole_app(Loopback(engine), tokenizer, "tiny")

    def token(self, data: bytes) -> int:
        """The token of these bytes in the middle of a text."""
        bytes_of = self.tokenizer.token_bytes
        return max(
            token for token in range(self.tokenizer.vocab_size) if bytes_of[token] == data
        )

    def always(self, data: bytes) -> dict[str, Any]:
        """Fields of a request whose output is this token again and again."""
        return {"logit_bias": {str(self.token(data)): 100}, "temperature": 0}

    def behind(self, prompt: list[int], output: list[int]) -> str:
        """What the library says that an output adds to its prompt."""
        known = self.tokenizer.backend.decode(prompt)
        return self.tokenizer.backend.decode(prompt + output)[len(known) :]


@pytest.fixture(scope="module", params=KINDS)
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("kind")
    size = write_kind(folder, request.param, TEMPLATE)
    config = replace(SHAPES["tiny"], vocab_size=size, eos_token_ids=(EOS,))
    return Kit(Tokenizer(folder), random_model(config, device="cpu", dtype=torch.float32))


def asked(app: App, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The choice of an answer, and the choices of the events when the same is streamed."""
    found: list[Any] = []

    async def ask() -> None:
        found.extend(await Client(app).post(path, body))
        stream = await Client(app).request(path, body | {"stream": True}).run()
        found.append([event["choices"][0] for event in stream.events() if event != "[DONE]"])

    asynchronously(ask)
    status, answer, events = found
    assert status == 200, answer
    return answer["choices"][0], events


def test_a_completion_is_what_it_adds_to_its_prompt(kit: Kit) -> None:
    rng, vocabulary = random.Random(0), kit.tokenizer.backend
    words = [
        i for i in range(3, kit.tokenizer.vocab_size) if kit.tokenizer.token_bytes[i].isascii()
    ]
    prompts = [kit.tokenizer.encode(FRANCE), [BOS], [*kit.tokenizer.encode("a"), BOS]]
    for prompt in [*prompts, *(rng.choices(words, k=5) for _ in range(20))]:
        output = rng.choices(words, k=8)
        stream = Detokenizer(kit.tokenizer, after=prompt)
        assert "".join(map(stream.push, output)) == kit.behind(prompt, output)
        assert "".join(map(Detokenizer(kit.tokenizer).push, output)) == vocabulary.decode(
            output
        )


def test_a_character_may_begin_in_the_prompt(kit: Kit) -> None:
    ids = [*kit.tokenizer.encode("a"), *(kit.token(bytes([byte])) for byte in "日".encode())]
    for cut in (1, 2):
        stream = Detokenizer(kit.tokenizer, after=ids[:-cut])
        assert "".join(map(stream.push, ids[-cut:])) == "日"


AGE: dict[str, Any] = {
    "type": "object",
    "properties": {"Age": {"enum": ["A", "Bb"]}},
    "required": ["Age"],
    "additionalProperties": False,
}
LANGUAGES = [
    (Grammar.choice(["yes", "no"]), "yes|no"),
    (Grammar.choice([" yes", " no"]), " yes| no"),
    (Grammar.regex(" {4}return [0-9]{3}"), " {4}return [0-9]{3}"),
    (Grammar.choice([f"{DECOMPOSED} A", f"{LIGATURE} a"]), f"{DECOMPOSED} A|{LIGATURE} a"),
    (Grammar.choice(["x</s>y"]), "x</s>y"),
    (Grammar.json_schema({"enum": [DECOMPOSED, LIGATURE]}), f'"{DECOMPOSED}"|"{LIGATURE}"'),
    (Grammar.json_schema(AGE), r'\{\s*"Age"\s*:\s*"(A|Bb)"\s*\}'),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_grammar_is_followed_to_its_end(kit: Kit, backend: str) -> None:
    if backend != "automata":
        pytest.importorskip(backend)
    engine = served(
        kit.model,
        max_rows=8,
        tokenizer=kit.tokenizer,
        guidance=backend != "automata",
        max_len=256,
    )
    prompts = [kit.tokenizer.encode("Is it?"), [BOS], [EOS]]
    for grammar, pattern in LANGUAGES:
        params = SamplingParams(max_tokens=150, grammar=grammar, temperature=1.0, seed=3)
        for done in generate(engine, prompts, params, tokenizer=kit.tokenizer):
            assert done.finish_reason == "stop", (
                f"{grammar} ends with {done.finish_reason}: {done.text!r}"
            )
            assert re.fullmatch(pattern, done.text), f"{grammar}: {done.text!r}"


def test_a_forced_text_is_drafted(kit: Kit) -> None:
    engine = served(kit.model, max_rows=8, tokenizer=kit.tokenizer)
    params = SamplingParams(
        max_tokens=40, grammar=Grammar.choice(["yes, Paris is the capital of France"])
    )
    prompt = kit.tokenizer.encode("Is it?")
    (done,) = generate(engine, [prompt], params, tokenizer=kit.tokenizer)
    assert done.text == "yes, Paris is the capital of France" and done.finish_reason == "stop"
    assert engine.scheduler.drafter.forced > 0, (
        "a text without a choice was sampled token by token"
    )


@pytest.mark.parametrize(
    "load", [Generator, batching.BatchGenerator, continuous.load], ids=["01", "03", "04"]
)
def test_every_phase_shows_the_first_space(kit: Kit, load: Callable[..., Any]) -> None:
    engine, prompt = load(kit.model, tokenizer=kit.tokenizer), kit.tokenizer.encode(FRANCE)
    for stop, expected in (
        ((), " Paris Paris"),
        ((" Paris",), ""),
        (("France is Paris",), " Paris Paris"),
    ):
        bias = {kit.token(b" Paris"): 100.0}
        params = SamplingParams(max_tokens=2, temperature=0.0, logit_bias=bias, stop=stop)
        shown = list[str]()
        serve(
            engine,
            kit.tokenizer,
            [prompt],
            params,
            lambda index, text, shown=shown: shown.append(text),
        )
        (done,) = generate(engine, [prompt], params, tokenizer=kit.tokenizer)
        assert "".join(shown) == done.text == expected


def test_a_completion_goes_on_behind_the_prompt(kit: Kit) -> None:
    body = {"prompt": FRANCE, "max_tokens": 2, **kit.always(b" Paris")}
    choice, events = asked(kit.app(), "/v1/completions", body | {"logprobs": 3})
    text, told = choice["text"], choice["logprobs"]
    assert text == "".join(event["text"] for event in events) == " Paris Paris"
    for name in ("tokens", "token_logprobs"):
        parts = [
            part for event in events if event["logprobs"] for part in event["logprobs"][name]
        ]
        assert parts == told[name], f"{name} of a stream differ"
    assert told["tokens"] == [" Paris", " Paris"]


def test_offsets_of_an_echoed_prompt_are_positions_in_the_text(kit: Kit) -> None:
    """Behind a special token that is not shown, and characters that are spread over several tokens."""
    body = {"prompt": "Is 日本 it", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice, _ = asked(kit.app(), "/v1/completions", body | kit.always(b" Paris"))
    text, told = choice["text"], choice["logprobs"]
    ends = [*told["text_offset"][1:], len(text)]
    for token, start, end in zip(told["tokens"], told["text_offset"], ends, strict=True):
        assert token in ("<s>", text[start:end]) or "\ufffd" in token, (token, start, end)
    assert text.endswith("it Paris Paris") and sorted(ends) == ends


def test_an_echoed_prompt_may_end_within_a_character(kit: Kit) -> None:
    ids = [*kit.tokenizer.encode("a"), *(kit.token(bytes([byte])) for byte in "日".encode())]
    body = {"prompt": ids[:-1], "echo": True, "logprobs": 0, **kit.always("日".encode()[-1:])}
    choice, _ = asked(kit.app(), "/v1/completions", body | {"max_tokens": 1})
    assert choice["text"].lstrip() == "a日" and len(choice["logprobs"]["text_offset"]) == len(
        ids
    )
    choice, _ = asked(kit.app(), "/v1/completions", body | {"max_tokens": 0})
    assert choice["text"] == kit.tokenizer.decode(ids[:-1])


def test_tokens_are_spelled_as_the_text_has_them(kit: Kit) -> None:
    """Any tokens: parts of characters, bytes that are none, special ones. Those before are not looked at."""
    rng, special = random.Random(0), kit.tokenizer.special_ids
    for prompt in ([BOS], kit.tokenizer.encode("a")) * 50:
        tokens = rng.choices(range(kit.tokenizer.vocab_size), k=8)
        stream = Detokenizer(kit.tokenizer, after=prompt)
        text, data = "".join(map(stream.push, tokens)) + stream.incomplete(), b""
        choice = SimpleNamespace(stream=TextStream(kit.tokenizer, SamplingParams(), prompt))
        for token in tokens:
            choice.stream.advance(token, None)
        for place, token in enumerate(tokens):
            data += b"" if token in special else spelled(kit.tokenizer, choice, place, token)
        assert "\ufffd" in text or data.decode() == text


def test_bytes_of_a_chat_are_its_content(kit: Kit) -> None:
    messages = [{"role": "user", "content": "Is it?"}]
    fields: dict[str, Any] = {
        "messages": messages,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 3,
    }
    for token in (b" Paris", b"yes"):
        choice, events = asked(kit.app(), "/v1/chat/completions", fields | kit.always(token))
        content, told = choice["message"]["content"], choice["logprobs"]["content"]
        assert (
            content
            == "".join(event["delta"].get("content") or "" for event in events)
            == 3 * token.decode()
        )
        assert b"".join(bytes(one["bytes"]) for one in told) == content.encode()


def test_a_prompt_without_text_lets_the_output_begin_one(kit: Kit) -> None:
    """But for a grammar, which counts the bytes in the middle of a text."""
    body = {"prompt": [BOS], "max_tokens": 2, "logprobs": 1, **kit.always(b" Paris")}
    choice, _ = asked(kit.app(), "/v1/completions", body)
    token = kit.token(b" Paris")
    assert (
        choice["text"]
        == "".join(choice["logprobs"]["tokens"])
        == kit.tokenizer.decode([token, token])
    )
    choice, _ = asked(
        kit.app(), "/v1/completions", {"prompt": [BOS], "guided_choice": [" yes"]}
    )
    assert choice["text"] == " yes"


# Tokens that are added and stand for their text, as `<think>` and `<tool_call>` of Qwen's do; and others.

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ADDED = [
    *(AddedToken(mark, special=False, normalized=False) for mark in MARKS),
    AddedToken("<|own|>", special=True),
    AddedToken("<left>", special=False, normalized=False, lstrip=True),
    AddedToken("<right>", special=False, normalized=False, rstrip=True),
    AddedToken("<Norm>", special=False, normalized=True),
    AddedToken("Alone", special=False, normalized=False, single_word=True),
    AddedToken("<thi", special=False, normalized=False),
    AddedToken("é", special=False, normalized=False),
    AddedToken("<\ufb01>", special=False, normalized=False),
    AddedToken("<|own", special=False, normalized=False),
    AddedToken("  ", special=False, normalized=False),
]
THINKING = TEMPLATE + "{# <think> #}"
WITH_MARKS = {
    "regex": Grammar.regex("<think>[a-z]+</think>[0-9]"),
    "any of them": Grammar.regex(
        r"(<thi|<think>|<left>|<right>| *<Norm>|Alone|é|<\ufb01>|<\|own\|>| <right>)+"
    ),
    "without": Grammar.regex("[^<]{0,30}"),
    "const": Grammar.json_schema({"const": "a <think> b"}),
    "enum": Grammar.json_schema(
        {"enum": ["<think>", "</think> <left>", "é <\ufb01>", " <right> x"]}
    ),
    "string": Grammar.regex(r'"[^\x00-\x1f\x7f"\\]{0,40}"'),
    "quoted": Grammar.regex('"<think>[a-z]+</think>"'),
    "choice": Grammar.choice(
        ["<think>yes</think>", "<think>no", "<tool_call>", " <left>", "<|own|>"]
    ),
    "forced": Grammar.choice(["Well, <think> <left>é</think> <right> x<|own|> Alone <Norm>"]),
}


@dataclass
class Marked(Kit):
    """A tokenizer with `ADDED`, and a scripted model."""

    def vocabulary(self) -> Spelling:
        return Spelling.of(self.tokenizer, self.tokenizer.vocab_size + 5, (EOS,))


@pytest.fixture(scope="module", params=KINDS)
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Marked:
    folder = tmp_path_factory.mktemp("marked")
    size = write_kind(folder, request.param, THINKING, ADDED)
    return Marked(Tokenizer(folder), scripted_model(size, EOS))


def walk(made: list[Matcher], vocabulary: Spelling, rng: random.Random) -> bytes:
    """Follow matchers of one language to a random output; returns its bytes.

    The first may narrow its mask to the one token by which the tokenizer spells a text that is forced.
    """
    out, size = b"", len(vocabulary.tokens)
    for _ in range(60):
        masks = [mask(matcher, size) for matcher in made]
        first = masks[0]
        own = [token for token in first if token in vocabulary.added.values()]
        token = rng.choice(own if own and rng.random() < 0.5 else first)
        for allowed in masks:
            assert first in (allowed, [token]), f"behind {out!r} the masks differ"
            assert token in allowed, (
                f"behind {out!r} {vocabulary.tokens[token]!r} is in one mask alone"
            )
        if token == EOS:
            break
        forced = made[0].forced() if isinstance(made[0], GuidanceMatcher) else ()
        assert first == [forced[0]] if forced else True, (
            f"behind {out!r} what is forced is not the mask"
        )
        for matcher in made:
            assert matcher.advance([token]) == 1, (
                f"behind {out!r} {vocabulary.tokens[token]!r} is stuck"
            )
            matcher.rollback(1)
            assert matcher.advance([token]) == 1 and not matcher.problem, (
                f"behind {out!r}: rolled back"
            )
        out += vocabulary.tokens[token]
    return out


@pytest.mark.parametrize("name", WITH_MARKS)
def test_added_tokens_are_text_to_a_grammar(marked: Marked, name: str) -> None:
    vocabulary = marked.vocabulary()
    compiled = [backend_named(one)(vocabulary).compile(WITH_MARKS[name]) for one in BACKENDS]
    seen = b""
    for seed in range(6):
        seen += walk([each.matcher() for each in compiled], vocabulary, random.Random(seed))
    assert name == "without" or b"<" in seen


def test_a_lark_grammar_asks_for_a_token_or_for_its_text(marked: Marked) -> None:
    vocabulary = marked.vocabulary()
    backend = backend_named("llguidance")(vocabulary)
    x, begin, end = (marked.token(text) for text in (b"x", b"<think>", b"</think>"))
    own = next(token for token, name in vocabulary.special.items() if name == "<|own|>")
    for source in (
        'start: <think> /(?s:.*)/ </think> "x"',
        f'start: <[{begin}]> /(?s:.*)/ <[{end}]> "x"',
    ):
        matcher = backend.compile(Grammar.lark(source)).matcher()
        assert matcher.advance([x]) == 0
        assert matcher.advance([begin, x, end, x]) == 4
        matcher.rollback(2)
        assert matcher.advance([end, x]) == 2 and EOS in mask(matcher, len(vocabulary.tokens))
    matcher = backend.compile(Grammar.lark('start: "<think>" /[a-z]/ <|own|>')).matcher()
    assert matcher.advance([begin, x, own]) == 3
    with pytest.raises(UserError, match="one special or added token"):
        backend.compile(Grammar.lark('start: <[5]> "x"'))


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo <think>"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
SCRIPTS = {  # tool_choice, the output, its reasoning, content and whether it has a call
    "auto": (
        "auto",
        f"<think>\nsay no\n</think>\n\nyes, is it\n{CALL}",
        "say no",
        "yes, is it",
        True,
    ),
    "auto without a call": ("auto", "<think>\nis it\n</think>\n\nyes", "is it", "yes", False),
    "required": ("required", CALL, None, None, True),
    "named": (NAMED, CALL, None, None, True),
}


def prompt_size(app: App, body: dict[str, Any]) -> int:
    """The number of tokens of a chat."""
    found: list[Any] = []

    async def ask() -> None:
        found.extend(await Client(app).post("/v1/chat/completions", body | {"max_tokens": 1}))

    asynchronously(ask)
    status, answer = found
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_tools_and_reasoning_with_the_models_own_marks(marked: Marked, name: str) -> None:
    chosen, output, reasoning, content, called = SCRIPTS[name]
    app = marked.app()
    messages = [{"role": "user", "content": "Is it?"}]
    body = {"messages": messages, "tools": [WEATHER], "tool_choice": chosen, "temperature": 0}
    tokens = marked.vocabulary().encode(output)  # of exactly these bytes
    write_script(marked.model, prompt_size(app, body), [*tokens, EOS])
    choice, events = asked(
        app, "/v1/chat/completions", body | {"max_tokens": len(tokens) + 20}
    )
    message = choice["message"]
    deltas = [event["delta"] for event in events]
    streamed = {
        field: "".join(delta.get(field) or "" for delta in deltas)
        for field in ("reasoning_content", "content")
    }
    calls = [part for delta in deltas for part in delta.get("tool_calls") or []]
    for found in (message, streamed):
        assert (found.get("reasoning_content") or None, found["content"] or None) == (
            reasoning,
            content,
        )
    assert bool(message.get("tool_calls")) == called == bool(calls)
    if called:
        (call,) = message["tool_calls"]
        written = "".join(part["function"].get("arguments") or "" for part in calls)
        for arguments in (call["function"]["arguments"], written):
            assert json.loads(arguments) == {"city": "Oslo <think>"}
        assert call["function"]["name"] == calls[0]["function"]["name"] == "weather"
        assert choice["finish_reason"] == "tool_calls"

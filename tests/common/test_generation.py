"""The rules that every phase shares: collecting events, checking prompts, finishing, stop strings, texts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from common.errors import UserError
from common.events import (
    FinishReason,
    Logprob,
    Params,
    TokenEvent,
    generate,
    params_per_prompt,
)
from common.rules import check_prompt, finish_reason
from common.sampling.params import SamplingParams
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer

EOS = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte, a few for two letters, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    assert len(vocabulary) == EOS
    space = "\u0120"  # how byte-level vocabularies write a space
    merges = [("a", "b"), ("c", "d"), (space, "a"), ("d", "a")]
    vocabulary |= {"<eos>": EOS} | {
        a + b: EOS + 1 + rank for rank, (a, b) in enumerate(merges)
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(f'{{"eos_token_id": {EOS}}}')
    return Tokenizer(folder)


def event(token: int | None, reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(0, token, reason, 0.0)


class Script:
    """An engine that plays events."""

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        self.events = events
        self.seen: list[SamplingParams] = []

    def stream(self, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
        self.seen = params_per_prompt(prompts, params)
        yield from self.events


def test_generate_collects_in_prompt_and_sample_order() -> None:
    events = [
        TokenEvent(1, 10, None, 5.0),
        TokenEvent(0, 20, None, 6.0, sample=1),
        TokenEvent(0, 30, "stop", 6.5, sample=0),
        TokenEvent(1, 11, "length", 7.0),
        TokenEvent(0, None, "abort", 9.0, sample=1),
    ]
    each = [SamplingParams(n=2), SamplingParams()]
    engine = Script(events)
    found = generate(engine, [[1, 2], [3]], each)
    assert engine.seen == each
    assert [
        (c.index, c.sample, c.prompt_ids, c.token_ids, c.finish_reason) for c in found
    ] == [
        (0, 0, [1, 2], [30], "stop"),
        (0, 1, [1, 2], [20], "abort"),
        (1, 0, [3], [10, 11], "length"),
    ]
    assert found[2].times == [5.0, 7.0] and not found[2].text


@pytest.mark.parametrize("reason", ["length", "abort", "error", "stop"])
@pytest.mark.parametrize("wanted", [0, 3, None])
def test_log_probabilities_that_were_asked_for_are_one_a_token_also_of_no_token(
    reason: FinishReason, wanted: int | None
) -> None:
    lone = [TokenEvent(0, None, reason, 1.0, sample=sample) for sample in range(2)]
    found = generate(Script(lone), [[1]], SamplingParams(n=2, logprobs=wanted))
    none: list[Logprob] | None = None if wanted is None else []
    assert [one.logprobs for one in found] == [none, none], (
        f"logprobs: {wanted} were asked for, the completion ended with {reason} and no token"
    )
    assert none is None or found[0].logprobs is not found[1].logprobs, "one list for each"


def test_one_params_for_all_or_one_for_each() -> None:
    one, other = SamplingParams(), SamplingParams(max_tokens=3)
    assert params_per_prompt([[1], [2]], one) == [one, one]
    assert params_per_prompt([[1], [2]], [one, other]) == [one, other]
    with pytest.raises(UserError, match="params has 1 entries, but must have one a prompt, 2"):
        params_per_prompt([[1], [2]], [one])


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], SamplingParams(), "the prompt is empty, but must have at least 1 token"),
        ([1] * 8, SamplingParams(), "the prompt has 8 tokens, but must have at most 7"),
        ([1, 100, 2], SamplingParams(), "token id 100, but ids must be between 0 and 99"),
        ([1, -3], SamplingParams(), "token id -3, but ids must be between 0 and 99"),
        (
            [1, 2.5],
            SamplingParams(),
            "a token id of the prompt is 2.5, but must be an integer",
        ),
        (["a"], SamplingParams(), "a token id of the prompt is 'a', but must be an integer"),
        ([1], SamplingParams(stop_token_ids=(5, 100)), "stop_token_ids holds token id 100"),
        ([1], SamplingParams(logit_bias={123: 1.0}), "logit_bias holds token id 123"),
        ([1], SamplingParams(stop=("END",)), "stop is .*END.*, but must be empty"),
    ],
)
def test_requests_that_cannot_be_served(
    prompt: list[int], params: SamplingParams, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        check_prompt(prompt, 100, 8, params, has_tokenizer=False)


def test_prompts_may_hold_the_integers_of_numpy_and_must_be_lists() -> None:
    check_prompt(list(np.arange(4)), 100, 8, SamplingParams())
    with pytest.raises(UserError, match="the prompt is 1, but must be a list of token ids"):
        check_prompt(1, 100, 8, SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("token", "output_len", "settings_", "limit", "reason"),
    [
        (5, 1, {}, None, None),
        (5, 9, {"max_tokens": 10}, None, None),
        (5, 10, {"max_tokens": 10}, None, "length"),
        (5, 3, {"max_tokens": 10}, 3, "length"),
        (EOS, 1, {}, None, "stop"),
        (EOS, 10, {"max_tokens": 10}, None, "stop"),
        (EOS, 1, {"ignore_eos": True}, None, None),
        (EOS, 10, {"ignore_eos": True, "max_tokens": 10}, None, "length"),
        (EOS, 2, {"min_tokens": 2}, None, None),
        (EOS, 3, {"min_tokens": 2}, None, "stop"),
        (7, 2, {"stop_token_ids": (7,)}, None, "stop"),
        (7, 2, {"stop_token_ids": (7,), "ignore_eos": True}, None, "stop"),
        (7, 2, {"stop_token_ids": (7,), "min_tokens": 2}, None, None),
        (7, 2, {"stop_token_ids": (7,), "min_tokens": 2, "max_tokens": 2}, None, "length"),
        (EOS, 1, {"ignore_eos": True, "stop_token_ids": (EOS,)}, None, "stop"),
    ],
)
def test_the_finish_rule(
    token: int,
    output_len: int,
    settings_: dict[str, object],
    limit: int | None,
    reason: str | None,
) -> None:
    params = SamplingParams(**settings_)  # type: ignore[arg-type]
    most = params.max_tokens if limit is None else limit
    assert finish_reason(token, output_len, params, {EOS}, most) == reason


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """The reference: where a text ends that is read one character after another."""
    for end in range(start + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[start:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab cdé", max_size=30),
    stops=st.lists(st.text("ab cdé", min_size=1, max_size=4), max_size=3),
    cuts=st.randoms(use_true_random=False),
    exempt=st.integers(0, 4),
)
def test_the_cut_into_tokens_does_not_matter(
    tokenizer: Tokenizer, text: str, stops: list[str], cuts: random.Random, exempt: int
) -> None:
    """Against a search of the whole text; what may begin a stop string, and no more, is held back."""
    tokens, rest = [], text
    while rest:
        size = cuts.randint(1, len(rest))
        tokens += tokenizer.encode(rest[:size])
        rest = rest[size:]
    params = SamplingParams(stop=tuple(stops), min_tokens=exempt)
    stream, shown = TextStream(tokenizer, params), ""
    reason = None
    for read, token in enumerate(tokens, 1):
        reason, piece = stream.advance(token, None)
        shown += piece
        if reason is not None:
            break
        known = tokenizer.decode(tokens[:read]).rstrip("\ufffd")
        held = known.removeprefix(shown)
        assert shown + held == known
        assert not held or any(stop.startswith(held) for stop in stops), (
            f"{held!r} is held back"
        )
    # The text of the first tokens, without a character that they leave incomplete, is not searched.
    start = len(tokenizer.decode(tokens[:exempt]).rstrip("\ufffd"))
    end = first_stop(text, stops, start)
    assert (reason == "stop") == (end is not None)
    if end is None:
        shown += stream.advance(None, "length")[1]
    assert shown == (text if end is None else text[:end])


@pytest.mark.parametrize(
    ("stops", "letter"),
    [
        (("a" * 1023 + "b",), "a"),  # every token falls back from the longest state
        (tuple("a" * size + "b" for size in range(1008, 1024)), "a"),
        (("end", "</s>"), "x"),
        ((), "x"),
    ],
    ids=["one long", "many long", "short", "none"],
)
def test_cost_does_not_grow_with_the_text(
    tokenizer: Tokenizer, stops: tuple[str, ...], letter: str
) -> None:
    """30,000 tokens; reading the text of the stream again for each of them would take a minute."""
    token, count = tokenizer.encode(letter)[0], 30_000
    stream = TextStream(tokenizer, SamplingParams(stop=stops))
    start = time.process_time()  # of work: a busy machine is no fault
    shown = [stream.advance(token, None)[1] for _ in range(count - 1)]
    shown.append(stream.advance(token, "length")[1])
    seconds = time.process_time() - start
    assert sum(map(len, shown)) == count
    assert seconds < 4, f"{seconds / count * 1e6:.0f} us a token"


def test_what_is_held_back_is_let_go_at_a_cost_that_hardly_grows_with_the_strings(
    tokenizer: Tokenizer,
) -> None:
    """One request may have 128 texts that all let go of 1,000 characters in the same step."""
    letter, other = tokenizer.encode("a"), tokenizer.encode("x")[0]

    def seconds(count: int) -> float:
        """Of work for the token that decides that none of so many strings has begun; the least of five."""
        stops = tuple("a" * 1000 + chr(33 + place) for place in range(count))
        least = 1.0
        for _ in range(5):
            stream = TextStream(tokenizer, SamplingParams(stop=stops))
            for _ in range(1000):
                assert stream.advance(letter[0], None) == (None, "")
            start = time.thread_time()
            assert stream.advance(other, None) == (None, "a" * 1000 + "x")
            least = min(least, time.thread_time() - start)
        return least

    assert seconds(64) < 15 * seconds(1)


def collect(
    tokenizer: Tokenizer, params: SamplingParams, events: Sequence[TokenEvent]
) -> list[str]:
    stream = TextStream(tokenizer, params)
    return [stream.advance(item.token_id, item.finish_reason)[1] for item in events]


def test_text_leaves_out_the_token_that_ended_it(tokenizer: Tokenizer) -> None:
    a, b, x = (tokenizer.encode(letter)[0] for letter in "abx")
    params = SamplingParams(stop_token_ids=(x,), stop=("bq",))
    assert collect(tokenizer, params, [event(a), event(b), event(EOS, "stop")]) == [
        "a",
        "",
        "b",
    ]
    assert collect(tokenizer, params, [event(a), event(b), event(x, "stop")]) == ["a", "", "b"]
    assert collect(tokenizer, params, [event(x), event(a, "length")]) == [
        "x",
        "a",
    ]  # it ended nothing
    completes = SamplingParams(stop_token_ids=(x,), stop=("ax",))
    assert collect(tokenizer, completes, [event(a), event(x, "stop")]) == ["", "a"]


def test_text_of_an_interrupted_character_is_left_out(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂")
    assert len(tokens) == 5
    cut = [*map(event, tokens[:3]), event(None, "abort")]
    assert collect(tokenizer, SamplingParams(), cut) == ["a", "", "", ""]
    assert collect(tokenizer, SamplingParams(), list(map(event, tokens))) == [
        "a",
        "",
        "",
        "",
        "🙂",
    ]


def test_generate_fills_in_texts(tokenizer: Tokenizer) -> None:
    hello, other = tokenizer.encode("hello"), tokenizer.encode("dogs")
    events = [TokenEvent(0, token, None, 1.0) for token in hello] + [
        TokenEvent(0, EOS, "stop", 2.0)
    ]
    events += [TokenEvent(1, token, None, 1.0, sample=1) for token in other]
    events += [
        TokenEvent(1, other[0], "length", 1.0, sample=1),
        TokenEvent(1, None, "abort", 1.0),
    ]
    each = [SamplingParams(), SamplingParams(n=2)]
    found = generate(Script(events), [[1], [2]], each, tokenizer=tokenizer)
    assert [completion.text for completion in found] == ["hello", "", "dogsd"]
    assert found[0].token_ids == [*hello, EOS]

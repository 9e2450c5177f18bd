"""Stop strings against a search of the whole text, and what a token costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.events import TextStream, TokenEvent
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from tests.common import tiny_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Byte-level: an ASCII letter is one token."""
    from common.models.gguf_import import import_gguf

    folder = tmp_path_factory.mktemp("tiny")
    tiny_gguf.write(folder / "tiny.gguf", "llama")
    import_gguf(folder / "tiny.gguf", folder / "model")
    return Tokenizer(folder / "model")


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """The reference: where the first stop string to be completed, the longest of several, begins and ends."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab", max_size=25), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_nothing_is_shown_that_may_begin_a_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=tuple(stops)))
    for read, letter in enumerate(text, 1):
        reason, _ = stream.advance(tokenizer.encode(letter)[0], None)
        if reason is not None:
            break
        held = text[len(stream.text) : read]
        assert stream.text + held == text[:read]
        assert not held or any(stop.startswith(held) for stop in stops)
    else:
        stream.advance(None, "length")
    found = first_stop(text, stops)
    assert stream.text == (text if found is None else text[: found[0]])


@pytest.mark.parametrize(
    ("stops", "letter"),
    [
        (("a" * 1023 + "b",), "a"),  # every token falls back from the longest state
        (tuple("a" * size + "b" for size in range(960, 1024)), "a"),
        (("end", "</s>"), "x"),
        ((), "x"),
    ],
    ids=["one long", "many long", "short", "none"],
)
def test_cost_does_not_grow_with_the_text(tokenizer: Tokenizer, stops: tuple[str, ...], letter: str) -> None:
    """30,000 tokens; reading the text of the stream again for each of them would take a minute."""
    token, count = tokenizer.encode(letter)[0], 30_000
    stream = TextStream(tokenizer, SamplingParams(stop=stops))
    start = time.process_time()  # of work: a busy machine is no fault
    shown = [stream.push(TokenEvent(0, token, None, 0.0)) for _ in range(count - 1)]
    shown.append(stream.push(TokenEvent(0, token, "length", 0.0)))
    seconds = time.process_time() - start
    assert sum(map(len, shown)) == count
    assert seconds < 4, f"{seconds / count * 1e6:.0f} us a token"

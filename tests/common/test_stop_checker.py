"""Stop strings against a search of the whole text, and what a token costs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.events import TextStream, TokenEvent
from common.sampling.params import SamplingParams
from common.text.stop_strings import StopStrings
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


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """The reference: how much of the text's end may be the beginning of a stop string."""
    sizes = range(min(len(text), max(map(len, stops), default=0)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@pytest.mark.parametrize("letters", ["ab", "abc"])
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_the_automaton_finds_what_a_search_finds(letters: str, data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text(letters, min_size=1, max_size=6), max_size=8))
    pieces = data.draw(st.lists(st.text(letters, max_size=5), max_size=10))
    strings, state, read = StopStrings(stops), 0, ""
    for piece in pieces:
        expected = first_stop(read + piece, stops)
        state, end, size = strings.search(state, piece)
        found = (len(read) + end - size, len(read) + end) if size else None
        assert found == expected, f"{stops} in {read + piece!r}"
        read += piece
        if found:
            return
        assert strings.depth[state] == longest_beginning(read, stops), f"{stops} after {read!r}"


def test_states_are_made_only_where_the_text_leads() -> None:
    stops = ["".join(random.Random(seed).choices("abcdef", k=1024)) for seed in range(64)]
    strings = StopStrings(stops)
    state = strings.search(0, "xyz" * 1000 + stops[0][:100])[0]
    assert strings.depth[state] == 100
    assert len(strings.depth) < 2000, "states were made for text that was never read"


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

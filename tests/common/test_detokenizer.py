"""The incremental detokenizer: equal to decoding at once, and linear."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from common.errors import UserError
from common.text.detokenizer import Detokenizer
from common.text.tokenizer import Tokenizer
from tests.common.tiny_gguf import byte_alphabet

WORDS = [
    "a",
    "b",
    "é",
    "日本",
    "▁",
    "▁a",
    "▁▁b",
    "▁the",
    "##ly",
    "##ed",
    ".",
    "n't",
    "x</w>",
    "</w>",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE = decoders.Replace("▁", " ")
FALLBACK = decoders.ByteFallback()
FUSE = decoders.Fuse()
KINDS = {
    "byte-level": decoders.ByteLevel(),
    "gemma": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "llama-2": decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "metaspace-bytes": decoders.Sequence([FALLBACK, decoders.Metaspace()]),
    "none": None,
}


def made(folder: Path, kind: str) -> Tokenizer:
    """A small tokenizer of this kind, with two special tokens and two that are only added."""
    words = byte_alphabet() if kind == "byte-level" else BYTES + WORDS
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a")
    )
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    backend.add_tokens(["<think>", "two words ü"])
    if KINDS[kind] is not None:
        backend.decoder = KINDS[kind]
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return made(tmp_path_factory.mktemp("tokenizer"), request.param)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, ids), detokenizer.incomplete()]


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens of single bytes."""
    ours = tokenizer.token_bytes
    by_byte = {
        ours[i]: i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids
    }
    return [by_byte[bytes([byte])] for byte in data]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_stream_is_what_decodes_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens: invalid bytes, special tokens, unknown ids, words that depend on their neighbours."""
    size = tokenizer.vocab_size
    any_id = st.integers(0, size + 3) | st.integers(max(0, size - 20), size - 1)
    ids = data.draw(st.lists(any_id, max_size=12))
    if len(tokenizer.token_bytes[0x80]) == 1:  # so it can spell bytes
        places = st.integers(0, len(ids))
        for text in data.draw(st.lists(st.text("a é🎉𐍈日", max_size=3), max_size=3)):
            at = data.draw(places)
            ids[at:at] = ids_of(tokenizer, text.encode())
    whole = tokenizer.backend.decode(ids)
    found = "".join(streamed(tokenizer, ids))
    assert found == tokenizer.decode(ids), "stream and decode differ"
    if tokenizer.token_bytes.byte_fallback and "\ufffd" in whole:
        return  # the library then gives up the whole run of bytes: see the next test
    assert found == whole, "the stream differs from the library's decode"


@pytest.mark.parametrize("kind", ["gemma", "llama-2", "metaspace-bytes"])
def test_an_invalid_byte_spoils_no_character_beside_it(tmp_path, kind):
    tokenizer = made(tmp_path, kind)
    word = tokenizer.backend.token_to_id("▁a")
    good, bad = ids_of(tokenizer, "🎉".encode()), ids_of(tokenizer, b"\xf0\x9f")
    for ids, text in (
        ([*good, *bad, *good], "🎉\ufffd\ufffd🎉"),
        ([*bad, word], "\ufffd\ufffd a"),
        ([*bad, *good, word], "\ufffd\ufffd🎉 a"),
        ([*good, bad[1]], "🎉\ufffd"),
    ):
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == text


RUNS = ["invalid byte", "beginning", "special", "unknown", "word", "mixed"]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["byte-level", "gemma", "llama-2"])
def test_cost_is_linear_in_the_number_of_tokens(tmp_path, kind, run):
    tokenizer = made(tmp_path, kind)
    size = tokenizer.vocab_size
    generator = random.Random(0)
    token = {
        "invalid byte": 0x80,
        "beginning": 0xF0,
        "special": size - 4,
        "unknown": size,
        "word": size - 5,
    }
    count = 16_000
    ids = [token.get(run, generator.randrange(size)) for _ in range(count)]
    detokenizer = Detokenizer(tokenizer)
    start = time.process_time()  # of work: a busy machine is no fault
    text = "".join(map(detokenizer.push, ids)) + detokenizer.incomplete()
    seconds = time.process_time() - start
    assert text == tokenizer.decode(ids)
    assert seconds < 2, f"{seconds / count * 1e6:.0f} us a token"


def test_every_token_of_the_bundled_models(smollm2_folder, gemma3_folder):
    """Each token behind another, so that its text is not the first one's."""
    for folder, count in ((smollm2_folder, 49_152), (gemma3_folder, 10_000)):
        tokenizer = Tokenizer(folder)
        ids = random.Random(0).sample(range(tokenizer.vocab_size), count)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
        if not tokenizer.token_bytes.byte_fallback:
            assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
        words = [i for i in ids if not tokenizer.backend.id_to_token(i).startswith("<0x")]
        assert "".join(streamed(tokenizer, words)) == tokenizer.backend.decode(words)


def test_special_tokens_that_a_normalizer_rewrites_are_left_out_whole_and_streamed(tmp_path):
    """Such as a normalized token `</s>` where every text begins with `▁`: the library shows it."""
    made(tmp_path, "gemma")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.normalizer = normalizers.Prepend("▁")
    backend.add_special_tokens([AddedToken("</s>", normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = [backend.token_to_id("a"), backend.token_to_id("</s>"), backend.token_to_id("b")]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "ab"


BYTES_LAST = [decoders.Replace("Ġ", " "), decoders.ByteLevel()]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([decoders.ByteLevel(), decoders.Fuse()], None),
        ([decoders.Fuse(), decoders.ByteLevel()], "Fuse, ByteLevel"),
        ([decoders.Sequence([FALLBACK, FUSE]), REPLACE], "Sequence, Replace"),
        ([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)], "ByteLevel, Strip"),
        (BYTES_LAST, "Replace, ByteLevel"),
        ([decoders.BPEDecoder(), decoders.Replace("a", "b")], "BPEDecoder, Replace"),
        ([decoders.CTC()], "CTC"),
        ([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 1)], "Strip"),
    ],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path, steps, says):
    """Its text of some tokens is not that of each in turn, so a stream would show another one."""
    made(tmp_path, "byte-level")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.decoder = decoders.Sequence(steps)
    backend.save(str(tmp_path / "tokenizer.json"))
    if says:
        with pytest.raises(UserError, match=rf"tokenizer\.json .*\b{says}\b.* not supported"):
            Tokenizer(tmp_path)
        return
    tokenizer = Tokenizer(tmp_path)
    ids = ids_of(tokenizer, "é 日".encode())
    assert "".join(streamed(tokenizer, ids)) == tokenizer.backend.decode(ids) == "é 日"

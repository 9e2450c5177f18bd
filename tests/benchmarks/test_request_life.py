"""The picture of a request's life is drawn from its trace, and the trace is one of a whole life."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

from benchmarks.request_life import OUTPUT, PICTURE, TRACE, draw

NOTES = json.loads(TRACE.read_text(encoding="utf-8"))


def test_the_picture_is_that_of_the_trace():
    assert PICTURE.read_text(encoding="utf-8") == draw(NOTES), (
        "life.svg is not drawn from life.json: python -m benchmarks.request_life --draw"
    )
    ElementTree.fromstring(draw(NOTES))


def test_the_trace_is_a_whole_life_in_order():
    tokens = [note["at"] for note in NOTES if note["what"] == "token"]
    chunks = [note["at"] for note in NOTES if note["what"] == "chunk"]
    assert len(tokens) == OUTPUT and tokens == sorted(tokens)
    assert all(sent <= seen for sent, seen in zip(chunks, tokens, strict=False)), "a token before its chunk"
    asked, heard, end = (
        next(note["at"] for note in NOTES if note["what"] == what) for what in ("asks", "headers", "end")
    )
    assert asked == 0.0 and asked < heard < tokens[0] and tokens[-1] <= end

"""JSON from outside: bounds before decoding and errors in words."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from common.errors import UserError, shown
from common.json_measure import PIECE
from common.json_text import (
    MAX_DEPTH,
    FieldError,
    check_json,
    convert_fields,
    decode_object,
)


class Fields(Struct, kw_only=True):
    number: int | None = None
    share: Annotated[int, Meta(ge=1, le=9)] | None = None
    text: str = ""
    kind: Literal["a", "b"] | None = None
    off: Literal[False] | None = None
    nothing: None = None
    parts: list[dict[str, Any]] | None = None


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"number": "x"}, "number", "number must be an integer, but is a string"),
        ({"number": 1.5}, "number", "number must be an integer, but is a number"),
        ({"share": 0}, "share", "share is 0, but must be an integer >= 1"),
        ({"share": -(10**30)}, "share", f"share is {-(10**30)}, but must be an integer >= 1"),
        ({"share": 10**99}, "share", f"share is {shown(10**99)}, but must be an integer <= 9"),
        ({"share": "x"}, "share", "share must be an integer, but is a string"),
        ({"text": None}, "text", "text must be a string, but is null"),
        ({"kind": "c"}, "kind", "kind is not supported with the value 'c'"),
        ({"off": True}, "off", "off is not supported with the value true"),
        ({"nothing": 3}, "nothing", "nothing is not supported"),
        ({"parts": [{}, 3]}, "parts", "parts[1] must be an object, but is an integer"),
        ({"parts": "x" * 5000}, "parts", "parts must be a list, but is a string"),
    ],
)
def test_a_wrong_field_is_named_in_words(fields: Any, field: str, words: str) -> None:
    with pytest.raises(FieldError) as said:
        convert_fields(Fields, fields | {"unknown": 1})
    assert (said.value.field, str(said.value)) == (field, words)


def test_a_number_out_of_range_is_named() -> None:
    with pytest.raises(FieldError, match="b holds a number that is out of range"):
        decode_object(b'{"a": 1, "b": [1e999]}', 100)


@pytest.mark.parametrize("rest", [b', "b": tru', b',"b":1,}', b"} x"])
def test_a_broken_body_with_such_a_number_is_broken(rest: bytes) -> None:
    with pytest.raises(FieldError, match="the body is no JSON object"):
        decode_object(b'{"a": 1e999' + rest, 100)


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_empty(body: bytes) -> None:
    with pytest.raises(FieldError, match="the body is empty"):
        decode_object(body, 100)


BRACKETS = {
    "deep lists": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "deep objects": b'{"a":' * 500 + b"1" + b"}" * 500,
    "many lists": b"[" + b"[]," * 101 + b"[]]",
    "many keys": json.dumps(dict.fromkeys(map(str, range(101)), 1)).encode(),
    "a list without an end": b"[" * 100_000,
}


@pytest.mark.parametrize("what", BRACKETS)
def test_many_and_deep_parts_are_refused_before_they_are_decoded(what: str) -> None:
    with pytest.raises(UserError, match=r"which is the limit"):
        check_json(BRACKETS[what], 100)


def test_what_stands_in_strings_does_not_count() -> None:
    text = '{[:"\\' * 200
    check_json(json.dumps({"a": text, "b": [text] * 5}).encode(), 10)
    side_by_side = json.dumps([[]] * 1000).encode()
    check_json(side_by_side, 2000)  # many, and none of them deep


def test_pieces_are_looked_through_as_one_body() -> None:
    long = "[{" * PIECE
    check_json(json.dumps({"a": long, "b": [[]] * 150}).encode(), 200)
    deep = b"[" * 100 + b'"' + b"x" * PIECE + b'",' + b"[" * 100
    with pytest.raises(UserError, match="nests deeper"):
        check_json(deep, 1000)
    wide = b'[["' + b"x" * PIECE + b'"],' + b"[]," * 199 + b"[]]"
    check_json(wide, 202)
    with pytest.raises(UserError, match="more than 201"):
        check_json(wide, 201)

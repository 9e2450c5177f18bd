"""What cannot be used is told in one sentence, however long the number in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.error_lines import one_line
from common.errors import UserError, integer, number, shown, text
from common.names import choice
from common.sampling.params import SamplingParams

HUGE = 10**5000
"""Python refuses to write out more than 4,300 digits."""


@pytest.mark.parametrize(
    "call",
    [
        lambda: integer("x", HUGE, low=0, high=9),
        lambda: integer("x", [HUGE]),  # type: ignore[arg-type]
        lambda: number("x", HUGE, low=0, high=1),
        lambda: choice("x", HUGE, ["a"]),
        lambda: text("x", HUGE),  # type: ignore[arg-type]
        lambda: SamplingParams(max_tokens=HUGE),
        lambda: SamplingParams(stop=(HUGE,)),  # type: ignore[arg-type]
        lambda: SamplingParams(ignore_eos=HUGE),  # type: ignore[arg-type]
        lambda: SamplingParams(logit_bias={HUGE: 1.0}),
        lambda: SamplingParams(logit_bias=HUGE),  # type: ignore[arg-type]
    ],
)
def test_integers_of_5000_digits(call: Callable[[], object]) -> None:
    with pytest.raises(UserError) as raised:
        call()
    assert len(str(raised.value)) < 200, "nobody reads such a line"


def test_what_is_shown() -> None:
    assert shown("a\n") == r"'a\n'"
    assert shown(HUGE) == "an integer of 16610 bits"
    assert shown([HUGE]) == "a list with an integer too long to be shown"


DRAWN = "regex parse error:\n    {}\n    {}\nerror: {}"


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            DRAWN.format("[0-9", "^", "unclosed class"),
            "unclosed class at character 1 of '[0-9'",
        ),
        (
            DRAWN.format("é a(", "   ^", "unclosed group"),
            "unclosed group at character 4 of 'é a('",
        ),
        (
            DRAWN.format("a{2,1}", " ^^^^^", "bad count"),
            "bad count at character 2 of 'a{2,1}'",
        ),
        (
            DRAWN.format("x" * 500 + "(", " " * 500 + "^", "open"),
            "open at character 501 of 'xxxxxxxxxxxx...xxxxxxxxxxxx('",
        ),
        (
            'at 1(8): invalid regex "(" (in regex): '
            + DRAWN.format("(", "^", "open")
            + "\n   1 | start: /(/\n        ^\n",
            "line 1, character 8: open at character 1 of '('",
        ),
        (
            'at 2(4): unknown name: "b"\n   1 | start: a\n   2 | a: b\n          ^\n',
            'line 2, character 4: unknown name: "b"',
        ),
        ("1(10): lexer error\n  1 | start\n      ^", "line 1, character 10: lexer error"),
        ("no start rule found", "no start rule found"),
        ("one\n  two\n\n", "one two"),
        ("a ^ b", "a ^ b"),
    ],
)
def test_an_error_drawn_over_several_lines_is_one_that_says_where(
    said: str, line: str
) -> None:
    assert one_line(said) == line


@pytest.mark.parametrize(
    "call",
    [
        lambda value: integer("x", value, low=0, high=9),
        lambda value: number("x", value, low=0, high=1),
        lambda value: choice("x", value, ["a"]),
        lambda value: text("x", [value]),  # type: ignore[arg-type]
        lambda value: text("x", value + "\ud800"),
        lambda value: SamplingParams(ignore_eos=value),
    ],
)
def test_a_refusal_repeats_little_of_a_large_value(call: Callable[[str], object]) -> None:
    with pytest.raises(UserError) as caught:
        call("x" * 1_000_000)
    assert len(str(caught.value)) < 200

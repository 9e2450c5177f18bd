"""What cannot be used is told in one sentence, however long the number in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.errors import UserError, choice, integer, number, shown, text
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

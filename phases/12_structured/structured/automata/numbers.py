"""JSON numbers within bounds, as languages: compared digit by digit, the way people do it."""

from __future__ import annotations

from fractions import Fraction

from common.errors import UserError
from structured.automata.dfa import compile, product
from structured.automata.nodes import EMPTY, Alt, Automaton, Cat, Chars, Node, Repeat, literal, optional

DIGIT, NONZERO = Chars(((48, 57),)), Chars(((49, 57),))
DIGITS, ZEROS, POINT, MINUS = Repeat(DIGIT), Repeat(Chars(((48, 48),))), literal("."), literal("-")
WHOLE = Alt((literal("0"), Cat((NONZERO, DIGITS))))
FRACTION = Cat((POINT, DIGIT, DIGITS))
NO_FRACTION = Cat((POINT, literal("0"), ZEROS))
EXPONENT = Cat((Chars(((69, 69), (101, 101))), optional(Chars(((43, 43), (45, 45)))), DIGIT, DIGITS))
ANY_NUMBER = Cat((optional(MINUS), WHOLE, optional(FRACTION), optional(EXPONENT)))
ANY_INTEGER = Cat((optional(MINUS), WHOLE, optional(NO_FRACTION)))
"""With zeros behind the point a number is an integer still."""
MOST_DIGITS = 40


def between(
    low: Fraction | None, high: Fraction | None, open_low: bool, open_high: bool, whole: bool
) -> Node:
    """Numbers from `low` to `high`, either of which may be missing or excluded; without exponents.

    Raises:
        UserError: a bound has too many digits.
    """
    zero = Fraction(0)
    parts: list[Node] = []
    # Numbers without a sign, and those behind one, for which the bounds change sides.
    for sign, least, most, open_least, open_most in (
        (EMPTY, low, high, open_low, open_high),
        (MINUS, None if high is None else -high, None if low is None else -low, open_high, open_low),
    ):
        if most is not None and (most < 0 or (most == 0 and open_most)):
            continue
        language: Node = Cat((WHOLE, optional(NO_FRACTION if whole else FRACTION)))
        bounds = []
        if least is not None and (least > 0 or (least == 0 and open_least)):
            bounds.append(at_least(max(least, zero), open_least))
        if most is not None:
            bounds.append(at_most(most, open_most))
        if bounds:
            dfa = compile(language)
            for bound in bounds:
                dfa = product(dfa, compile(bound), lambda one, other: one and other)
            language = Automaton(dfa)
        parts.append(Cat((sign, language)))
    return Alt(tuple(parts))


def exactly(number: Fraction) -> Node:
    """One number, with or without zeros behind the point. Raises `UserError` if it has too many digits."""
    sign = optional(MINUS) if number == 0 else MINUS if number < 0 else EMPTY
    return Cat((sign, _equal(*spelled(abs(number)))))


def at_least(bound: Fraction, open_: bool) -> Node:
    """Numbers without sign that are not smaller than `bound`, or larger than it."""
    digits, behind = spelled(bound)
    larger: list[Node] = [Cat((*_some(NONZERO, 1), *_some(DIGIT, len(digits)), DIGITS, optional(FRACTION)))]
    for place, digit in enumerate(digits):  # the first digit that differs is larger
        rest = _some(DIGIT, len(digits) - place - 1)
        larger.append(Cat((literal(digits[:place]), _above(digit), *rest, optional(FRACTION))))
    for place, digit in enumerate(behind):
        larger.append(Cat((literal(f"{digits}.{behind[:place]}"), _above(digit), DIGITS)))
    after = Cat((literal(digits), POINT, literal(behind), ZEROS, NONZERO, DIGITS))  # equal, and then more
    parts = [*larger, after]
    if not open_:
        parts.append(_equal(digits, behind))
    return Alt(tuple(parts))


def at_most(bound: Fraction, open_: bool) -> Node:
    """Numbers without sign that are not larger than `bound`, or smaller than it."""
    digits, behind = spelled(bound)
    smaller: list[Node] = [Cat((*_some(DIGIT, count), optional(FRACTION))) for count in range(1, len(digits))]
    for place, digit in enumerate(digits):
        rest = _some(DIGIT, len(digits) - place - 1)
        smaller.append(Cat((literal(digits[:place]), _below(digit), *rest, optional(FRACTION))))
    for place, digit in enumerate(behind):
        smaller.append(Cat((literal(f"{digits}.{behind[:place]}"), _below(digit), DIGITS)))
        if behind[place:].strip("0"):  # what is left out is more than nothing
            smaller.append(literal(f"{digits}.{behind[:place]}" if place else digits))
    if not open_:
        smaller.append(_equal(digits, behind))
    return Alt(tuple(smaller))


def spelled(number: Fraction) -> tuple[str, str]:
    """The digits before and behind the point. Raises `UserError` for more than `MOST_DIGITS` behind it."""
    whole, rest = divmod(number, 1)
    behind = ""
    while rest and len(behind) <= MOST_DIGITS:
        digit, rest = divmod(rest * 10, 1)
        behind += str(digit)
    if len(behind) > MOST_DIGITS or len(str(whole)) > MOST_DIGITS:
        raise UserError(f"a bound has more than {MOST_DIGITS} digits")
    return str(whole), behind


def _equal(digits: str, behind: str) -> Node:
    zeros = Cat((POINT, literal(behind or "0"), ZEROS))
    return Cat((literal(digits), zeros if behind else optional(zeros)))


def _some(digit: Node, count: int) -> tuple[Node, ...]:
    return (digit,) * count


def _above(digit: str) -> Node:
    return Chars(((ord(digit) + 1, 57),)) if digit < "9" else Alt(())


def _below(digit: str) -> Node:
    return Chars(((48, ord(digit) - 1),)) if digit > "0" else Alt(())

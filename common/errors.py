"""Exceptions for errors that are no defect of the program, and checks of numbers, booleans and texts."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsFloat, SupportsIndex


class UserError(ValueError):
    """Raised for input that cannot be used, with one sentence that names the field, its value and the limit.

    The command line prints the sentence alone and exits with status 2; the server responds with status 400.
    Any other exception is a defect of the program and keeps its traceback.
    """


class NotANumber(ArithmeticError):
    """Raised for a request whose logits are NaN, so that no token can be chosen.

    Only this request ends. The cause is a wrong weight, scale or number format, which shows with this prompt.
    """


class EngineLost(RuntimeError):
    """Raised if a process or a device that an engine needs has ended, through no fault of the program.

    The command line prints the sentence alone and exits with status 1.
    """


LONGEST = 80
"""Characters of a value that an error repeats: a client may send megabytes."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = LONGEST


def shown(value: object) -> str:
    """Return `repr(value)` in at most `LONGEST` (80) characters: a part of long values is left out.

    An integer that Python refuses to print (more than 4,300 digits) is named by its size.
    """
    try:
        text = _REPR.repr(value)
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    except ValueError:
        if isinstance(value, int):
            return f"an integer of {value.bit_length()} bits"
        return f"a {type(value).__name__} with an integer too long to be shown"


def integer(
    name: str, value: SupportsIndex, *, low: int | None = None, high: int | None = None
) -> int:
    """Return `value`, which numpy may have made, as an int. low, high: limits, or None. name: for errors.

    Raises:
        UserError: it is no integer (nor is a bool: `max_tokens=True` is a mistake), or not in low .. high.
    """
    if low is None:
        limit = "an integer"
    else:
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
    kind = limit if low is None else f"an integer, {limit}"
    if isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}, but must be {kind}")
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name} is {shown(value)}, but must be {kind}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise UserError(f"{name} is {shown(number)}, but must be {limit}")
    return number


def number(
    name: str, value: SupportsFloat, *, low: float, high: float, above_low: bool = False
) -> float:
    """Return `value` as a float from `low` to `high`; with `above_low`, `low` itself is too small.

    Raises:
        UserError: it is no number (nor is a bool or a string), or out of these limits, as NaN always is.
    """
    limit = f"above {low:g} and at most" if above_low else f"between {low:g} and"
    limit = f"{limit} {high:g}"
    if isinstance(value, (bool, str, bytes)):  # float("0.7") would work, and hide a mistake
        raise UserError(f"{name} is {shown(value)}, but must be a number, {limit}")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} is {shown(value)}, but must be a number, {limit}") from None
    if not (low < found <= high if above_low else low <= found <= high):
        raise UserError(f"{name} is {found!r}, but must be {limit}")
    return found


def boolean(name: str, value: object) -> bool:
    """Return `value` if it is True or False. name: the field's, for error messages.

    Raises:
        UserError: the value is anything else, truthy or not: the string "no" is truthy.
    """
    if not isinstance(value, bool):
        raise UserError(f"{name} is {shown(value)}, but must be True or False")
    return value


def text(name: str, value: str) -> str:
    """Return `value` if it is a string that UTF-8 can encode. name: the field's, for error messages.

    Raises:
        UserError: the value is no string, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise UserError(f"{name} is {shown(value)}, but must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is {shown(value)}, but must have a UTF-8 form: {error.reason}"
        ) from None
    return value


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Return a context that turns any error of the tokenizers library into a `UserError` that names `what`.

    The library raises nothing more specific than Exception, and where its Rust code panics, for instance
    because a file contradicts itself, a BaseException that `except Exception` would let through.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # the user stops the program
        raise UserError(f"{what} cannot be used by the tokenizer ({error})") from None

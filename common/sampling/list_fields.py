"""Checks of the sampling parameters that are lists: stop strings, stop tokens, and biases of tokens.

Most requests have none of them, and each has a limit on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, SupportsIndex

from common.errors import UserError, integer, number, shown

MAX_INT = (1 << 31) - 1
"""Largest max_tokens, min_tokens, top_k and token id: far above any context and any vocabulary."""

MAX_LOGIT_BIAS = 100.0

MAX_STOPS = 64
"""Most stop strings: each is looked for in every new piece of text."""

MAX_STOP_CHARACTERS = 1024
"""Longest stop string: so much text may be held back."""

MAX_STOP_TOKEN_IDS = 1024
"""Most stop tokens: with min_tokens each is an edit of the logits in every step."""

MAX_BIASED_TOKENS = 1024
"""Most entries of logit_bias: each is an edit of the logits in every step."""


def _items(name: str, value: Iterable[Any], what: str, most: int) -> tuple[Any, ...]:
    """Return `value` as a tuple; raise `UserError` if it is not iterable or has more than `most` items.

    name, what: for errors, the field's name and what its items are.
    """
    try:
        items = tuple(islice(value, most + 1))
    except TypeError:
        raise UserError(f"{name} is {shown(value)}, but must be a list of {what}") from None
    if len(items) > most:
        raise UserError(
            f"{name} is a list of more than {most} {what}, but must have at most {most}"
        )
    return items


def check_stop_strings(value: Iterable[str]) -> tuple[str, ...]:
    """Return stop strings, given as one string or as several, as a tuple.

    Raises:
        UserError: there are more than 64, or one is empty, longer than 1,024 characters or no string.
    """
    # One string; taken as an iterable it would be a list of characters.
    if isinstance(value, str):
        value = (value,)
    strings = _items("stop", value, "strings", MAX_STOPS)
    for string in strings:
        if not isinstance(string, str):
            raise UserError(f"stop holds {shown(string)}, but must hold only strings")
        if not string:
            raise UserError("stop holds '', but each string must have at least 1 character")
        if len(string) > MAX_STOP_CHARACTERS:
            limit = f"at most {MAX_STOP_CHARACTERS}"
            raise UserError(
                f"stop holds {shown(string)} of {len(string)} characters, but each must have {limit}"
            )
    return strings


def check_token_ids(value: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return the stop tokens of a request as a tuple.

    Raises `UserError` for more than 1,024 of them, or an id that is not in 0 .. `MAX_INT` (2**31 - 1).
    """
    name = "stop_token_ids"
    items = _items(name, value, "token ids", MAX_STOP_TOKEN_IDS)
    return tuple(integer(name, item, low=0, high=MAX_INT) for item in items)


def check_logit_bias(value: Mapping[int, float]) -> dict[int, float]:
    """Return a copy of a map from token ids to biases.

    Raises:
        UserError: there are more than 1,024, or an id or a bias has a wrong type or is out of range: ids are
            0 to `MAX_INT` (2**31 - 1), biases -100 to 100.
    """
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias is {shown(value)}, but must map token ids to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        limit = f"at most {MAX_BIASED_TOKENS}"
        raise UserError(
            f"logit_bias is a map of {len(value)} token ids, but must have {limit}"
        )
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token = integer("logit_bias (a token id)", key, low=0, high=MAX_INT)
        checked[token] = number(
            f"logit_bias of token {token}", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS
        )
    return checked

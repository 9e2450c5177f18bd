"""Join turns of a conversation, for templates that do not take every order of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

Turn = dict[str, Any]
"""A message with its `role`."""


def join_turns(messages: Sequence[Turn]) -> list[Turn]:
    """Return a conversation with consecutive turns of one role joined, and system messages first.

    Consecutive messages of the role `tool` (results of tools) are not joined.
    """
    system = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    joined = list[Turn]()
    for role, turns in groupby([*system, *others], lambda message: message.get("role")):
        several = list(turns)
        joined += several if role == "tool" or len(several) == 1 else [_joined(several)]
    return joined


def _joined(turns: list[Turn]) -> Turn:
    found = defaultdict[str, list[Any]](list)
    for turn in turns:
        for name, value in turn.items():
            if value:
                found[name].append(value)
    made = {name: _concatenated(values) for name, values in found.items()}
    return {"content": ""} | made | {"role": turns[0].get("role")}


def _concatenated(values: list[Any]) -> Any:
    """Return `values` (texts, or lists of parts or tool calls) joined into one; of other types the last."""
    if all(isinstance(value, str) for value in values):
        return "\n\n".join(values)
    if not all(isinstance(value, str | list) for value in values):
        return values[-1]
    lists = [
        [{"type": "text", "text": value}] if isinstance(value, str) else value
        for value in values
    ]
    return list(chain.from_iterable(lists))

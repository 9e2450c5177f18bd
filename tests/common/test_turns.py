"""Turns that are joined for templates that want them to alternate."""

from __future__ import annotations

from typing import Any

from common.text.chat_template import count_characters
from common.text.turns import join_turns


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_turns_of_one_role_in_a_row_are_one() -> None:
    calls = [{"id": "1"}], [{"id": "2"}]
    turns = [
        said("user", "a"),
        said("user", [{"type": "text", "text": "b"}]),
        said("assistant", "c", reasoning_content="r"),
        said("assistant", None, tool_calls=calls[0], reasoning_content="s"),
        said("assistant", "", tool_calls=calls[1]),
        said("tool", "d"),
        said("tool", "e"),
    ]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert join_turns(turns) == [
        said("user", texts),
        said("assistant", "c", tool_calls=calls[0] + calls[1], reasoning_content="r\n\ns"),
        said("tool", "d"),
        said("tool", "e"),
    ]


def test_system_messages_come_first_and_are_one() -> None:
    turns = [said("user", "a"), said("system", "s"), said("user", "b"), said("system", "t")]
    assert join_turns(turns) == [said("system", "s\n\nt"), said("user", "a\n\nb")]
    alternating = [said("system", "s"), said("user", "a"), said("assistant", "b")]
    assert join_turns(alternating) == alternating


def test_all_texts_are_counted() -> None:
    assert (
        count_characters([said("user", "abc"), {"x": ["de", {"y": "f"}], "n": 3}]) == 4 + 3 + 3
    )

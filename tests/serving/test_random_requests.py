"""Requests drawn at random: a stream put together is the whole answer, and stop strings cut the text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.servers import Client, events
from tests.serving_kit import make_with_grammars as make_with_grammars
from tests.serving_kit import tokenizer as tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = ["hello", "the cat", "1 2 3", "日本", "🙂", "é", "{", "\n"]


def drawn(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route, and a request of it without stop strings."""
    said = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
    body: dict[str, Any] = {
        "max_tokens": rng.choice([0, 1, 5, 20, 40]),
        "n": rng.randint(1, 3),
    }
    body |= {"temperature": rng.choice([0, 1]), "seed": rng.randint(0, 9)}
    body |= {"return_token_ids": True, "ignore_eos": rng.random() < 0.3}
    if rng.random() < 0.2:
        body["repetition_penalty"] = 1.3
    if rng.random() < 0.2:
        body["guided_regex"] = rng.choice(["[a-cé]{1,9}", "(yes|no|日本語)+"])
    if rng.random() < 0.5:
        return CHAT, body | {"messages": [{"role": "user", "content": said}]}
    body["prompt"] = rng.choice([said, [said, "x"], [[1, 2, 3], [4]]])
    return TEXT, body | {"echo": rng.random() < 0.3}


def parts(choice: dict[str, Any]) -> tuple[str, str | None, list[int]]:
    """The text, reason and token ids of a choice, or of a chunk of one."""
    said = choice.get("message") or choice.get("delta") or choice
    text = said.get("content" if "text" not in choice else "text")
    return text or "", choice["finish_reason"], choice.get("token_ids", [])


async def whole(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Each choice of the answer, whose tokens are those of the usage."""
    status, found = await client.post(path, body)
    assert status == 200, found
    choices, usage = [parts(choice) for choice in found["choices"]], found["usage"]
    assert usage["completion_tokens"] == sum(len(ids) for _, _, ids in choices)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(len(ids) <= body["max_tokens"] for _, _, ids in choices)
    return choices


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The same of a stream, put together."""
    asked = await client.request(path, body | {"stream": True}).run()
    *chunks, done = events(b"".join(asked.chunks))
    assert done == "[DONE]"
    found: dict[int, Any] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        text, reason, ids = found.setdefault(choice["index"], ("", None, []))
        assert reason is None, "nothing comes behind the reason"
        more, reason, others = parts(choice)
        found[choice["index"]] = text + more, reason, ids + others
    return [found[index] for index in sorted(found)]


def cut(text: str, stops: list[str]) -> str:
    """The text up to the string that is completed first, and of several the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return text[: sum(min(ends))] if ends else text


@pytest.mark.parametrize("seed", range(8))
async def test_a_stream_and_stop_strings_give_what_the_whole_answer_has(make, seed):
    rng, client = random.Random(seed), Client(make())
    for _ in range(8):
        path, body = drawn(rng)
        told = await whole(client, path, body)
        assert await streamed(client, path, body) == told, json.dumps(body)
        text = told[0][0]
        if body.get("echo") or not text:
            continue
        places = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
        body["stop"] = [text[place : place + rng.randint(1, 5)] for place in places]
        stopped = await whole(client, path, body)
        assert await streamed(client, path, body) == stopped, json.dumps(body)
        for (full, reason, _), (short, ended, _) in zip(told, stopped, strict=True):
            assert short == cut(full, body["stop"]), json.dumps(body)
            assert ended == (reason if short == full else "stop"), json.dumps(body)

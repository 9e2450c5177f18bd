"""Answers and chunks as OpenAI's clients read them.

A chunk differs from the one before it in a few words, so all that surrounds them is made once a request.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import msgspec

from common.text.tokenizer import Tokenizer
from serving.completion import Choice, ChoiceGroup, Piece

_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage(group: ChoiceGroup) -> dict[str, Any]:
    """Return how many tokens a request has taken."""
    prompt = group.prompt_tokens
    output = group.output_tokens
    # A prompt's other completions take over what its first one has computed: that was in no cache.
    first = accumulate((order.params.n for order in group.orders[:-1]), initial=0)
    cached = sum(group.choices[place].cached for place in first)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


class Answer:
    """The answer to one request; subclasses know the shapes of their route.

    usage, continuous: whether the last chunk, or each, tells how many tokens were taken.
    """

    object = ""
    chunk_object = ""

    def __init__(
        self, id: str, model: str, tokenizer: Tokenizer, *, usage: bool = False, continuous: bool = False
    ) -> None:
        self.id, self.model, self.tokenizer = id, model, tokenizer
        self.usage, self.continuous = usage, continuous
        self.created = int(time.time())
        head = {"id": id, "object": self.chunk_object, "created": self.created, "model": model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":[{"index":'

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the events of a piece: its text, and why it was the last one."""
        raise NotImplementedError

    def shape(self, choice: Choice) -> dict[str, Any]:
        """Return a completion as a whole."""
        raise NotImplementedError

    async def body(self, group: ChoiceGroup, n: int) -> bytes:
        """Return the answer to a request that is not streamed, with `n` completions of each prompt."""
        return _json(self.whole(group, group.choices))

    def whole(self, group: ChoiceGroup, keep: list[Choice]) -> dict[str, Any]:
        """Return the same, before it is written as JSON."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [self.shape(choice) | {"index": index} for index, choice in enumerate(keep)],
            "usage": usage(group),
        }

    def end(self, group: ChoiceGroup) -> bytes:
        """Return what comes after the last chunk."""
        if not self.usage:
            return DONE
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        return b"data: " + _json(head | {"choices": [], "usage": usage(group)}) + b"\n\n" + DONE

    def _event(self, choice: Choice, body: bytes, reason: str | None) -> bytes:
        parts = [self._head, b"%d," % choice.index, body]
        parts.append(b',"finish_reason":"%s"}]' % reason.encode() if reason else b',"finish_reason":null}]')
        if self.continuous:
            parts += [b',"usage":', _json(usage(choice.group))]
        elif self.usage:
            parts.append(b',"usage":null')  # it is in the last chunk, and OpenAI's others say so
        parts.append(b"}\n\n")
        return b"".join(parts)


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    object = chunk_object = "text_completion"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        body = b'"text":' + _json(piece.text) + b',"logprobs":null'
        return self._event(choice, body, choice.reason if last else None)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        return {"text": choice.text, "logprobs": None, "finish_reason": choice.reason}


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`. The first chunk of a choice says who speaks, the last one why it ended."""
        deltas: list[dict[str, str]] = [] if choice.started else [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece.text}] if piece.text else []
        events = [
            self._event(choice, b'"delta":' + _json(delta) + b',"logprobs":null', None) for delta in deltas
        ]
        if last:
            events.append(self._event(choice, b'"delta":{},"logprobs":null', choice.reason))
        return b"".join(events)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": None, "finish_reason": choice.reason}

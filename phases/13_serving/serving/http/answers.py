"""Answers and chunks as OpenAI's clients read them.

A chunk differs from the one before it in a few words, so the rest is made once a request.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from common.text.tokenizer import Tokenizer
from serving.completion import Choice, ChoiceGroup, Piece
from serving.http.exchange import EVENTS
from serving.http.schema import Generation
from serving.messages import CACHED

_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage(group: ChoiceGroup) -> dict[str, Any]:
    """Return how many tokens a request has taken."""
    prompt, output = group.prompt_tokens, group.output_tokens
    cached = sum(sum(order.notes[CACHED]) for order in group.orders)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


class Answer:
    """The answer to one request of `/v1/completions`; subclasses know the shapes of other routes.

    headers: of a stream.
    usage, continuous: whether the last chunk, or each, tells how many tokens were taken.
    """

    object = chunk_object = "text_completion"
    headers = EVENTS

    def __init__(self, id: str, model: str, tokenizer: Tokenizer, request: Generation) -> None:
        self.id = id
        self.model = model
        self.tokenizer = tokenizer
        self.request = request
        options = request.stream_options
        self.usage = bool(options and options.include_usage)
        self.continuous = bool(options and options.continuous_usage_stats)
        self.created = int(time.time())
        self._head = {
            "id": id,
            "object": self.chunk_object,
            "created": self.created,
            "model": model,
        }
        self._before = b"data: " + _json(self._head)[:-1] + b',"choices":['

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return the events of a piece: its text, and why it was the last one."""
        fields = {"text": piece.text} | self.details(choice, piece)
        return self.event(choice, fields, choice.reason if last else None)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """Return a completion as a whole."""
        details = self.details(choice, Piece("", 0, len(choice.tokens)))
        return {"text": choice.text} | details | {"finish_reason": choice.reason}

    def details(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the fields beside the text of a piece, or of a whole completion."""
        return {"logprobs": None}

    async def body(self, group: ChoiceGroup) -> bytes:
        """Return the answer to a request that is not streamed."""
        return _json(self.whole(group))

    def whole(self, group: ChoiceGroup) -> dict[str, Any]:
        """Return the same before it is written as JSON."""
        return {
            **(self._head | {"object": self.object}),
            "choices": [
                self.shape(choice) | {"index": index}
                for index, choice in enumerate(group.choices)
            ],
            "usage": usage(group),
        }

    def end(self, group: ChoiceGroup) -> bytes:
        """Return what comes after the last chunk."""
        if not self.usage:
            return DONE
        return (
            b"data: "
            + _json(self._head | {"choices": [], "usage": usage(group)})
            + b"\n\n"
            + DONE
        )

    def event(
        self, choice: Choice, fields: dict[str, Any], reason: str | None = None
    ) -> bytes:
        """Return one event with these fields of a completion."""
        parts = [
            self._before,
            _json({"index": choice.index} | fields | {"finish_reason": reason}),
            b"]",
        ]
        if self.continuous:
            parts += [b',"usage":', _json(usage(choice.group))]
        elif self.usage:
            parts.append(
                b',"usage":null'
            )  # it is in the last chunk, and OpenAI's others say so
        parts.append(b"}\n\n")
        return b"".join(parts)

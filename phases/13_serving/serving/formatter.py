"""Format responses and chunks (events of a stream) as OpenAI's clients read them.

A request's chunks differ in their text, so the JSON around it is encoded once a request.
"""

from __future__ import annotations

import time
from typing import Any

from common.json_text import encode_json
from serving.completion import Choice, ChoiceGroup, Piece
from serving.http.request import EVENTS
from serving.messages import CACHED
from serving.parsed import ParsedRequest

DONE = b"data: [DONE]\n\n"
NOTHING: dict[str, Any] = {"logprobs": None}


def usage(group: ChoiceGroup) -> dict[str, Any]:
    """Return a response's `usage` object: counts of the tokens of a group of completions."""
    prompt, output = group.prompt_tokens, group.output_tokens
    cached = sum(max(choice.notes[CACHED], default=0) for choice in group.choices)
    thoughts = sum(c.reader.reasoning_tokens for c in group.choices if c.reader)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
    }


class ResponseFormatter:
    """Formats the response to one chat request, streamed or whole; its subclasses are for other routes.

    id: of the response. model: the served model's name. request: the parsed request.
    usage: whether a stream ends with a chunk of token counts.
    """

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    headers = EVENTS

    def __init__(self, id: str, model: str, request: ParsedRequest) -> None:
        self.request = request
        options = request.generation.stream_options
        self.usage = bool(options and options.include_usage)
        self._head = {
            "id": id,
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
        }
        self._before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
        # OpenAI's other chunks say null
        self._after = b'],"usage":null}\n\n' if self.usage else b"]}\n\n"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """Return a piece's events as bytes: the first one has the role, the last one the finish reason."""
        data, details = b"", self.details(choice, piece)
        if not piece.start:
            role = {"role": "assistant", "content": ""}
            data = self.event(choice, {"delta": role, **NOTHING})
        for delta in choice.deltas(piece.text, last):
            data += self.event(choice, {"delta": delta, **details})
            details = NOTHING  # the first event has its tokens
        if last or details != NOTHING:
            reason = choice.finish_reason if last else None
            data += self.event(choice, {"delta": {}, **details}, reason)
        return data

    def shape(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return `{"message": ...}` of a whole completion: role, `text` as content, and tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        for delta in choice.deltas(text, True):
            for name in delta.keys() - {"tool_calls"}:
                message[name] = message.get(name, "") + delta[name]
        if choice.reader and (calls := choice.reader.calls):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"message": message}

    def details(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the JSON fields beside the text of `piece`, part of `choice`, such as log-probabilities."""
        found = NOTHING
        for part in self.request.details:
            found = found | part(choice, piece)
        return found

    def body(self, group: ChoiceGroup) -> bytes:
        """Return the whole response, JSON as bytes, with all completions of `group`; it is not streamed."""
        choices = list[dict[str, Any]]()
        for choice in group.choices:
            piece = choice.take()
            fields = self.shape(choice, piece.text) | self.details(choice, piece)
            fields |= {"finish_reason": choice.finish_reason, "index": choice.index}
            choices.append(fields)
        whole = {"object": self.object, "choices": choices, "usage": usage(group)}
        return encode_json(self._head | whole)

    def end(self, group: ChoiceGroup) -> bytes:
        """Return the bytes of a stream's last events: token counts of `group` if wanted, and `[DONE]`."""
        if not self.usage:
            return DONE
        last = encode_json(self._head | {"choices": [], "usage": usage(group)})
        return b"data: " + last + b"\n\n" + DONE

    def event(
        self, choice: Choice, fields: dict[str, Any], reason: str | None = None
    ) -> bytes:
        """Return a server-sent event: `choice` with these `fields` of JSON, and `reason` if it has ended."""
        fields_json = encode_json({"index": choice.index, **fields, "finish_reason": reason})
        return self._before + fields_json + self._after

"""Answers and chunks as OpenAI's clients read them.

A chunk differs from the one before it in a few words, so all that surrounds them is made once a request.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from common.text.tokenizer import Tokenizer
from serving.completion import Call, Choice, Piece
from serving.messages import Token

_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage(call: Call) -> dict[str, Any]:
    """How many tokens a call has taken."""
    prompt = call.prompt_tokens
    output = call.output_tokens
    cached = sum(choice.cached for choice in call.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to a text, as far as that depends on nothing else."""
    found = tokenizer.token_bytes[token]
    if found is None:
        text: str = tokenizer.backend.decode([token], skip_special_tokens=False)
        return text.encode()
    return found


class Answer:
    """How one request is answered; subclasses know the shapes of their route.

    usage, continuous: whether the last chunk, or each, tells how many tokens were taken.
    ids: whether to send the tokens too.
    logprobs: whether what is known of them was asked for.
    """

    object = ""
    chunk_object = ""

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        usage: bool = False,
        continuous: bool = False,
        ids: bool = False,
        logprobs: bool = True,
    ) -> None:
        self.id, self.model, self.tokenizer = id, model, tokenizer
        self.usage, self.continuous, self.ids, self.logprobs = usage, continuous, ids, logprobs
        self.created = int(time.time())
        head = {"id": id, "object": self.chunk_object, "created": self.created, "model": model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":[{"index":'

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """The events of a piece: its text, and why it was the last one."""
        raise NotImplementedError

    def shape(self, choice: Choice) -> dict[str, Any]:
        """A completion as a whole."""
        raise NotImplementedError

    def whole(self, call: Call, keep: list[Choice]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [self.shape(choice) | {"index": index} for index, choice in enumerate(keep)],
            "usage": usage(call),
        }

    def end(self, call: Call) -> bytes:
        """What comes after the last chunk."""
        if not self.usage:
            return DONE
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        return b"data: " + _json(head | {"choices": [], "usage": usage(call)}) + b"\n\n" + DONE

    def _event(self, choice: Choice, body: bytes, piece: Piece, reason: str | None) -> bytes:
        parts = [self._head, b"%d," % choice.index, body]
        if self.ids:
            parts += [b',"token_ids":', _json(piece.tokens)]
        parts.append(b',"finish_reason":"%s"}]' % reason.encode() if reason else b',"finish_reason":null}]')
        if self.continuous:
            parts += [b',"usage":', _json(usage(choice.call))]
        parts.append(b"}\n\n")
        return b"".join(parts)


class CompletionAnswer(Answer):
    """`/v1/completions`."""

    object = chunk_object = "text_completion"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        text = piece.text if choice.started else choice.order.text + piece.text
        offset = choice.offset
        logprobs, choice.offset = self._logprobs(choice, piece.logprobs, offset)
        body = b'"text":' + _json(text) + b',"logprobs":' + (_json(logprobs) if logprobs else b"null")
        return self._event(choice, body, piece, choice.reason if last else None)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        found: dict[str, Any] = {
            "text": choice.order.text + choice.text,
            "logprobs": self._logprobs(choice, choice.logprobs, 0)[0] if self.logprobs else None,
            "finish_reason": choice.reason,
        }
        if self.ids:
            found |= {"token_ids": choice.tokens, "prompt_token_ids": choice.order.prompt}
        return found

    def _logprobs(self, choice: Choice, found: list[Token], offset: int) -> tuple[dict[str, Any] | None, int]:
        """The shape with four lists, and where the next token's text begins."""
        if not found:
            return None, offset
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in found:
            text = self._text(token.place)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(_finite(token.chosen))
            top = {self._text(other): _finite(value) for other, value in token.top}
            lists["top_logprobs"].append({text: _finite(token.chosen)} | top)
            lists["text_offset"].append(offset)
            offset += len(text)
        return lists, offset

    def _text(self, token: int) -> str:
        return token_bytes(self.tokenizer, token).decode("utf-8", "replace")


class ChatAnswer(Answer):
    """`/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`. The first chunk of a choice says who speaks, the last one why it ended."""
        events = []
        nothing = Piece("", [])
        if not choice.started:
            body = b'"delta":{"role":"assistant","content":""},"logprobs":null'
            events.append(self._event(choice, body, nothing, None))
        if piece.text or piece.logprobs or (self.ids and piece.tokens):
            logprobs = _json(self._logprobs(piece.logprobs)) if piece.logprobs else b"null"
            body = b'"delta":{"content":' + _json(piece.text) + b'},"logprobs":' + logprobs
            events.append(self._event(choice, body, piece, None))
        if last:
            events.append(self._event(choice, b'"delta":{},"logprobs":null', nothing, choice.reason))
        return b"".join(events)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        found: dict[str, Any] = {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
            "finish_reason": choice.reason,
        }
        if self.ids:
            found |= {"token_ids": choice.tokens, "prompt_token_ids": choice.order.prompt}
        return found

    def _logprobs(self, found: list[Token]) -> dict[str, Any]:
        return {
            "content": [
                self._one(token.place, token.chosen)
                | {"top_logprobs": [self._one(other, value) for other, value in token.top]}
                for token in found
            ]
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.tokenizer, token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


class GenerateAnswer(Answer):
    """`/generate`: text and nothing else."""

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        body: dict[str, Any] = {"text": piece.text}
        if self.ids:
            body["token_ids"] = piece.tokens
        if last:
            body["finish_reason"] = choice.reason
        return b"data: " + _json(body) + b"\n\n"

    def whole(self, call: Call, keep: list[Choice]) -> dict[str, Any]:
        """See `Answer`."""
        (choice,) = keep[:1]
        found = {"text": choice.text, "finish_reason": choice.reason, "usage": usage(call)}
        return found | ({"token_ids": choice.tokens} if self.ids else {})


def likeliest(call: Call, n: int) -> list[Choice]:
    """Of each prompt's completions the `n` whose tokens are the most likely on average, the best first."""
    keep, at = [], 0
    for order in call.orders:
        mine = call.choices[at : at + order.params.n]
        at += order.params.n
        if len(mine) > n:
            mine = sorted(mine, key=_mean, reverse=True)[:n]
        keep += mine
    return keep


def _mean(choice: Choice) -> float:
    return sum(token.chosen for token in choice.logprobs) / max(1, len(choice.logprobs))


def _finite(value: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what is all but impossible."""
    return max(value, -9999.0)

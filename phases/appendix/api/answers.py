"""Answers with log-probabilities, token ids, marks and calls of tools."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.text.tokenizer import Tokenizer
from phases.appendix.api.offsets import Offsets
from phases.appendix.tools.formats import CallFormat
from phases.appendix.tools.reader import CallReader
from serving.completion import Choice, ChoiceGroup, Order, Piece
from serving.http.answers import DONE, Answer, usage
from serving.messages import PromptToken, Token

_json = msgspec.json.Encoder().encode
LONG_ANSWER = 250
"""Tokens with log-probabilities in an answer above which it is long: each takes up to 40 us."""


@dataclass
class WideOrder(Order):
    """An order, and what its answer needs to know of it.

    text: what `echo` repeats; empty unless asked for.
    asked: the field that constrains the output, if one does.
    calls: how the model writes calls, if it may make any.
    loosened: keywords that the output need not follow.
    """

    text: str = ""
    asked: str = ""
    calls: CallFormat | None = None
    loosened: list[str] = field(default_factory=list)


def order_of(choice: Choice) -> WideOrder:
    """Return the order of a completion, which an endpoint of this appendix has made."""
    assert isinstance(choice.order, WideOrder)
    return choice.order


class WideAnswer(Answer):
    """An answer with more in it.

    ids, marks: whether to send the tokens too, and how they came about.
    logprobs: how many of the likeliest tokens were asked for at each place, or None; what a chat gives here
        does not matter.
    prompts: whether the log-probabilities of the prompt are told, as vLLM does.
    """

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        usage: bool = False,
        continuous: bool = False,
        ids: bool = False,
        marks: bool = False,
        logprobs: int | None = 0,
        prompts: bool = False,
    ) -> None:
        super().__init__(id, model, tokenizer, usage=usage, continuous=continuous)
        self.ids, self.marks, self.logprobs, self.prompts = ids, marks, logprobs, prompts
        self._offsets: dict[int, Offsets] = {}
        self._readers: dict[int, CallReader] = {}

    def offsets(self, choice: Choice) -> Offsets:
        """Return where the tokens of a completion begin in its text."""
        if choice.index not in self._offsets:
            start = len(order_of(choice).text)
            self._offsets[choice.index] = Offsets(self.tokenizer, start=start, begins=choice.begins)
        return self._offsets[choice.index]

    def detailed(self, choice: Choice, body: bytes, piece: Piece, reason: str | None) -> bytes:
        """Return an event with the tokens of a piece."""
        if self.ids:
            body += b',"token_ids":' + _json(piece.tokens)
        if self.marks:
            body += b',"token_marks":' + _json(piece.marks)
        return self._event(choice, body, reason)

    async def body(self, group: ChoiceGroup, n: int) -> bytes:
        """See `Answer`; the `n` completions are the likeliest ones.

        With log-probabilities of long prompts it takes seconds, and a thread, so that others do not wait.
        """

        def make() -> bytes:
            return _json(self.whole(group, likeliest(group, n)))

        told = [order.read for order in group.orders] + [choice.logprobs for choice in group.choices]
        return await asyncio.to_thread(make) if sum(map(len, told)) > LONG_ANSWER else make()

    def _prompt(self, order: Order) -> list[dict[str, Any] | None]:
        """vLLM's shape: for each token of the prompt but the first what was likely there, by token id."""
        return [self._place(*pair) for pair in zip(order.prompt, order.read, strict=True)]

    def _place(self, token: int, read: PromptToken | None) -> dict[str, Any] | None:
        if read is None:
            return None
        known = {other: (value, rank) for rank, (other, value) in enumerate(read.top, start=1)}
        known = {token: (read.chosen, read.rank)} | known
        return {
            str(other): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self.tokenizer.token_bytes[other].decode("utf-8", "replace"),
            }
            for other, (value, rank) in known.items()
        }


class WideCompletionAnswer(WideAnswer):
    """`/v1/completions`."""

    object = chunk_object = "text_completion"

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        text = piece.text if choice.started else order_of(choice).text + piece.text
        logprobs = self._logprobs(choice, piece.logprobs)
        body = b'"text":' + _json(text) + b',"logprobs":' + (_json(logprobs) if logprobs else b"null")
        return self.detailed(choice, body, piece, choice.reason if last else None)

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        found: dict[str, Any] = {
            "text": order_of(choice).text + choice.text,
            "logprobs": None if self.logprobs is None else self._logprobs(choice, choice.logprobs),
            "finish_reason": choice.reason,
        }
        if self.ids:
            found |= {"token_ids": choice.tokens, "prompt_token_ids": choice.order.prompt}
        if self.prompts:
            found["prompt_logprobs"] = self._prompt(choice.order)
        return found

    def _logprobs(self, choice: Choice, found: list[Token]) -> dict[str, Any] | None:
        """The shape with four lists; with `echo` the prompt first."""
        order, output = order_of(choice), self.offsets(choice)
        entries: list[tuple[int, PromptToken | Token | None, Offsets]] = []
        entries += ((one.place, one, output) for one in found)
        if order.text and not choice.started:
            prompt = Offsets(self.tokenizer, order.text)
            entries[:0] = [(*pair, prompt) for pair in zip(order.prompt, order.read, strict=False)]
        if not entries:
            return None
        lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, entry, offsets in entries:
            # Before the prompt's first token there is nothing.
            lists["token_logprobs"].append(None if entry is None else _finite(entry.chosen))
            lists["top_logprobs"].append(None if entry is None else self._top(token, entry, offsets))
            lists["tokens"].append(_text(offsets.spelled(token)))
            lists["text_offset"].append(offsets.take(token))
        return lists

    def _top(self, token: int, entry: PromptToken | Token, offsets: Offsets) -> dict[str, float]:
        """Log-probabilities by text; by id (as vLLM spells it) where another token looks the same."""
        own, top = _text(offsets.spelled(token)), dict[str, float]()
        for other, value in (*entry.top[: self.logprobs], (token, entry.chosen)):
            text = _text(offsets.spelled(other))
            taken = other != token and (text == own or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(value)
        return top


class WideChatAnswer(WideAnswer):
    """`/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def reader(self, choice: Choice) -> CallReader | None:
        """Return what finds calls in the text of a completion, if there may be any."""
        format = order_of(choice).calls
        if format is not None and choice.index not in self._readers:
            self._readers[choice.index] = CallReader(format)
        return self._readers.get(choice.index)

    def whole(self, group: ChoiceGroup, keep: list[Choice]) -> dict[str, Any]:
        """See `Answer`."""
        found = super().whole(group, keep)
        return found | ({"prompt_logprobs": self._prompt(group.orders[0])} if self.prompts else {})

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`. The first chunk of a choice says who speaks, the last one why it ended."""
        events = []
        nothing = Piece("", [])
        reason = choice.reason
        if not choice.started:
            body = b'"delta":{"role":"assistant","content":""},"logprobs":null'
            events.append(self.detailed(choice, body, nothing, None))
        reader = self.reader(choice)
        if reader is not None:
            events += self._calls(choice, reader, piece, last)
            reason = _reason(choice, reader)
        elif piece.text or piece.logprobs or (self.ids and piece.tokens):
            logprobs = _json(self._logprobs(choice, piece.logprobs)) if piece.logprobs else b"null"
            body = b'"delta":{"content":' + _json(piece.text) + b'},"logprobs":' + logprobs
            events.append(self.detailed(choice, body, piece, None))
        if last:
            events.append(self.detailed(choice, b'"delta":{},"logprobs":null', nothing, reason))
        return b"".join(events)

    def _calls(self, choice: Choice, reader: CallReader, piece: Piece, last: bool) -> list[bytes]:
        """Events of a piece that may hold calls, or parts of them."""
        news = reader.read(piece.text, last)
        deltas: list[dict[str, Any]] = [{"content": news.content}] if news.content else []
        for index, text, first in news.calls:
            call: dict[str, Any] = {"index": index, "function": {"arguments": text}}
            if first:
                made = reader.calls[index]
                call |= {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": ""}}
            deltas.append({"tool_calls": [call]})
        if not deltas and (piece.logprobs or (self.ids and piece.tokens)):
            deltas.append({})
        events = []
        for delta in deltas:
            logprobs = _json(self._logprobs(choice, piece.logprobs)) if piece.logprobs else b"null"
            events.append(
                self.detailed(choice, b'"delta":' + _json(delta) + b',"logprobs":' + logprobs, piece, None)
            )
            piece = Piece("", [])  # the first event has its tokens
        return events

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        reason = choice.reason
        reader = self.reader(choice)
        if reader is not None:
            news = reader.read(choice.text, True)
            reason = _reason(choice, reader)
            message["content"] = news.content  # a call that was cut before its name is neither
            if reader.calls:
                message["content"] = news.content or None
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in reader.calls
                ]
        found: dict[str, Any] = {
            "message": message,
            "logprobs": self._logprobs(choice, choice.logprobs) if choice.logprobs else None,
            "finish_reason": reason,
        }
        if self.ids:
            found |= {"token_ids": choice.tokens, "prompt_token_ids": choice.order.prompt}
        return found

    def _logprobs(self, choice: Choice, found: list[Token]) -> dict[str, Any]:
        content, offsets = list[dict[str, Any]](), self.offsets(choice)
        for token in found:
            top = [self._one(other, value, offsets) for other, value in token.top]
            content.append(self._one(token.place, token.chosen, offsets) | {"top_logprobs": top})
            offsets.take(token.place)
        return {"content": content}

    def _one(self, token: int, logprob: float, offsets: Offsets) -> dict[str, Any]:
        """Special tokens have no bytes: those of all tokens together are the content's."""
        data = offsets.spelled(token)
        added = b"" if token in self.tokenizer.special_ids else data
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(added)}


class GenerateAnswer(WideAnswer):
    """`/generate`: text and nothing else."""

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`."""
        body: dict[str, Any] = {"text": piece.text}
        if self.ids:
            body["token_ids"] = piece.tokens
        if self.marks:
            body["token_marks"] = piece.marks
        if last:
            body["finish_reason"] = choice.reason
        if self.continuous:
            body["usage"] = usage(choice.group)
        return b"data: " + _json(body) + b"\n\n"

    def end(self, group: ChoiceGroup) -> bytes:
        """See `Answer`."""
        return (b"data: " + _json({"usage": usage(group)}) + b"\n\n" if self.usage else b"") + DONE

    def whole(self, group: ChoiceGroup, keep: list[Choice]) -> dict[str, Any]:
        """See `Answer`."""
        (choice,) = keep[:1]
        found = {"text": choice.text, "finish_reason": choice.reason, "usage": usage(group)}
        return found | ({"token_ids": choice.tokens} if self.ids else {})


def likeliest(group: ChoiceGroup, n: int) -> list[Choice]:
    """Of each prompt's completions the `n` whose tokens are the most likely on average, the best first."""
    keep, at = [], 0
    for order in group.orders:
        mine = group.choices[at : at + order.params.n]
        at += order.params.n
        if len(mine) > n:
            mine = sorted(mine, key=_mean, reverse=True)[:n]
        keep += mine
    return keep


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _reason(choice: Choice, reader: CallReader) -> str | None:
    return "tool_calls" if choice.reason == "stop" and reader.complete else choice.reason


def _mean(choice: Choice) -> float:
    return sum(token.chosen for token in choice.logprobs) / max(1, len(choice.logprobs))


def _finite(value: float) -> float:
    """JSON has no infinity and no NaN; OpenAI says -9999 for what is all but impossible."""
    return max(-9999.0, value)  # in this order it is no NaN

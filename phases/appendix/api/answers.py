"""Answers with log-probabilities, token ids, marks and calls of tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Any

import msgspec

from common.events import Logprob
from common.text.tokenizer import Tokenizer
from phases.appendix.api.reasoning import ReasoningReader
from phases.appendix.tools.formats import CallFormat
from phases.appendix.tools.reader import CallReader
from serving.completion import Choice, ChoiceGroup, Order, Piece
from serving.http.answers import Answer


def spelled(tokenizer: Tokenizer, begins: bool, before: Iterable[int], token: int) -> bytes:
    """Return the bytes of an output's token as its text has them; they may be a part of a character.

    begins: see `Detokenizer.begins`.
    before: the tokens of the output before it.
    """
    known, special = tokenizer.token_bytes, tokenizer.special_ids
    first = (
        begins
        and token not in special
        and all(one in special or not known[one] for one in before)
    )
    return known.first(token) if first else known[token]


Spell = Callable[[int], bytes]
NOTHING = Piece("", 0, 0)
LONG_ANSWER = 250
"""Tokens with log-probabilities in an answer above which it is long: each takes up to 40 us."""


@dataclass
class WideOrder(Order):
    """An order, and what its answer needs to know of it.

    asked: the field that constrains the output, if one does.
    calls: how the model writes calls, if it may make any.
    reasons: whether its output begins within reasoning; None: none is split off. See `reasoning.opened`.
    loosened: keywords that the output need not follow.
    """

    asked: str = ""
    calls: CallFormat | None = None
    reasons: bool | None = None
    loosened: list[str] = field(default_factory=list)


class WideAnswer(Answer):
    """`/v1/completions`. request: with the fields of `Wide`, which say what the answer has."""

    request: Any

    def told(self, choice: Choice, piece: Piece) -> Iterator[tuple[int, Logprob, Spell]]:
        """Return the tokens of a piece, their log-probabilities if they were asked for, and a spelling."""
        for place in range(piece.start, min(piece.stop, len(choice.logprobs))):
            before = choice.tokens[:place] if choice.begins else []
            spell = partial(spelled, self.tokenizer, choice.begins, before)
            yield choice.tokens[place], choice.logprobs[place], spell

    def details(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """See `Answer`."""
        start, stop = piece.start, piece.stop
        made: dict[str, Any] = {"logprobs": self.logprobs(choice, piece)}
        if self.request.return_token_ids:
            made["token_ids"] = choice.tokens[start:stop]
            made |= {} if self.request.stream else {"prompt_token_ids": choice.order.prompt}
        if self.request.stream and self.request.return_token_marks:
            # Of several tokens that one step brought all but the last were drafts, and right.
            texts, times = (
                choice.texts[start:stop],
                [*choice.times[start : stop + 1], nan, nan],
            )
            found = zip(texts, times, times[1:], strict=False)
            made["token_marks"] = [
                (text, "draft" if now == then else "") for text, now, then in found if text
            ]
        return made

    async def body(self, group: ChoiceGroup) -> bytes:
        """See `Answer`.

        With log-probabilities of long outputs it takes a while, and a thread, so that others do not wait.
        """

        def make() -> bytes:
            return msgspec.json.encode(self.whole(group))

        told = sum(len(choice.logprobs) for choice in group.choices)
        return await asyncio.to_thread(make) if told > LONG_ANSWER else make()

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens as three lists."""
        if self.request.logprobs is None or piece.start == piece.stop:
            return None
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token, entry, spell in self.told(choice, piece):
            lists["token_logprobs"].append(_finite(entry.chosen))
            lists["top_logprobs"].append(self._top(token, entry, spell))
            lists["tokens"].append(_text(spell(token)))
        return lists if lists["tokens"] else None

    def _top(self, token: int, entry: Logprob, spell: Spell) -> dict[str, float]:
        """Log-probabilities by text; by id (as vLLM spells it) where another token looks the same."""
        own, top = _text(spell(token)), dict[str, float]()
        for other, value in (*entry.top[: self.request.logprobs], (token, entry.chosen)):
            text = _text(spell(other))
            taken = other != token and (text == own or text in top)
            top[f"token_id:{other}" if taken else text] = _finite(value)
        return top


class WideChatAnswer(WideAnswer):
    """`/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, id: str, model: str, tokenizer: Tokenizer, request: Any) -> None:
        super().__init__(id, model, tokenizer, request)
        self._readers: dict[int, tuple[ReasoningReader | None, CallReader | None]] = {}

    def readers(self, choice: Choice) -> tuple[ReasoningReader | None, CallReader | None]:
        """Return what finds reasoning and calls in the text of a completion, if there may be any."""
        if choice.index not in self._readers:
            order = choice.order
            assert isinstance(order, WideOrder)  # an endpoint of this appendix has made it
            trigger = "" if order.calls is None else order.calls.trigger
            self._readers[choice.index] = (
                None if order.reasons is None else ReasoningReader(order.reasons, trigger),
                None if order.calls is None else CallReader(order.calls),
            )
        return self._readers[choice.index]

    def reason(self, choice: Choice) -> str | None:
        """Return why a completion has ended."""
        _, calls = self.readers(choice)
        called = calls is not None and calls.complete and choice.reason == "stop"
        return "tool_calls" if called else choice.reason

    def chunk(self, choice: Choice, piece: Piece, last: bool) -> bytes:
        """See `Answer`. The first chunk of a choice has the role, the last one why it ended."""
        events = []
        if not piece.start:
            events.append(self.delta(choice, {"role": "assistant", "content": ""}, NOTHING))
        for delta in self.deltas(choice, piece, last):
            events.append(self.delta(choice, delta, piece))
            piece = NOTHING  # the first event has its tokens
        if last:
            events.append(self.delta(choice, {}, NOTHING, self.reason(choice)))
        return b"".join(events)

    def delta(
        self, choice: Choice, delta: dict[str, Any], piece: Piece, reason: str | None = None
    ) -> bytes:
        """Return one event: what it adds to the message, and the tokens of a piece."""
        return self.event(choice, {"delta": delta, **self.details(choice, piece)}, reason)

    def deltas(self, choice: Choice, piece: Piece, last: bool) -> list[dict[str, Any]]:
        """Return what a piece adds to the message: reasoning, text, calls, parts of them."""
        (reasoning, calls) = self.readers(choice)
        text = piece.text
        deltas = list[dict[str, Any]]()
        if reasoning is not None:
            thought, text = reasoning.read(text, last)
            deltas += [{"reasoning_content": thought}] if thought else []
        if calls is not None:
            deltas += calls.read(text, last)
        elif text:
            deltas.append({"content": text})
        if (
            deltas
            or piece.start == piece.stop
            or not (choice.logprobs or self.request.return_token_ids)
        ):
            return deltas
        return [
            {"content": ""} if calls is None and reasoning is None else {}
        ]  # its tokens are told

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        for delta in self.deltas(choice, Piece(choice.text, 0, 0), True):
            message |= {field: text for field, text in delta.items() if field != "tool_calls"}
        _, calls = self.readers(choice)
        if calls is not None and calls.calls:  # one that was cut before its name is none
            message["content"] = message["content"] or None
            message["tool_calls"] = calls.calls
        details = self.details(choice, Piece("", 0, len(choice.tokens)))
        return {"message": message} | details | {"finish_reason": self.reason(choice)}

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """Return an object for each token."""
        if not choice.logprobs:
            return None
        content = list[dict[str, Any]]()
        for token, logprob, spell in self.told(choice, piece):
            top = [self._one(other, value, spell) for other, value in logprob.top]
            content.append(self._one(token, logprob.chosen, spell) | {"top_logprobs": top})
        return {"content": content} if content else None

    def _one(self, token: int, logprob: float, spell: Spell) -> dict[str, Any]:
        """Special tokens have no bytes: those of all tokens together are the content's."""
        data = spell(token)
        added = b"" if token in self.tokenizer.special_ids else data
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(added)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(value: float) -> float:
    """JSON has no infinity and no NaN; OpenAI says -9999 for what is all but impossible."""
    return max(-9999.0, value)  # in this order it is no NaN

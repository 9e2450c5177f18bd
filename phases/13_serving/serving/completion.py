"""The completions that one HTTP request waits for, made into text, and the life of that request."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from common.events import FinishReason, Logprob
from common.http.errors import STATUS, ApiError, too_many
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from serving.http.request import ClientDisconnected, HttpRequest
from serving.parsed import ParsedRequest
from serving.seams import Delta

if TYPE_CHECKING:
    from serving.app import App

LONG_ANSWER = 250
"""Tokens of a prompt and its whole answer above which a thread writes it, so that no stream waits."""

OVERDUE = "the request was not done by its deadline, or within the server's --max-seconds"


class Piece(NamedTuple):
    """Text of a completion that is ready to be sent: that of its output tokens `start` to `stop - 1`."""

    text: str
    start: int
    stop: int


class Choice:
    """One of a request's completions: a `Sink` that makes text of tokens and looks for stop strings.

    group: all completions of the request. index: among them. prompt: its token ids, the `place`-th.
    tokens, texts: each token id, and what it adds to the text; perhaps one more text at the end.
    times, logprobs: when each token came, and log-probabilities of each if they were asked for.
    notes: the lists that the engine's observer has sent, by kind. sent: how many of `texts` were taken.
    reason: why it has ended, None until then. stream: makes the text.
    reader: finds reasoning and tool calls in the text; None: all of it is content.
    """

    def __init__(self, group: ChoiceGroup, index: int, tokenizer: Tokenizer) -> None:
        self.group = group
        self.index = index
        self.request = request = group.request
        self.place = index // request.params.n
        self.prompt = request.prompts[self.place]
        self.tokens = list[int]()
        self.texts = list[str]()
        self.logprobs = list[Logprob]()
        self.times = list[float]()
        self.notes = defaultdict[str, list[Any]](list)
        self.sent = 0
        self.reason: str | None = None
        self.reader = request.reader and request.reader()
        answer = self.reader.answer if self.reader else None
        self.stream = TextStream(
            tokenizer, request.params, self.prompt, request.shown, answer, request.mark
        )

    @property
    def finish_reason(self) -> str | None:
        """Return why the completion has ended, in the API's words, such as "tool_calls"; None: it has not."""
        called = self.reader and self.reader.complete
        return "tool_calls" if called and self.reason == "stop" else self.reason

    def note(self, kind: str, values: list[Any]) -> None:
        """Add `values`, extra data of the engine's observer, to the list `notes[kind]`. See `Sink.note`."""
        self.notes[kind].extend(values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """See `Sink.token`. A stop string ends the completion, and in the engine, too. With more than
        `most_unsent` unsent texts of a stream the group gives up ("slow"), and takes no more.
        """
        group = self.group
        self.times.append(group.engine.now)
        if self.request.prompt_only:
            self.end("length", "")
            return
        ended, text = self.stream.advance(token, cast("FinishReason | None", reason))
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.texts.append(text)  # last: a thread may be about to take it
        if ended is not None:
            self.reason = ended
            if reason is None:  # a stop string, which the engine does not look for
                group.engine.abort([group.numbers[self.index]])
        if group.streamed and len(self.texts) - self.sent > group.most_unsent:
            group.give_up("slow")
        else:
            group.hear(ended is not None)

    def end(self, reason: str, message: str) -> None:
        """See `Sink.end`; a failure ends the whole group."""
        if reason in STATUS:
            self.request.place = self.place
            self.group.give_up(reason, message)
            return
        self.texts.append(self.stream.advance(None, "length")[1])
        self.reason = "length" if reason == "abort" else reason
        self.group.hear(True)

    def take(self) -> Piece:
        """Return all unsent text as one piece, now sent. A thread may call this while tokens come."""
        start, self.sent = self.sent, len(self.texts)
        return Piece("".join(self.texts[start : self.sent]), start, self.sent)

    def deltas(self, text: str, last: bool) -> list[Delta]:
        """Return the message fields that new `text` adds; without a reader it is all `content`."""
        if self.reader:
            return self.reader.deltas(text, last)
        return [{"content": text}] if text else []


class ChoiceGroup:
    """The completions (`choices`) of one HTTP request; to make a group sends its prompts to the engine.

    numbers: the engine's, of each choice.
    most_unsent: unsent texts of a stream after which its reader counts as too slow.
    failure: why they cannot be completed (of `STATUS`, "slow", "left"), and a sentence; None until then.
    unsent: those of a stream whose end has not been sent. prompt_tokens: of all prompts.
    updated: set when a stream has text to send, and at the last end or a failure.
    """

    def __init__(self, app: App, request: ParsedRequest) -> None:
        self.engine = app.engine
        self.request = request
        self.streamed = bool(request.generation.stream)
        self.most_unsent = app.limits.max_unsent
        self.failure: tuple[str, str] | None = None
        self.prompt_tokens = sum(map(len, request.prompts))
        self.updated = asyncio.Event()
        self.left = len(request.prompts) * request.params.n
        self.choices = [Choice(self, index, app.model.tokenizer) for index in range(self.left)]
        self.unsent = [*self.choices]
        self.numbers = list[int]()
        params = request.params
        if params.stop:  # which is looked for here
            params = replace(params, stop=())
        for place, prompt in enumerate(request.prompts):
            mine = self.choices[place * params.n : (place + 1) * params.n]
            self.numbers += self.engine.submit(prompt, params, mine, **request.options)

    def hear(self, ended: bool) -> None:
        """Count a token of a completion, or its end (`ended`), and wake the task that waits for updates."""
        self.left -= ended
        if self.streamed or not self.left:
            self.updated.set()

    def give_up(self, failure: str, message: str = "") -> None:
        """Set `self.failure` to its kind and a sentence about it, and abort what has not ended."""
        if not self.failure and (self.left or failure in ("slow", "deadline")):
            self.failure = failure, message
        self.engine.abort(self.numbers)
        self.updated.set()

    async def listen_for_disconnect(self, http: HttpRequest) -> None:
        """Wait until the client of `http` has closed the connection, and abort the group then, as "left"."""
        await http.disconnected()
        self.give_up("left")

    def events(self) -> bytes:
        """Return the bytes of the events for all unsent text and ends, which count as sent from now on."""
        formatter, data = self.request.formatter, b""
        for choice in [*self.unsent]:
            last = choice.reason is not None
            if last or len(choice.texts) > choice.sent:
                data += formatter.chunk(choice, choice.take(), last)
            if last:
                self.unsent.remove(choice)
        return data if self.unsent else data + formatter.end(self)

    @property
    def output_tokens(self) -> int:
        """Return the number of output tokens so far; 0 if only the prompts matter (`prompt_only`)."""
        return sum(len(choice.tokens) for choice in self.choices)


async def serve(app: App, http: HttpRequest, request: ParsedRequest) -> None:
    """Run a request for tokens in the engine, and send its whole response, from admission to the last byte.

    However this function ends, completions that have not ended by then are aborted in the engine.

    Raises:
        ApiError: there are too many completions (400), no room (429), or they fail.
        ClientDisconnected: the client has left, or reads too slowly.
    """
    limits, in_flight = app.limits, app.engine.in_flight
    more = len(request.prompts) * request.params.n
    most = min(limits.max_requests, request.ready.max_rows + limits.max_queue)
    allowed = min(most, limits.max_choices)
    if more > allowed:  # it would be told to try again for ever
        raise too_many("n", more, allowed, "completions in all")
    if in_flight + more > most:
        words = f"{in_flight} completions are in flight, and the server takes at most {most}"
        raise ApiError(429, words, code="queue_full")
    http.extra += request.headers
    group = http.group = ChoiceGroup(app, request)
    leaving = asyncio.ensure_future(group.listen_for_disconnect(http))
    passed = time.perf_counter() - http.started
    try:
        async with asyncio.timeout(min(request.seconds, limits.max_seconds) - passed):
            await (_stream(http, group) if group.streamed else _answer(http, group))
    except TimeoutError:
        group.give_up("deadline", OVERDUE)
    except asyncio.CancelledError:  # a proxy may end a request so when its client leaves
        group.give_up("left")
        raise
    finally:
        leaving.cancel()
        app.engine.abort(group.numbers)
    if not group.failure:
        return
    kind, message = group.failure
    if kind in ("left", "slow"):
        raise ClientDisconnected
    if kind == "refused":
        raise request.refusal(message)
    raise ApiError(STATUS[kind], message, code=kind)


async def _answer(http: HttpRequest, group: ChoiceGroup) -> None:
    """Wait until all completions of a group have ended; send them as one response, unless they failed."""
    await group.updated.wait()  # at the last end, or a failure
    if group.failure:
        return
    write = group.request.formatter.body
    long = group.prompt_tokens + group.output_tokens > LONG_ANSWER
    body = await asyncio.to_thread(write, group) if long else write(group)
    await http.answer(200, body)


async def _stream(http: HttpRequest, group: ChoiceGroup) -> None:
    """Send the text of a group as server-sent events. Before the first token, errors have a status."""
    request = group.request
    while group.unsent:
        await group.updated.wait()
        group.updated.clear()
        if group.failure:
            return
        first = group.unsent[0]  # behind by more than a few tokens: its reader is slow
        long = request.details and (not http.status or len(first.texts) - first.sent > 8)
        data = await asyncio.to_thread(group.events) if long else group.events()
        if data:
            if not http.status:
                await http.start(200, request.formatter.headers)
            await http.write(data, more=bool(group.unsent))

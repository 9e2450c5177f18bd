"""The life of a request for tokens, from its admission to its last byte."""

from __future__ import annotations

import asyncio
import time

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup
from serving.http.errors import STATUS, ApiError, too_many, wrong
from serving.http.limits import Limits
from serving.http.request import ClientDisconnected, HttpRequest
from serving.messages import Ready
from serving.parsed import Formatter, ParsedRequest

RETRY_SECONDS = 1
LONG_ANSWER = 250
"""Tokens of a prompt and its whole answer above which a thread writes it, so that no stream waits."""


class Service:
    """Serves HTTP requests for tokens, from admission to the last byte.

    draining: no new ones are taken; those that run go on.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, limits: Limits) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.draining = False

    @property
    def state(self) -> str:
        """Return the engine's state, such as "ready", or "draining"."""
        return "draining" if self.draining else self.engine.state

    def ready(self) -> Ready:
        """Return what is known of the engine, if it takes requests now.

        Raises:
            ApiError: it does not.
        """
        if self.engine.ready is None or self.state != "ready":
            what = (
                "server is shutting down"
                if self.draining
                else f"engine is {self.state}; try again"
            )
            raise ApiError(503, f"the {what}", retry=RETRY_SECONDS, code=self.state)
        return self.engine.ready

    async def serve(self, http: HttpRequest, request: ParsedRequest, ready: Ready) -> None:
        """Admit a request for tokens, generate, and send the response.

        ready: what is known of the engine. However this function is left, the engine drops what is not
            finished.
        """
        self._admit(request, ready)
        group = ChoiceGroup(self.engine, self.tokenizer, request, self.limits.max_unsent)
        formatter = request.formatter
        leaving = asyncio.ensure_future(http.disconnected())
        leaving.add_done_callback(lambda _: group.give_up("left", "the client has left"))
        http.group = group
        try:
            group.submit(self._seconds(request, http.started))
            if group.streamed:
                await self._stream(http, group, formatter)
            else:
                await self._answer(http, group, formatter)
            if group.failure is not None:
                raise self._error(*group.failure, request)
        finally:
            leaving.cancel()
            group.close()

    async def _answer(
        self, http: HttpRequest, group: ChoiceGroup, formatter: Formatter
    ) -> None:
        """Send the whole response when all completions have ended."""
        while group.left and group.failure is None:
            await group.wait_for_updates()
        if group.failure is not None:
            return
        if group.prompt_tokens + group.output_tokens > LONG_ANSWER:
            body = await asyncio.to_thread(formatter.body, group)
        else:
            body = formatter.body(group)
        await http.answer(200, body)

    async def _stream(
        self, http: HttpRequest, group: ChoiceGroup, formatter: Formatter
    ) -> None:
        """Send events as text comes. Nothing is sent before the first token, so that errors have a status."""
        waiting = group.choices
        while waiting:
            await group.wait_for_updates()
            if group.failure is not None:
                return
            events = []
            for choice in waiting:
                if len(choice.texts) > choice.sent or choice.reason is not None:
                    events.append(
                        formatter.chunk(choice, choice.take(), choice.reason is not None)
                    )
            waiting = [choice for choice in waiting if choice.reason is None]
            if not waiting:
                events.append(formatter.end(group))
            data = b"".join(events)
            if data and not http.status:
                await http.start(200, formatter.headers)
            if data:
                await http.write(data, more=bool(waiting))

    def _error(
        self, kind: str, message: str, request: ParsedRequest
    ) -> ApiError | ClientDisconnected:
        """Return the error with which a failed request ends. kind: of the failure. message: a sentence
        about it.
        """
        if kind in ("left", "slow"):
            return ClientDisconnected()
        if kind == "refused":
            return request.refusal(message)
        return ApiError(
            STATUS[kind], message, retry=RETRY_SECONDS if kind == "died" else None, code=kind
        )

    def _admit(self, request: ParsedRequest, ready: Ready) -> None:
        """Raise `ApiError` if one more request would make too many completions in flight."""
        priority, more = request.generation.priority, len(request.prompts) * request.params.n
        if priority and ready.policy != "priority":
            words = (
                f"priority is {priority}, but must be 0: the server's policy is {ready.policy}"
            )
            raise wrong("priority", words)
        if more > self.limits.max_choices:
            raise too_many("n", more, self.limits.max_choices, "completions in all")
        most = min(self.limits.max_requests, ready.max_rows + self.limits.max_queue)
        if more > most:  # it would be told to try again for ever
            raise wrong(
                "n", f"the request is {more} completions, but the server takes at most {most}"
            )
        if (now := self.engine.in_flight) + more > most:
            words = f"{now} completions are in flight, and the server takes at most {most}"
            raise ApiError(429, words, retry=RETRY_SECONDS, code="queue_full")

    def _seconds(self, request: ParsedRequest, started: float) -> float:
        """Return the seconds that a request has left; the client's limit counts from its beginning."""
        deadline = request.generation.deadline_ms
        if deadline is None:
            return self.limits.max_seconds
        left = deadline / 1e3 - (time.perf_counter() - started)
        return min(max(0.0, left), self.limits.max_seconds)

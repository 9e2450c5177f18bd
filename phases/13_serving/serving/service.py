"""The life of a request for tokens, from its order to its last byte."""

from __future__ import annotations

import asyncio
import time

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup, Order
from serving.endpoints import Endpoint
from serving.http.answers import Answer
from serving.http.errors import STATUS, ApiError, too_many, wrong
from serving.http.exchange import Exchange, Gone
from serving.http.limits import Limits
from serving.http.schema import Generation
from serving.messages import Ready

RETRY_SECONDS = 1


class Service:
    """Serves requests for tokens.

    draining: no new ones are taken; those that run go on.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, limits: Limits) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.draining = False

    @property
    def state(self) -> str:
        """Return what the engine is, or "draining"."""
        return "draining" if self.draining else self.engine.state

    def ready(self) -> Ready:
        """Return what the engine is, if it takes requests now. Raises `ApiError` if not."""
        if self.engine.ready is None or self.state != "ready":
            what = (
                "server is shutting down"
                if self.draining
                else f"engine is {self.state}; try again"
            )
            raise ApiError(503, f"the {what}", retry=RETRY_SECONDS, code=self.state)
        return self.engine.ready

    async def serve(self, exchange: Exchange, endpoint: Endpoint, request: Generation) -> None:
        """The life of a request for tokens, from its order to its last byte.

        However this function is left, the engine has been told to drop what is not finished.
        """
        orders = await endpoint.orders(exchange, request, self.ready())
        answer, ready = (
            endpoint.answer(exchange, request),
            self.ready(),
        )  # it may have changed meanwhile
        stream, priority = bool(request.stream), request.priority or 0
        self._admit(sum(order.params.n for order in orders), priority, ready)
        group = ChoiceGroup(
            self.engine, self.tokenizer, orders, stream, self.limits.max_unsent
        )
        seconds = self._deadline(request, exchange.started)
        leaving = asyncio.ensure_future(exchange.gone())
        leaving.add_done_callback(lambda _: group.give_up("left", "the client has left"))
        exchange.group = group
        try:
            salt = request.cache_salt or ""
            group.send(priority=priority, salt=salt, seconds=seconds)
            if stream:
                await self._stream(exchange, group, answer)
            else:
                while group.left and group.trouble is None:
                    await group.news()
                if group.trouble is None:
                    await exchange.answer(200, await answer.body(group))
            if group.trouble is not None:
                raise self._error(*group.trouble, endpoint, request, orders[0])
        finally:
            leaving.cancel()
            group.close()

    async def _stream(self, exchange: Exchange, group: ChoiceGroup, answer: Answer) -> None:
        """Send events as they come. Before the first token nothing is sent, so that errors have a status."""
        waiting = group.choices
        while waiting:
            await group.news()
            if group.trouble is not None:
                return
            events = []
            for choice in waiting:
                if len(choice.texts) > choice.sent or choice.reason is not None:
                    events.append(
                        answer.chunk(choice, choice.take(), choice.reason is not None)
                    )
            waiting = [choice for choice in waiting if choice.reason is None]
            if not waiting:
                events.append(answer.end(group))
            data = b"".join(events)
            if data and not exchange.status:
                await exchange.start(200, answer.headers)
            if data:
                await exchange.write(data, more=bool(waiting))

    def _error(
        self, kind: str, message: str, endpoint: Endpoint, request: Generation, order: Order
    ) -> ApiError | Gone:
        """Return what a request in trouble ends with."""
        if kind in ("left", "slow"):
            return Gone()
        if kind == "refused":
            return endpoint.refusal(message, request, order)
        return ApiError(
            STATUS[kind], message, retry=RETRY_SECONDS if kind == "died" else None, code=kind
        )

    def _admit(self, more: int, priority: int, ready: Ready) -> None:
        """Raise `ApiError` where so many more completions are too many."""
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

    def _deadline(self, request: Generation, started: float) -> float:
        """Seconds that are left: the client's count from the beginning of the request."""
        if request.deadline_ms is None:
            return self.limits.max_seconds
        left = request.deadline_ms / 1e3 - (time.perf_counter() - started)
        return min(max(0.0, left), self.limits.max_seconds)

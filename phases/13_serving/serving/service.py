"""The life of a request for tokens, from its order to its last byte."""

from __future__ import annotations

import asyncio
import time

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup, Order
from serving.endpoints import B, Endpoint
from serving.http.answers import Answer
from serving.http.errors import STATUS, ApiError
from serving.http.exchange import EVENTS, Exchange, Gone
from serving.http.limits import Limits
from serving.http.schema import Generation
from serving.messages import Ready
from serving.metrics import Metrics

RETRY_SECONDS = 1


class Refused(Exception):
    """The engine does not take a request; its endpoint knows the names of the fields."""


class Service:
    """Serves requests for tokens.

    draining: no new ones are taken; those that run go on.
    traced: whether somebody wants to know how long requests are in line.
    """

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, limits: Limits, metrics: Metrics) -> None:
        self.engine, self.tokenizer, self.limits, self.metrics = engine, tokenizer, limits, metrics
        self.draining, self.traced = False, False

    def ready(self) -> Ready:
        """Return what the engine is, if it takes requests now. Raises `ApiError` if not."""
        ready = self.engine.ready
        if self.draining:
            raise ApiError(503, "the server is shutting down", retry=RETRY_SECONDS, code="draining")
        if ready is None or self.engine.state != "ready":
            raise ApiError(
                503,
                f"the engine is {self.engine.state}; try again",
                retry=RETRY_SECONDS,
                code=self.engine.state,
            )
        return ready

    async def serve(self, exchange: Exchange, endpoint: Endpoint[B], request: B, orders: list[Order]) -> None:
        """The life of a request for tokens, from its order to its last byte.

        However this function is left, the engine has been told to drop what is not finished.
        """
        answer = endpoint.answer(exchange, request)
        ready = self.ready()  # it may have changed while the prompt was read
        group = ChoiceGroup(
            self.engine,
            self.metrics,
            self.tokenizer,
            orders,
            streamed=bool(request.stream),
            most_unsent=self.limits.max_unsent,
        )
        self._admit(len(group.choices), request.priority or 0, ready)
        seconds = self._deadline(request, exchange.started)
        leaving = asyncio.ensure_future(exchange.gone())
        leaving.add_done_callback(lambda _: group.give_up("left", "the client has left"))
        exchange.group = group
        try:
            salt = request.cache_salt or ""
            group.send(priority=request.priority or 0, salt=salt, seconds=seconds, traced=self.traced)
            if request.stream:
                await self._stream(exchange, group, answer)
            else:
                while group.left and group.trouble is None:
                    await group.news()
                self._raise_trouble(group)
                await exchange.answer(200, await answer.body(group, request.n or 1))
        except Refused as error:
            raise endpoint.refusal(str(error), orders[0], request) from None
        finally:
            leaving.cancel()
            group.close()
            exchange.group, exchange.done = None, group
            self.metrics.ended(group)

    async def _stream(self, exchange: Exchange, group: ChoiceGroup, answer: Answer) -> None:
        """Send events as they come. Before the first token nothing is sent, so that errors have a status."""
        waiting = group.choices
        while True:
            await group.news()
            self._raise_trouble(group)
            events = []
            for choice in waiting:
                if choice.fresh or choice.reason is not None:
                    data = answer.chunk(choice, choice.take(), choice.reason is not None)
                    if data:
                        events.append(data)
                    choice.started = True
            if any(choice.reason is not None for choice in waiting):
                waiting = [choice for choice in waiting if choice.reason is None]
            if not events:
                continue
            if not exchange.status:
                await exchange.start(200, EVENTS)
            if not waiting:
                events.append(answer.end(group))
            await exchange.write(b"".join(events), more=bool(waiting))
            if not waiting:
                return

    def _raise_trouble(self, group: ChoiceGroup) -> None:
        if group.trouble is None:
            return
        kind, message = group.trouble
        if kind in ("left", "slow"):
            raise Gone
        if kind == "refused":
            raise Refused(message)
        raise ApiError(STATUS[kind], message, retry=RETRY_SECONDS if kind == "died" else None, code=kind)

    def _admit(self, more: int, priority: int, ready: Ready) -> None:
        """Raise `ApiError` where so many more completions are too many."""
        if priority and ready.policy != "priority":
            raise ApiError(
                400,
                f"priority is {priority}, but must be 0: the server's policy is {ready.policy}",
                param="priority",
            )
        most = min(self.limits.max_requests, ready.max_rows + self.limits.max_queue)
        if more > most:  # it would be told to try again for ever
            raise ApiError(
                400, f"the request is {more} completions, but the server takes at most {most}", param="n"
            )
        if self.engine.in_flight + more > most:
            raise ApiError(
                429,
                f"{self.engine.in_flight} completions are in flight, and the server takes at most {most}",
                retry=RETRY_SECONDS,
                code="queue_full",
            )

    def _deadline(self, request: Generation, started: float) -> float:
        """Seconds that are left: the client's count from the beginning of the request."""
        if request.deadline_ms is None:
            return self.limits.max_seconds
        left = request.deadline_ms / 1e3 - (time.perf_counter() - started)
        return min(max(0.0, left), self.limits.max_seconds)

"""The server's ASGI application: routes, keys, limits, and the life of a request for tokens.

Chunks go out as raw ASGI messages. A framework's streaming response costs twice the processor time for each
of them, and there is one for every token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup
from serving.endpoints import B, Chat, Completions, Endpoint
from serving.http.errors import ApiError
from serving.http.exchange import Exchange, Gone, Receive, Scope, Send, listed
from serving.http.limits import Limits
from serving.http.schema import Body, check_parts, decode
from serving.messages import Ready, StepReport
from serving.metrics import Metrics
from serving.prompts import Prompts
from serving.service import Service

log = logging.getLogger(__name__)

LARGE_BODY = 64 << 10
"""Bytes of a body whose parts are counted; a smaller one has no more than are allowed."""
Handler = Callable[[Exchange], Awaitable[None]]


class Extension:
    """Something that the appendix adds to an application; each method does nothing here."""

    def install(self, app: App) -> None:
        """Add routes, or take others' place."""

    async def before(self, exchange: Exchange) -> bool:
        """Look at a request before its route is, and tell if it is answered already."""
        return False

    def stepped(self, step: StepReport) -> None:
        """Read the report of a step."""

    def ended(self, exchange: Exchange) -> None:
        """Look at a request that has its answer, or has left."""

    def refused(self, status: int, client: str | None, reason: str) -> None:
        """Look at what never became a request."""

    def close(self) -> None:
        """Let go, after the last request."""


class App:
    """Answers HTTP requests with an engine.

    Args:
        model: the name that clients know it by.
        strict: refuse unknown fields, instead of naming them in the header `x-ladder-ignored`.
        metrics: what is counted.
        extensions: of the appendix.
        defaults: settings of requests that do not say; see `sampling_defaults`.

    closing: the server ends, and so must streams that have no end.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        model: str,
        *,
        limits: Limits | None = None,
        strict: bool = False,
        metrics: Metrics | None = None,
        extensions: Sequence[Extension] = (),
        defaults: Mapping[str, float] | None = None,
        version: str = "0",
    ) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.limits, self.strict, self.version = limits or Limits(), strict, version
        self.metrics = metrics or Metrics(model)
        self.prompts = Prompts(tokenizer, defaults or {})
        self.service = Service(engine, tokenizer, self.limits, self.metrics)
        self.started = int(time.time())
        self.exchanges: set[Exchange] = set()
        self.closing = False
        engine.on_step = self._stepped
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
        }
        self.add("/v1/completions", Completions(self.prompts, model, self.limits))
        self.add("/v1/chat/completions", Chat(self.prompts, model, self.limits))
        self.extensions = extensions
        for extension in extensions:
            extension.install(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self.limits)
        self.exchanges.add(exchange)
        try:
            try:
                await self._answer(exchange)
            except ApiError as error:
                if not error.close:
                    await exchange.drain()
                await exchange.fail(error)
        except Gone:
            exchange.status = exchange.status or 499
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("request %s failed", exchange.id, exc_info=error)
            await exchange.fail(ApiError(500, "the server has failed at this request; its log says why"))
        finally:
            self.exchanges.discard(exchange)
            self._tell(exchange)

    @property
    def groups(self) -> list[ChoiceGroup]:
        """Requests for tokens that are being answered."""
        return [exchange.group for exchange in self.exchanges if exchange.group is not None]

    async def _answer(self, exchange: Exchange) -> None:
        for extension in self.extensions:
            if await extension.before(exchange):
                return
        handlers, takes = self._handlers(exchange.path), self.takes(exchange.path)
        if exchange.method not in takes:
            exchange.extra.append((b"allow", ", ".join(takes).encode()))
            raise ApiError(405, f"{exchange.path} takes {', '.join(takes)}, not {exchange.method}")
        await handlers["GET" if exchange.method == "HEAD" else exchange.method](exchange)

    def takes(self, path: str) -> tuple[str, ...]:
        """Return the methods that a path takes. Raises `ApiError` if there is no such path."""
        handlers = self._handlers(path)
        return (*handlers, "HEAD") if "GET" in handlers else (*handlers,)

    def _handlers(self, path: str) -> dict[str, Handler]:
        if path.startswith("/v1/models/"):
            return {"GET": self._one_model}
        if path not in self.routes:
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        return self.routes[path]

    # Requests for tokens.

    def add(self, path: str, endpoint: Endpoint[B]) -> None:
        """Serve an endpoint at a path, in the place of any other."""

        async def handle(exchange: Exchange) -> None:
            request, ready = await self.begin(exchange, endpoint.body, endpoint.ignored)
            orders = await endpoint.orders(exchange, request, ready)
            await self.service.serve(exchange, endpoint, request, orders)

        self.routes[path] = {"POST": handle}

    async def begin(
        self, exchange: Exchange, kind: type[Body], ignored: Callable[[Body], list[str]] = lambda request: []
    ) -> tuple[Body, Ready]:
        """Read a request; raise `ApiError` if it cannot be taken now, or never.

        ignored: names what the request says in vain, beside unknown fields.
        """
        ready = self.service.ready()
        body = await exchange.body()
        if len(body) > LARGE_BODY:
            await asyncio.to_thread(check_parts, body, self.limits.max_parts)
        request, unknown = decode(kind, body)
        unknown += ignored(request)
        if unknown and self.strict:
            raise ApiError(400, f"{unknown[0][:100]!r} is no field of this request", param=unknown[0][:100])
        if unknown:
            exchange.extra.append((b"x-ladder-ignored", listed(unknown)))
        if request.model is not None and request.model != self.model:
            raise self._no_model(request.model, "model")
        return request, ready

    def _stepped(self, step: StepReport) -> None:
        self.metrics.stepped(step)
        for extension in self.extensions:
            extension.stepped(step)

    # Everything else.

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._model()]})

    async def _one_model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        if name != self.model:
            raise self._no_model(name[:200])
        await exchange.json(self._model())

    def _no_model(self, name: str, param: str | None = None) -> ApiError:
        words = f"model is {name!r}, but this is {self.model!r}"
        return ApiError(404, words, param=param, code="model_not_found")

    def _model(self) -> dict[str, Any]:
        found = {"id": self.model, "object": "model", "created": self.started, "owned_by": "inference-ladder"}
        if self.prompts.defaults:
            found["default_sampling_params"] = dict(self.prompts.defaults)
        ready = self.engine.ready
        return found | ({"max_model_len": ready.max_len} if ready else {})

    async def _health(self, exchange: Exchange) -> None:
        await exchange.json({"status": "alive"})

    async def _ready(self, exchange: Exchange) -> None:
        state = "draining" if self.service.draining else self.engine.state
        await exchange.json({"status": state}, 200 if state == "ready" else 503)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json({"version": self.version})

    async def _metrics(self, exchange: Exchange) -> None:
        engine, ready = self.engine, self.engine.ready
        text = self.metrics.text(
            engine.stats,
            blocks=ready.blocks if ready else 0,
            in_flight=engine.in_flight,
            restarts=engine.restarts,
            ready=engine.state == "ready" and not self.service.draining,
        )
        await exchange.answer(
            200, text.encode(), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        )

    # What is counted, and what extensions hear of.

    def refused(self, status: int, client: tuple[str, int] | None, reason: str) -> None:
        """Count what never became a request."""
        self.metrics.answers["other", status] += 1
        for extension in self.extensions:
            extension.refused(status, client[0] if client else None, reason)

    def _tell(self, exchange: Exchange) -> None:
        route = exchange.path if exchange.path in self.routes else "other"
        self.metrics.answers[route, exchange.status] += 1
        for extension in self.extensions:
            extension.ended(exchange)

    def close(self) -> None:
        """Let extensions go, after the last request."""
        for extension in self.extensions:
            extension.close()

"""The server's ASGI application: routes, and the life of a request around its answer.

Chunks go out as raw ASGI messages. A framework's streaming response costs twice the processor time for each
of them, and there is one for every token.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup
from serving.endpoints import Endpoint, Prompts
from serving.http.errors import ApiError
from serving.http.exchange import Exchange, Gone, Receive, Scope, Send
from serving.http.limits import Limits
from serving.http.schema import Body, Generation, decode
from serving.messages import Ready, StepReport
from serving.service import Service

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]


class Extension:
    """Something that the appendix adds to an application; each method does nothing here."""

    def install(self, app: App) -> None:
        """Add routes, or take others' place."""

    async def before(self, exchange: Exchange) -> bool:
        """Look at a request before its route is, and tell if it is answered already."""
        return False

    async def read(self, exchange: Exchange, kind: type, body: bytes) -> None:
        """Look at the body of a request of this kind before it is decoded. Raises `ApiError`."""

    def stepped(self, step: StepReport) -> None:
        """Read the report of a step."""

    def ended(self, exchange: Exchange) -> None:
        """Look at a request that has its answer, or has left."""


class App:
    """Answers HTTP requests with an engine.

    Args:
        model: the name that clients know it by.
        extensions: of the appendix.
        defaults: settings of requests that do not say; see `sampling_defaults`.

    bodies: the fields of requests, by route.
    closing: the server ends, and so must streams that have no end.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        model: str,
        *,
        limits: Limits | None = None,
        extensions: Sequence[Extension] = (),
        defaults: Mapping[str, float] | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.limits = limits or Limits()
        self.prompts = Prompts(tokenizer, defaults or {})
        self.service = Service(engine, tokenizer, self.limits)
        self.exchanges: set[Exchange] = set()
        self.closing = False
        self.extensions = extensions
        engine.on_step = self._stepped
        self.bodies: dict[str, type[Generation]] = {}
        self.routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": lambda exchange: exchange.json({"status": "alive"})},
            "/ready": {"GET": self._ready},
        }
        self.add("/v1/completions", Endpoint(self.prompts, model, self.limits))
        for extension in extensions:
            extension.install(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
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
        except Exception as error:
            log.error("request %s failed", exchange.id, exc_info=error)
            await exchange.fail(
                ApiError(500, "the server has failed at this request; its log says why")
            )
        finally:
            self.exchanges.discard(exchange)
            for extension in self.extensions:
                extension.ended(exchange)

    @property
    def groups(self) -> list[ChoiceGroup]:
        """Requests for tokens that are being answered."""
        return [exchange.group for exchange in self.exchanges if exchange.group is not None]

    async def _answer(self, exchange: Exchange) -> None:
        for extension in self.extensions:
            if await extension.before(exchange):
                return
        handlers = self.handlers(exchange.path)
        if exchange.method not in handlers:
            takes = ", ".join(handlers)
            exchange.extra.append((b"allow", takes.encode()))
            raise ApiError(405, f"{exchange.path} takes {takes}, not {exchange.method}")
        await handlers[exchange.method](exchange)

    def handlers(self, path: str) -> dict[str, Handler]:
        """Return the handlers of a path by their methods. Raises `ApiError` if there is no such path."""
        if path not in self.routes:
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        found = self.routes[path]
        return found | {"HEAD": found["GET"]} if "GET" in found else found

    # Requests for tokens.

    def add(self, path: str, endpoint: Endpoint) -> None:
        """Serve an endpoint at a path, in the place of any other."""

        async def handle(exchange: Exchange) -> None:
            exchange.form = endpoint.form
            request, _ = await self.begin(exchange, endpoint.body)
            await self.service.serve(exchange, endpoint.of(request), request)

        self.routes[path], self.bodies[path] = {"POST": handle}, endpoint.body

    async def begin(self, exchange: Exchange, kind: type[Body]) -> tuple[Body, Ready]:
        """Read a request; raise `ApiError` if it cannot be taken now, or never."""
        ready = self.service.ready()
        body = await exchange.body()
        for extension in self.extensions:
            await extension.read(exchange, kind, body)
        request = decode(kind, body)
        if request.model is not None and request.model != self.model:
            words = f"model is {request.model!r}, but this is {self.model!r}"
            raise ApiError(404, words, param="model", code="model_not_found")
        return request, ready

    def _stepped(self, step: StepReport) -> None:
        for extension in self.extensions:
            extension.stepped(step)

    # Everything else.

    async def _ready(self, exchange: Exchange) -> None:
        state = self.service.state
        await exchange.json({"status": state}, 200 if state == "ready" else 503)

"""The server's ASGI application: routes, hooks, and the reading of requests.

Chunks (events of a streamed response) go out as raw ASGI messages. A framework's streaming response costs
twice the processor time for each of them, and there is one for every token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from common.errors import UserError
from common.http.errors import ApiError, ErrorForm, not_found, wrong
from common.json_text import FieldError, decode_object
from common.text.tokenizer import LONG
from serving.client import EngineClient
from serving.completion import serve
from serving.endpoints import ChatEndpoint, ServedModel
from serving.http.request import ClientDisconnected, HttpRequest, Receive, Scope, Send
from serving.messages import Ready
from serving.parsed import ParsedRequest, listed
from serving.prompts import CompletionEndpoint
from serving.seams import Endpoint, FieldHandler
from serving.status import send_models, send_state

log = logging.getLogger(__name__)

Fields = dict[str, Any]
Route = Callable[[HttpRequest], Awaitable[None]]
T = TypeVar("T")


class App:
    """An ASGI application that serves HTTP requests with an engine.

    model: the model that is served, with the limits of requests.
    completion_handlers, chat_handlers: read further fields of the requests of these two routes.
    routes: handlers of HTTP requests, by path and method. endpoints: routes that generate tokens, by path.
    forms: JSON forms of errors, by the beginning of the path.
    before: hooks that get each HTTP request first, and return True if they have answered it.
    on_end: hooks that get each HTTP request when it has its answer, or its client has left.
    draining: no new requests for tokens are taken; those that run go on.
    closing: the server ends, and so must streams that have no end.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        *,
        completion_handlers: Sequence[FieldHandler] = (),
        chat_handlers: Sequence[FieldHandler] = (),
    ) -> None:
        self.engine = engine
        self.model = model
        self.limits = model.limits
        self.requests = set[HttpRequest]()
        self.draining = self.closing = False
        self.before = list[Callable[[HttpRequest], Awaitable[bool]]]()
        self.on_end = list[Callable[[HttpRequest], None]]()
        self.endpoints = dict[str, Endpoint]()
        self.forms = dict[str, ErrorForm]()
        self.routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": lambda http: http.json({"status": "alive"})},
            "/ready": {"GET": partial(send_state, self)},
            "/v1/models": {"GET": partial(send_models, self)},
            f"/v1/models/{model.name}": {"GET": partial(send_models, self)},
        }
        self.chat = ChatEndpoint(model, chat_handlers)
        self.add("/v1/completions", CompletionEndpoint(model, completion_handlers))
        self.add("/v1/chat/completions", self.chat)
        self._threads = ThreadPoolExecutor(2, "parse")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one HTTP request; an error becomes an error response."""
        http = HttpRequest(scope, receive, send, self.limits)
        self.requests.add(http)
        try:
            try:
                await self._answer(http)
            except ApiError as error:
                if error.status not in (408, 413):  # its body is not worth reading to its end
                    await http.drain()
                await http.fail(error)
        except ClientDisconnected:
            http.status = http.status or 499
        except Exception:
            log.exception("request %s failed", http.id)
            await http.fail(
                ApiError(500, "the server has failed at this request; its log says why")
            )
        finally:
            self.requests.discard(http)
            for hook in self.on_end:
                hook(http)

    async def _answer(self, http: HttpRequest) -> None:
        for beginning, form in self.forms.items():
            if http.path.startswith(beginning):
                http.form = form
        for hook in self.before:
            if await hook(http):
                return
        methods = self.methods(http.path)
        if http.method not in methods:
            takes = ", ".join(methods)
            http.extra.append((b"allow", takes.encode()))
            raise ApiError(405, f"{http.path} takes {takes}, not {http.method}")
        await methods[http.method](http)

    def methods(self, path: str) -> dict[str, Route]:
        """Return the handlers of a path, by HTTP method. Raises `ApiError` (404) if there is no such path."""
        if path not in self.routes:
            raise not_found(path, self.routes)
        found = self.routes[path]
        return found | {"HEAD": found["GET"]} if "GET" in found else found

    @property
    def state(self) -> str:
        """Return the engine's state, such as "ready", or "draining" while the server shuts down."""
        return "draining" if self.draining else self.engine.state

    def ready(self) -> Ready:
        """Return the engine's sizes, such as context length; `ApiError` (503) if it takes no requests."""
        if self.engine.ready is None or self.engine.state != "ready" or self.draining:
            raise ApiError(503, f"the engine is {self.state}; try again", code=self.state)
        return self.engine.ready

    def add(self, path: str, endpoint: Endpoint) -> None:
        """Serve POST requests at `path` by `endpoint`, a route that generates tokens."""
        self.endpoints[path] = endpoint
        self.forms[path] = endpoint.form
        self.routes[path] = {"POST": partial(self._tokens, endpoint)}

    async def _tokens(self, endpoint: Endpoint, http: HttpRequest) -> None:
        request = await self.read(http, endpoint, partial(self.parse, endpoint, http))
        await serve(self, http, request)

    def parse(
        self, endpoint: Endpoint, http: HttpRequest, fields: Fields, ready: Ready
    ) -> ParsedRequest:
        """Return an HTTP request for tokens, parsed and checked by its route; a header names all fields that
        nothing reads. See `Endpoint.parse`.
        """
        request = endpoint.parse(http, fields, ready)
        unknown = set(fields)
        for kind in endpoint.kinds:
            unknown.difference_update(kind.__struct_fields__)
        if ignored := request.ignored + sorted(unknown):
            request.headers.append((b"x-ladder-ignored", listed(ignored)))
        return request

    async def read(
        self, http: HttpRequest, endpoint: Endpoint, parse: Callable[[Fields, Ready], T]
    ) -> T:
        """Return what `parse` makes of the body of `http`, in a thread unless it is short, so that no stream
        waits. Raises `ApiError` if the request cannot be taken now, or never.

        endpoint: its route. parse: gets the decoded fields and the engine's sizes.
        """
        ready = self.ready()
        body = await http.body()

        def make() -> T:
            try:
                return parse(decode_object(body, self.limits.max_parts), ready)
            except UserError as error:
                field = error.field if isinstance(error, FieldError) else endpoint.source
                raise wrong(field, str(error)) from None

        if len(body) <= LONG and not endpoint.threaded:
            return make()
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

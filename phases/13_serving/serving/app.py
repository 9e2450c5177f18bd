"""The server's ASGI application: routes, and the life of a request around its answer.

Chunks go out as raw ASGI messages. A framework's streaming response costs twice the processor time for each
of them, and there is one for every token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from common.errors import UserError
from common.json_text import FieldError, decode_object
from common.text.tokenizer import LONG, Tokenizer
from serving.client import EngineClient
from serving.completion import ChoiceGroup
from serving.endpoints import ChatEndpoint, CompletionEndpoint, Endpoint, ServedModel
from serving.http.errors import ApiError, ErrorForm, wrong
from serving.http.limits import Limits
from serving.http.request import ClientDisconnected, HttpRequest, Receive, Scope, Send
from serving.messages import Ready, StepReport
from serving.parsed import FieldHandler, ParsedRequest
from serving.service import Service

log = logging.getLogger(__name__)

Route = Callable[[HttpRequest], Awaitable[None]]
T = TypeVar("T")


class App:
    """The ASGI application: serves HTTP requests with an engine.

    Args:
        model: the name that clients know it by.
        defaults: settings of requests that do not say; see `sampling_defaults`.
        completion_handlers, chat_handlers: read further fields of their requests.

    routes: the handlers of a path, by method.
    endpoints: the routes for tokens; their fields are known.
    forms: the forms of errors of paths that begin so.
    before: hooks that look at a request before its route does, and tell if they have answered it.
    on_step, on_end: hooks called with a step's report, and with a request that has its response or has left.
    closing: the server ends, and so must streams that have no end.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        model: str,
        *,
        limits: Limits | None = None,
        defaults: Mapping[str, float] | None = None,
        completion_handlers: Sequence[FieldHandler] = (),
        chat_handlers: Sequence[FieldHandler] = (),
    ) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        self.model = ServedModel(model, tokenizer, self.limits, defaults or {})
        self.service = Service(engine, tokenizer, self.limits)
        self.requests: set[HttpRequest] = set()
        self.closing = False
        self.forms: dict[str, ErrorForm] = {}
        self.before: list[Callable[[HttpRequest], Awaitable[bool]]] = []
        self.on_step: list[Callable[[StepReport], None]] = []
        self.on_end: list[Callable[[HttpRequest], None]] = []
        engine.on_step = self._stepped
        self.created = int(time.time())
        self.endpoints: dict[str, Endpoint] = {}
        self.routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": lambda http: http.json({"status": "alive"})},
            "/ready": {"GET": self._ready},
            "/v1/models": {"GET": self._models},
            f"/v1/models/{model}": {"GET": self._models},
        }
        self.add("/v1/completions", CompletionEndpoint(self.model, completion_handlers))
        self.chat = ChatEndpoint(self.model, chat_handlers)
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
                if not error.close:
                    await http.drain()
                await http.fail(error)
        except ClientDisconnected:
            http.status = http.status or 499
        except Exception as error:
            log.error("request %s failed", http.id, exc_info=error)
            await http.fail(
                ApiError(500, "the server has failed at this request; its log says why")
            )
        finally:
            self.requests.discard(http)
            for hook in self.on_end:
                hook(http)

    @property
    def groups(self) -> list[ChoiceGroup]:
        """Return the requests for tokens that are being served."""
        return [http.group for http in self.requests if http.group is not None]

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
        """Return the handler of a path, by method. Raises `ApiError` if there is no such path."""
        if path not in self.routes:
            raise ApiError(404, f"there is no {path[:100]!r} here", code="not_found")
        found = self.routes[path]
        return found | {"HEAD": found["GET"]} if "GET" in found else found

    # Requests for tokens.

    def add(self, path: str, endpoint: Endpoint) -> None:
        """Serve an endpoint at a path, by POST."""
        self.endpoints[path] = endpoint
        self.routes[path] = {"POST": partial(self._tokens, endpoint)}

    async def _tokens(self, endpoint: Endpoint, http: HttpRequest) -> None:
        http.form = endpoint.form
        parse = partial(self.parse, endpoint, http)
        request, ready = await self.read(
            http, parse, threaded=endpoint.threaded, source=endpoint.source
        )
        await self.generate(http, request, ready)

    def parse(
        self, endpoint: Endpoint, http: HttpRequest, fields: dict[str, Any], ready: Ready
    ) -> ParsedRequest:
        """Return an HTTP request for tokens, parsed and checked.

        fields: the decoded body. ready: what is known of the engine.

        Raises:
            ApiError: it cannot be served.
        """
        request = endpoint.parse(http, fields, ready)
        known = {name for kind in endpoint.kinds for name in kind.__struct_fields__}
        request.ignored += sorted(fields.keys() - known)
        return request

    async def generate(self, http: HttpRequest, request: ParsedRequest, ready: Ready) -> None:
        """Generate the tokens of a parsed request and send the response; ignored fields are named in a
        header.
        """
        http.extra += request.headers
        if request.ignored:
            http.extra.append((b"x-ladder-ignored", listed(request.ignored)))
        await self.service.serve(http, request, ready)

    async def read(
        self,
        http: HttpRequest,
        parse: Callable[[dict[str, Any], Ready], T],
        *,
        threaded: bool = False,
        source: str | None = None,
    ) -> tuple[T, Ready]:
        """Decode and parse a body; a thread does it unless it is short, so that no stream waits.

        parse: makes a value of the decoded fields and of what is known of the engine. threaded: always use
            a thread.
        source: the field that an error is about unless it names one.

        Returns:
            The value, and what is known of the engine.

        Raises:
            ApiError: the request cannot be taken now, or never.
        """
        ready = self.service.ready()
        body = await http.body()

        def make() -> T:
            try:
                fields = decode_object(body, self.limits.max_parts)
                return parse(fields, ready)
            except FieldError as error:
                raise wrong(error.field, str(error)) from None
            except UserError as error:
                raise wrong(source, str(error)) from None

        if len(body) <= LONG and not threaded:
            return make(), ready
        return await asyncio.get_running_loop().run_in_executor(self._threads, make), ready

    def _stepped(self, step: StepReport) -> None:
        for hook in self.on_step:
            hook(step)

    # Everything else.

    async def _ready(self, http: HttpRequest) -> None:
        state = self.service.state
        await http.json({"status": state}, 200 if state == "ready" else 503)

    async def _models(self, http: HttpRequest) -> None:
        """Send the served model, alone or in a list of one, once it takes requests."""
        ready = self.service.ready()
        card = {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "inference-ladder",
            "max_model_len": ready.max_len,
        }
        if self.model.defaults:
            card["default_sampling_params"] = dict(self.model.defaults)
        alone = http.path != "/v1/models"
        await http.json(card if alone else {"object": "list", "data": [card]})


def listed(names: list[str]) -> bytes:
    """Return the value of a header that lists these names, as many as fit."""
    text = ", ".join(name[:100] for name in names[:16]).encode("ascii", "replace")
    return bytes(byte if 32 <= byte < 127 else 63 for byte in text)

"""The server's ASGI application: routes, keys, limits, and the life of a request for tokens.

Chunks go out as raw ASGI messages. A framework's streaming response costs twice the processor time for each
of them, and there is one for every token.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from common.text.tokenizer import Tokenizer
from serving.client import EngineClient
from serving.completion import Call
from serving.http import origins
from serving.http.answers import Answer, ChatAnswer, CompletionAnswer, GenerateAnswer
from serving.http.errors import ApiError
from serving.http.exchange import EVENTS, Exchange, Gone, Receive, Scope, Send
from serving.http.hosts import ANY, check
from serving.http.limits import Limits
from serving.http.openapi import openapi
from serving.http.orders import Orders
from serving.http.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Generation,
    TokenizeRequest,
    check_parts,
    decode,
)
from serving.messages import Ready, Step
from serving.service import Service
from serving.watching.live import Live
from serving.watching.log import AccessLog
from serving.watching.metrics import Metrics
from serving.watching.traces import Traces

log = logging.getLogger(__name__)

OPEN = ("/health", "/ready")
"""Routes that need no key."""
PAGE = Path(__file__).parent / "page" / "index.html"
HTML = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
LARGE_BODY = 64 << 10
"""Bytes of a body whose parts are counted; a smaller one has no more than are allowed."""
Handler = Callable[[Exchange], Awaitable[None]]


class App:
    """Answers HTTP requests with an engine.

    Args:
        model: the name that clients know it by.
        keys: of which a client needs one; none: everybody may come in.
        strict: refuse unknown fields, instead of naming them in the header `x-ladder-ignored`.
        allowed_origins: whose web pages may read answers; see `origins`.
        hosts: names that the server answers to; see `hosts.names_of`.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        model: str,
        *,
        limits: Limits | None = None,
        keys: tuple[str, ...] = (),
        strict: bool = False,
        allowed_origins: tuple[str, ...] = (),
        hosts: frozenset[str] = frozenset({ANY}),
        access_log: str = "none",
        traces: Traces | None = None,
        version: str = "0",
    ) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.limits, self.strict, self.version = limits or Limits(), strict, version
        self.metrics = Metrics(model)
        self.log, self.traces = AccessLog(access_log, self.metrics), traces
        self.orders = Orders(tokenizer, self.limits)
        self.live = Live(engine)
        self.service = Service(engine, tokenizer, self.limits, self.metrics)
        self.service.traced = traces is not None
        self.started = int(time.time())
        self.exchanges: set[Exchange] = set()
        self.keys = [key.encode() for key in keys]
        self.allowed_origins, self.hosts = allowed_origins, hosts
        engine.on_step = self._stepped
        self.routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/generate": {"POST": self._generate},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
            "/events": {"GET": self._events},
            "/": {"GET": self._page},
        }

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
    def calls(self) -> list[Call]:
        """Requests for tokens that are being answered."""
        return [exchange.call for exchange in self.exchanges if exchange.call is not None]

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.path
        check(exchange, self.hosts)
        asked = False
        if self.allowed_origins:
            origins.permit(exchange, self.allowed_origins)
            asked = origins.asks(exchange)
        if path not in OPEN and not asked:
            self._check_key(exchange)
        handlers = self.routes.get(path)
        if handlers is None and path.startswith("/v1/models/"):
            handlers = {"GET": self._one_model}
        if handlers is None:
            raise ApiError(404, f"there is no {path[:200]!r} here", code="not_found")
        takes = (*handlers, "HEAD") if "GET" in handlers else (*handlers,)
        if asked:
            await origins.reply(exchange, takes)
            return
        if exchange.method not in takes:
            exchange.extra.append((b"allow", ", ".join(takes).encode()))
            raise ApiError(405, f"{path} takes {', '.join(takes)}, not {exchange.method}")
        await handlers["GET" if exchange.method == "HEAD" else exchange.method](exchange)

    def _check_key(self, exchange: Exchange) -> None:
        """Raise `ApiError` without a key. All keys are compared, each in constant time."""
        if not self.keys:
            return
        scheme, _, value = exchange.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic":  # a browser asks for a password, and sends it so
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except ValueError:
                value = b""
        elif scheme.lower() != b"bearer":
            value = b""
        if not sum(hmac.compare_digest(value.strip(), key) for key in self.keys):
            kind = b"Basic" if exchange.path == "/" else b"Bearer"
            exchange.extra.append((b"www-authenticate", kind + b' realm="ladder"'))
            raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")

    # Requests for tokens.

    async def _completions(self, exchange: Exchange) -> None:
        request, ready = await self._begin(exchange, CompletionRequest)
        orders = await self.orders.completion(request, ready)
        await self.service.serve(
            exchange, request, orders, self._shape(CompletionAnswer, exchange, request, "cmpl")
        )

    async def _chat(self, exchange: Exchange) -> None:
        request, ready = await self._begin(exchange, ChatRequest)
        orders = await self.orders.chat(request, ready)
        if orders[0].loosened:
            exchange.extra.append((b"x-ladder-loosened", _listed(orders[0].loosened)))
        await self.service.serve(
            exchange, request, orders, self._shape(ChatAnswer, exchange, request, "chatcmpl")
        )

    async def _generate(self, exchange: Exchange) -> None:
        request, ready = await self._begin(exchange, GenerateRequest)
        orders = await self.orders.completion(request, ready)
        await self.service.serve(
            exchange, request, orders, self._shape(GenerateAnswer, exchange, request, "gen")
        )

    async def _begin(self, exchange: Exchange, kind: type[Body]) -> tuple[Body, Ready]:
        """Read a request; raise `ApiError` if it cannot be taken now, or never."""
        ready = self.service.ready()
        request = await self._read(exchange, kind)
        name = getattr(request, "model", None)
        if name is not None and name != self.model:
            raise ApiError(
                404, f"model is {name!r}, but this is {self.model!r}", param="model", code="model_not_found"
            )
        return request, ready

    async def _read(self, exchange: Exchange, kind: type[Body]) -> Body:
        body = await exchange.body()
        if len(body) > LARGE_BODY:
            await asyncio.to_thread(check_parts, body, self.limits.max_parts)
        request, unknown = decode(kind, body)
        if isinstance(request, (ChatRequest, TokenizeRequest)):
            unknown += self.orders.ignored(request)
        if unknown and self.strict:
            raise ApiError(400, f"{unknown[0][:100]!r} is no field of this request", param=unknown[0][:100])
        if unknown:
            exchange.extra.append((b"x-ladder-ignored", _listed(unknown)))
        return request

    def _shape(self, kind: type[Answer], exchange: Exchange, request: Generation, prefix: str) -> Answer:
        options = request.stream_options
        if options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        return kind(
            f"{prefix}-{exchange.id.removeprefix('req-')}",
            self.model,
            self.tokenizer,
            usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
            ids=bool(request.return_token_ids),
            marks=bool(request.stream and request.return_token_marks),
            logprobs=getattr(request, "logprobs", None),  # `best_of` needs them for itself
            prompts=getattr(request, "prompt_logprobs", None) is not None,
        )

    def _stepped(self, step: Step) -> None:
        self.metrics.stepped(step)
        self.live.stepped(step)

    # Everything else.

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._model()]})

    async def _one_model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        if name != self.model:
            raise ApiError(
                404, f"model is {name[:200]!r}, but this is {self.model!r}", code="model_not_found"
            )
        await exchange.json(self._model())

    def _model(self) -> dict[str, Any]:
        found = {"id": self.model, "object": "model", "created": self.started, "owned_by": "inference-ladder"}
        ready = self.engine.ready
        return found | ({"max_model_len": ready.max_len} if ready else {})

    async def _tokenize(self, exchange: Exchange) -> None:
        request, ready = await self._begin(exchange, TokenizeRequest)
        ids = await self.orders.tokenize(request, ready)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": ready.max_len, "tokens": ids}
        if request.return_token_strs:
            found["token_strs"] = await self.orders.pieces(ids)
        await exchange.answer(200, await self.orders.json(found))

    async def _detokenize(self, exchange: Exchange) -> None:
        request, ready = await self._begin(exchange, DetokenizeRequest)
        await exchange.json({"prompt": await self.orders.decode(request.tokens, ready)})

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

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.json(openapi(self.version))

    async def _page(self, exchange: Exchange) -> None:
        await exchange.answer(200, PAGE.read_bytes(), HTML)

    async def _events(self, exchange: Exchange) -> None:
        if exchange.method == "HEAD":  # nothing follows the headers, and a stream would never end
            await exchange.start(200, EVENTS)
            await exchange.write(b"", more=False)
            return
        leaving = asyncio.ensure_future(exchange.gone())
        try:
            await self.live.show(exchange, leaving)
        finally:
            leaving.cancel()

    # What is counted and written down.

    def refused(self, status: int, client: tuple[str, int] | None, reason: str) -> None:
        """Count and write down what never became a request."""
        self.metrics.answers["other", status] += 1
        where = client[0] if client else None
        self.log.write({"time": now(), "client": where, "status": status, "error": reason}, limited=True)

    def _tell(self, exchange: Exchange) -> None:
        route = exchange.path if exchange.path in self.routes else "other"
        self.metrics.answers[route, exchange.status] += 1
        if self.traces is not None and exchange.done is not None:
            self.traces.tell(exchange, exchange.done)
        client = exchange.scope.get("client")
        self.log.write(
            {
                "time": now(),
                "id": exchange.id,
                "client": client[0] if client else None,
                "method": exchange.method,
                "path": exchange.path[:200],
                "status": exchange.status,
                "seconds": round(time.perf_counter() - exchange.started, 6),
                "bytes": exchange.sent_bytes,
                **exchange.facts,
            }
        )


def now() -> str:
    """Return the time as lines of the log have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _listed(names: list[str]) -> bytes:
    """Return the first names as the value of a header."""
    text = ", ".join(name[:100] for name in names[:16]).encode("ascii", "replace")
    return bytes(byte if 32 <= byte < 127 else 63 for byte in text)

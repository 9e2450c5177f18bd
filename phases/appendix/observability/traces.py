"""Traces for a collector: what a request waited for, as OpenTelemetry's spans.

Needs the extra `telemetry`; without `--traces` nothing of it is imported. Spans are made when a request has
ended, from times that were noted on the way, so a token costs nothing. Names of attributes are those of
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; a client's own trace goes on here
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from serving.app import App, Extension
from serving.completion import ChoiceGroup
from serving.http.exchange import Exchange
from serving.messages import CACHED, ENTERED

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_CARRIED = ("traceparent", "tracestate")


class Traces(Extension):
    """Tells a collector about requests for tokens.

    provider: an OpenTelemetry `TracerProvider`; its sampler has a say, and so has a client that says that its
        own trace is not kept.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model, self._api = provider, model, trace
        self._tracer = provider.get_tracer("inference-ladder")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, url: str, model: str) -> Traces:
        """Send them to a collector's address for OTLP over HTTP, in a thread of its own.

        Raises:
            UserError: the extra is not installed, or this is no address.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--traces is {url!r}, but must be like http://127.0.0.1:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise UserError(
                f"--traces needs {error.name}, which is not installed: "
                "python -m pip install -c constraints.txt -e '.[telemetry]'"
            ) from None
        provider = TracerProvider(resource=Resource.create({"service.name": "inference-ladder"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=2)))
        return cls(provider, model)

    def install(self, app: App) -> None:
        """Have the engine tell when a request got its row."""
        app.engine.wanted = (ENTERED,)

    def ended(self, exchange: Exchange) -> None:
        """Make the span of a request, and below it what it waited for: `queue`, `prefill`, `decode`."""
        group = exchange.group
        if group is None:
            return
        now, clock = time.time_ns(), time.perf_counter()

        def at(seconds: float) -> int:
            return now - int((clock - seconds) * 1e9)

        given = {name: exchange.headers.get(name.encode(), b"").decode("latin-1") for name in _CARRIED}
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.path}",
            context=self._propagator.extract({name: value for name, value in given.items() if value}),
            kind=self._api.SpanKind.SERVER,
            attributes=self._attributes(exchange, group),
            start_time=at(exchange.started),
        )
        within = self._api.set_span_in_context(span)
        entered = min((at for order in group.orders for at in order.notes[ENTERED]), default=None)
        first = group.first_token
        parts = [("queue", group.arrived, entered)]
        if entered is not None:
            parts.append(("prefill", entered, first))
        if entered is not None and first is not None:
            parts.append(("decode", first, None))
        for part, begin, end in parts:
            below = self._tracer.start_span(part, context=within, start_time=at(begin))
            below.end(at(clock if end is None else end))
        if group.trouble is not None or exchange.status >= 500:
            said = group.trouble[1] if group.trouble else f"status {exchange.status}"
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, said))
        span.end(at(clock))

    def close(self) -> None:
        """Send what is left; the provider does so by itself at the end of the process."""
        self._provider.shutdown()

    def _attributes(self, exchange: Exchange, group: ChoiceGroup) -> Mapping[str, Any]:
        params = group.orders[0].params
        found: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if "chat" in exchange.path else "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.choice.count": len(group.choices),
            "gen_ai.usage.input_tokens": group.prompt_tokens,
            "gen_ai.usage.output_tokens": group.output_tokens,
            "gen_ai.response.finish_reasons": [choice.reason or "none" for choice in group.choices],
            "http.request.method": exchange.method,
            "http.response.status_code": exchange.status,
            "url.path": exchange.path,
            "ladder.request.id": exchange.id,
            "ladder.cached_tokens": max(sum(order.notes[CACHED]) for order in group.orders),
        }
        if group.trouble is not None:
            found["error.type"] = group.trouble[0]
        return found

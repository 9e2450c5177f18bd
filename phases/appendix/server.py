"""The whole server: phase 13's with every entry that extends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.text.tokenizer import Tokenizer
from phases.appendix.access.hosts import ANY, Hosts
from phases.appendix.access.keys import Keys
from phases.appendix.access.origins import Origins
from phases.appendix.api.extension import Api
from phases.appendix.connections.connection import NEVER, Connection
from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from phases.appendix.observability.metrics import WholeMetrics
from phases.appendix.observability.traces import Traces
from serving.app import App, Extension
from serving.client import EngineClient
from serving.http.server import Server


def whole_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    model: str,
    *,
    hosts: frozenset[str] = frozenset({ANY}),
    allowed_origins: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    access_log: str = "none",
    traces: Traces | None = None,
    **server: Any,
) -> App:
    """Make the application that `ladder serve` runs.

    Args:
        hosts: names that the server answers to; see `hosts.names_of`.
        allowed_origins: whose web pages may read answers; see `origins`.
        keys: of which a client needs one; none: everybody may come in.
        access_log: a path, "-" for standard error, or "none".
        traces: where spans go, if anywhere.
        server: what `App` takes besides.
    """
    extensions: list[Extension] = [Hosts(hosts)]
    if allowed_origins:
        extensions.append(Origins(allowed_origins))
    extensions.append(Keys(keys))
    if traces is not None:
        extensions.append(traces)
    metrics = WholeMetrics(model)
    extensions += [AccessLog(access_log, metrics), Api(), Live()]
    return App(engine, tokenizer, model, metrics=metrics, extensions=extensions, **server)


def whole_server(app: App, on_ready: Callable[[], None] = lambda: None) -> Server:
    """Make the server that `ladder serve` runs."""
    return Server(app, on_ready, connection=Connection, keep_alive=NEVER)

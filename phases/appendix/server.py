"""The complete server: phase 13's HTTP server with every appendix entry that extends it."""

from __future__ import annotations

from collections.abc import Mapping

from common.http.limits import Limits
from common.text.tokenizer import Tokenizer
from phases.appendix.access.keys import ApiKeys
from phases.appendix.access.options import ANY
from phases.appendix.access.policy import AccessPolicy
from phases.appendix.api.extension import Document, chat_handlers, completion_handlers
from phases.appendix.embeddings.endpoint import Embeddings
from phases.appendix.observability.live import Live
from phases.appendix.observability.log import AccessLog
from phases.appendix.observability.metrics import Metrics
from phases.appendix.protocols.extension import add_protocols
from phases.appendix.protocols.ollama import add_ollama
from serving.app import App
from serving.client import EngineClient
from serving.endpoints import ServedModel


def whole_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    model: str,
    *,
    hosts: frozenset[str] = frozenset({ANY}),
    allowed_origins: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    access_log: str = "none",
    limits: Limits | None = None,
    defaults: Mapping[str, float] | None = None,
    version: str = "0",
) -> App:
    """Return the ASGI app of `ladder serve`: phase 13's with the appendix's routes and request fields.

    engine: the client by which the API process reaches the engine's process. model: its name, which clients
        see.
    hosts: names in the Host header that are accepted; `*`: any.
    allowed_origins: web origins, such as `https://example.org`, whose pages may read responses.
    keys: API keys of which a client must send one; none: no key is needed.
    access_log: a path, "-" for standard error, or "none". limits: on what a client may send; None: the
        defaults.
    defaults: sampling settings, by name, of requests that do not set them. version: of the server.
    """
    checked = limits or Limits()
    app = App(
        engine,
        ServedModel(model, tokenizer, checked, defaults or {}),
        completion_handlers=completion_handlers(tokenizer, checked),
        chat_handlers=chat_handlers(tokenizer, checked),
    )
    metrics = Metrics(app)
    AccessPolicy(app, hosts, allowed_origins)
    if keys:
        ApiKeys(app, keys)
    AccessLog(app, access_log, metrics)
    Live(app)
    add_protocols(app)
    app.add("/v1/embeddings", Embeddings(app.model, ours=True))
    add_ollama(app, "/api/embed", Embeddings(app.model, ours=False))
    Document(app, version)
    return app

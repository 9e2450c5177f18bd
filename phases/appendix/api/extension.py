"""The extension that installs the whole API, with a document that is made of the structs of its requests."""

from __future__ import annotations

import inspect
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from common.errors import UserError
from phases.appendix.api.endpoints import WideChat, WideCompletions, ignore
from phases.appendix.observability.live import HTML
from serving.app import App, Extension
from serving.http.exchange import Exchange

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


DOCS = Path(__file__).parent / "docs.html"


class Api(Extension):
    """Takes the place of the route for tokens, and adds chats, models, and the document.

    version: of the server.
    """

    def __init__(self, version: str) -> None:
        self.version, self.created = version, int(time.time())

    def install(self, app: App) -> None:
        """See `Extension`."""
        self.app = app
        with suppress(
            UserError
        ):  # where there is a template it is compiled now, not while others stream
            _ = app.prompts.tokenizer.chat_template
        app.add("/v1/completions", WideCompletions(app.prompts, app.model, app.limits))
        app.add("/v1/chat/completions", WideChat(app.prompts, app.model, app.limits))
        app.routes |= {
            "/v1/models": {"GET": self.models},
            f"/v1/models/{app.model}": {"GET": self.models},
            "/version": {"GET": lambda exchange: exchange.json({"version": self.version})},
            "/openapi.json": {"GET": lambda exchange: exchange.json(self.document)},
            "/docs": {"GET": lambda exchange: exchange.answer(200, DOCS.read_bytes(), HTML)},
            "/ping": app.routes["/health"],
        }

    @cached_property
    def document(self) -> dict[str, Any]:
        """The API as a document of OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
        routes, kinds = self.app.routes, self.app.bodies
        bodies, components = msgspec.json.schema_components(
            kinds.values(), ref_template="#/components/schemas/{name}"
        )
        answers = {
            "default": {
                "description": "the answer, or an object with what is wrong as `error`"
            }
        }
        paths: dict[str, Any] = {
            path: {"get": {"responses": answers}} for path in routes if "GET" in routes[path]
        }
        for (path, kind), body in zip(kinds.items(), bodies, strict=True):
            paths[path] = {
                "post": {
                    "summary": (inspect.getdoc(kind) or "").split("\n")[0],
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": body}},
                    },
                    "responses": answers,
                }
            }
        info = {"title": "Inference Ladder", "version": self.version}
        return {
            "openapi": "3.1.0",
            "info": info,
            "paths": paths,
            "components": {"schemas": components},
        }

    async def read(self, exchange: Exchange, kind: Any, body: bytes) -> None:
        """Find the fields of a body that its kind has not; what is no object is refused later."""
        with suppress(ValueError, RecursionError):
            ignore(exchange, sorted(_fields.decode(body).keys() - set(kind.__struct_fields__)))

    async def models(self, exchange: Exchange) -> None:
        """Answer with the model, alone or in a list of one."""
        card = {
            "id": self.app.model,
            "object": "model",
            "created": self.created,
            "owned_by": "inference-ladder",
        }
        if self.app.prompts.defaults:
            card["default_sampling_params"] = dict(self.app.prompts.defaults)
        if self.app.engine.ready is not None:
            card["max_model_len"] = self.app.engine.ready.max_len
        alone = exchange.path != "/v1/models"
        await exchange.json(card if alone else {"object": "list", "data": [card]})

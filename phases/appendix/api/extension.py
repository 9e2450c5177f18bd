"""Handlers of the appendix's request fields, and the OpenAPI document of all fields and routes."""

from __future__ import annotations

import inspect
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from common.http.limits import Limits
from common.text.tokenizer import Tokenizer
from phases.appendix.api.grammars import GrammarHandler
from phases.appendix.api.logprobs import ChatLogprobs, CompletionLogprobs, TokenIds
from phases.appendix.api.prefill import Prefill
from phases.appendix.api.reasoning import Reasoning
from phases.appendix.api.scheduling import SchedulingHandler
from phases.appendix.observability.live import HTML
from phases.appendix.tools.request import ToolHandler
from serving.app import App
from serving.seams import FieldHandler

DOCS = Path(__file__).parent / "docs.html"
REFERENCES = "#/components/schemas/{name}"


def completion_handlers(tokenizer: Tokenizer, limits: Limits) -> list[FieldHandler]:
    """Return the objects that handle the request fields which the appendix adds to `/v1/completions`.

    tokenizer: the model's. limits: the server's, such as the most bytes of a grammar.
    """
    return [
        SchedulingHandler(),
        GrammarHandler(limits),
        CompletionLogprobs(tokenizer),
        TokenIds(),
    ]


def chat_handlers(tokenizer: Tokenizer, limits: Limits) -> list[FieldHandler]:
    """Return the objects that handle the request fields which the appendix adds to chats.

    They read a request in the order of the list. tokenizer: the model's. limits: the server's, such as the
    most bytes of a grammar.
    """
    return [
        SchedulingHandler(),
        Prefill(),
        GrammarHandler(limits),
        ToolHandler(tokenizer, limits),
        ChatLogprobs(tokenizer),
        TokenIds(),
        Reasoning(tokenizer),  # compiles the template now, not while others stream
    ]


class Document:
    """The API of the server `app` as an OpenAPI 3.1 document and as an HTML page.

    It adds the routes `/openapi.json`, `/docs`, `/version` and `/ping`: https://spec.openapis.org/oas/v3.1.0.

    version: of the server.
    """

    def __init__(self, app: App, version: str) -> None:
        self.app = app
        self.version = version
        app.routes |= {
            "/version": {"GET": lambda http: http.json({"version": self.version})},
            "/openapi.json": {"GET": lambda http: http.json(self.document)},
            "/docs": {"GET": lambda http: http.answer(200, DOCS.read_bytes(), HTML)},
            "/ping": app.routes["/health"],
        }

    @cached_property
    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document as a dictionary that can be written as JSON.

        It lists every route; a route that generates tokens has a schema of all its request fields.
        """
        responses = {
            "default": {
                "description": "the answer, or an object with what is wrong as `error`"
            }
        }
        paths: dict[str, Any] = {
            path: {method.lower(): {"responses": responses} for method in methods}
            for path, methods in self.app.routes.items()
        }
        schemas: dict[str, Any] = {}
        for path, endpoint in self.app.endpoints.items():
            _, components = msgspec.json.schema_components(
                endpoint.kinds, ref_template=REFERENCES
            )
            schemas |= components
            parts = [components[kind.__name__] for kind in reversed(endpoint.kinds)]
            name = path.strip("/").replace("/", ".")  # OpenAPI allows no slash in it
            schemas[name] = {
                "type": "object",
                "properties": {
                    field: of for part in parts for field, of in part["properties"].items()
                },
                "required": [field for part in parts for field in part.get("required", [])],
            }
            body = {"schema": {"$ref": REFERENCES.format(name=name)}}
            paths[path]["post"] |= {
                "summary": (inspect.getdoc(endpoint.kinds[1]) or "").split("\n")[0],
                "requestBody": {"required": True, "content": {"application/json": body}},
            }
        info = {"title": "Inference Ladder", "version": self.version}
        return {
            "openapi": "3.1.0",
            "info": info,
            "paths": paths,
            "components": {"schemas": schemas},
        }

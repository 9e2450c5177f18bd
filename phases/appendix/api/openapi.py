"""The API as an OpenAPI document, made from the structs that requests are decoded with."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import msgspec

from serving.app import App, Extension
from serving.endpoints import Endpoint


class Documented(Extension):
    """An extension whose requests are in the document. bodies: their fields, by route."""

    def __init__(self) -> None:
        self.bodies: dict[str, type] = {}

    def add(self, app: App, path: str, endpoint: Endpoint) -> None:
        """Serve an endpoint at a path."""
        app.add(path, endpoint)
        self.bodies[path] = endpoint.body


@lru_cache(1)
def openapi(app: App, version: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    kinds_of: dict[str, type] = {}
    for extension in app.extensions:
        kinds_of |= extension.bodies if isinstance(extension, Documented) else {}
    bodies, components = msgspec.json.schema_components(
        kinds_of.values(), ref_template="#/components/schemas/{name}"
    )
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    }
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    kinds: dict[str, Any] = {"application/json": {}, "text/event-stream": {}, "text/plain": {}}
    answers = {
        "200": {"description": "the answer", "content": kinds},
        "default": {"description": "an error, or that the server is not ready", "content": error},
    }
    gets = [path for path, handlers in app.routes.items() if "GET" in handlers]
    paths: dict[str, Any] = {path: {"get": {"responses": answers}} for path in gets}
    for (path, kind), body in zip(kinds_of.items(), bodies, strict=True):
        paths[path] = {
            "post": {
                "summary": (inspect.getdoc(kind) or "").split("\n")[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": answers,
            }
        }
    info = {"title": "Inference Ladder", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}

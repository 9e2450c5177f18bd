"""The API as an OpenAPI document, made from the structs that requests are decoded with."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import msgspec

from phases.appendix.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

POSTS: dict[str, type] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = ("/v1/models", "/health", "/ready", "/version", "/metrics", "/openapi.json")


@lru_cache(1)
def openapi(version: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    bodies, components = msgspec.json.schema_components(
        POSTS.values(), ref_template="#/components/schemas/{name}"
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
    paths: dict[str, Any] = {path: {"get": {"responses": answers}} for path in GETS}
    for (path, kind), body in zip(POSTS.items(), bodies, strict=True):
        paths[path] = {
            "post": {
                "summary": (inspect.getdoc(kind) or "").split("\n")[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": answers,
            }
        }
    info = {"title": "Inference Ladder", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}

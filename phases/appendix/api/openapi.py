"""The API as an OpenAPI document, made from the structs that requests are decoded with."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import msgspec

from phases.appendix.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

POSTS: dict[str, type] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
GETS = ("/v1/models", "/health", "/ready", "/version", "/metrics", "/openapi.json")
ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504)


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
    failed = {
        str(status): {
            "description": "an error",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
        for status in ERRORS
    }
    kinds: dict[str, Any] = {"application/json": {}, "text/event-stream": {}, "text/plain": {}}
    done = {"200": {"description": "the answer", "content": kinds}}
    unready = {"503": {"description": "not ready", "content": {"application/json": {}}}}
    paths: dict[str, Any] = {
        path: {
            "post": {
                "summary": (inspect.getdoc(kind) or "").split("\n")[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
                "responses": done | failed,
            }
        }
        for (path, kind), body in zip(POSTS.items(), bodies, strict=True)
    }
    paths |= {path: {"get": {"responses": done | failed | unready}} for path in GETS}
    info = {"title": "Inference Ladder", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}

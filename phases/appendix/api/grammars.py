"""Constrained output: the fields that ask for it, and the `Grammar` of phase 12 that they become.

An engine without grammars refuses them when the request reaches it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.api.schema import Wide
from serving.http.errors import ApiError
from serving.http.limits import Limits

GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def constraint(request: Wide, limits: Limits) -> tuple[str, Any, str] | None:
    """Return the constraint: a kind (`json_object`, `json_schema`, `regex`, `choice`, `grammar`), its
    definition, and the field that asked; or None.

    Raises:
        ApiError: it is asked for twice, in no known form, or too large.
    """
    found = [
        (kind, getattr(request, field), field)
        for field, kind in GUIDED.items()
        if getattr(request, field) is not None
    ]
    for name, value in (request.structured_outputs or {}).items():
        if value is None:
            continue
        if name not in STRUCTURED:
            raise ApiError(
                400,
                f"structured_outputs has {name[:100]!r}, but may have {', '.join(STRUCTURED)}",
                param="structured_outputs",
            )
        found.append((STRUCTURED[name], value, "structured_outputs"))
    form = _of_format(request.response_format)
    if form is not None:
        found.append((*form, "response_format"))
    if not found:
        return None
    _, definition, field = found[0]
    if len(found) > 1:
        raise ApiError(
            400, f"{field} and {found[1][2]} both constrain the output, but only one may", param=field
        )
    size = len(msgspec.json.encode(definition))
    if size > limits.max_schema_bytes:
        raise ApiError(
            400, f"{field} has {size:,} bytes, but may have {limits.max_schema_bytes:,}", param=field
        )
    return found[0]


def _of_format(form: dict[str, Any] | None) -> tuple[str, Any] | None:
    """OpenAI's `response_format`, and the flat one with the schema beside the type."""
    if form is None:
        return None
    kind = form.get("type")
    if kind == "text":
        return None
    nested = form.get("json_schema")
    schema = (
        form.get("schema") if nested is None else nested.get("schema") if isinstance(nested, dict) else None
    )
    if schema is None and (kind == "json_object" or (kind == "json_schema" and isinstance(nested, dict))):
        return "json_object", {}
    if kind in ("json_schema", "json_object") and isinstance(schema, dict):
        return "json_schema", schema
    raise ApiError(
        400,
        "response_format must be of type text, json_object, or json_schema with a schema",
        param="response_format",
    )


def is_hint(request: Wide, found: tuple[str, Any, str]) -> bool:
    """Return True if a schema may be left where it cannot be followed: `response_format`, `strict` false."""
    nested = (request.response_format or {}).get("json_schema")
    strict = nested.get("strict") if isinstance(nested, dict) else None
    return found[2] == "response_format" and found[0] == "json_schema" and strict is False


def settings(found: tuple[str, Any, str] | None) -> dict[str, Any]:
    """Return the grammar for `SamplingParams`. Raises `ApiError` if it is no grammar."""
    if found is None:
        return {}
    kind, definition, field = found
    make = {
        "json_object": lambda _: Grammar.json_schema({"type": "object"}),
        "json_schema": Grammar.json_schema,
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.lark,
    }[kind]
    try:
        return {"grammar": make(definition)}
    except UserError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None

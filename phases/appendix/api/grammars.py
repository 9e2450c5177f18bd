"""Constrained output: the fields that ask for it, and the `Grammar` of phase 12 that they become.

An engine without grammars refuses them when the request reaches it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.api.schema import Wide
from phases.appendix.guidance.exact import exact
from serving.http.errors import too_many, wrong
from serving.http.limits import Limits

MAKERS = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""Of each kind of constraint: `structured_outputs` names it so, and `guided_` before it is a field."""


def grammar_of(request: Wide, limits: Limits) -> tuple[Grammar | None, str, list[str]]:
    """Return the grammar, the field that asked for it, and keywords of its schema that it does without.

    Raises:
        ApiError: it is asked for twice, in no known form, too large, or no grammar.
    """
    asked = [(f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in MAKERS]
    asked += [
        ("structured_outputs", *one) for one in (request.structured_outputs or {}).items()
    ]
    asked.append(("response_format", "json", schema_of(request)))
    found = [one for one in asked if one[2] is not None]
    if not found:
        return None, "", []
    field, kind, definition = found[0]
    if len(found) > 1:
        both = " and ".join(f"{name} ({kind})" for name, kind, _ in found[:2])
        raise wrong(field, f"{both} both constrain the output, but only one may")
    if kind not in MAKERS:
        raise wrong(field, f"{field} has {kind[:100]!r}, but may have {', '.join(MAKERS)}")
    size, loosened = len(msgspec.json.encode(definition)), list[str]()
    if size > limits.max_schema_bytes:
        raise too_many(field, size, limits.max_schema_bytes, "bytes")
    form = (request.response_format or {}).get("json_schema")
    if field == "response_format" and isinstance(form, dict) and form.get("strict") is False:
        definition = exact(
            definition, left=loosened
        )  # a hint, which is left where it cannot be followed
    try:
        return MAKERS[kind](definition), field, loosened
    except UserError as error:
        raise wrong(field, f"{field}: {error}") from None


def schema_of(request: Wide) -> dict[str, Any] | None:
    """Return the schema of `response_format`: OpenAI's, or the flat form with the schema beside the type."""
    form = request.response_format
    if form is None or form.get("type") == "text":
        return None
    kind, nested = form.get("type"), form.get("json_schema")
    inner = form if nested is None else nested
    schema = inner.get("schema") if isinstance(inner, dict) else ""
    if schema is None and (kind == "json_object" or nested is not None):
        schema = {"type": "object"}
    if kind not in ("json_schema", "json_object") or not isinstance(schema, dict):
        words = (
            "response_format must be of type text, json_object, or json_schema with a schema"
        )
        raise wrong("response_format", words)
    return schema

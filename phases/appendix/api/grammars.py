"""Constrained output: the request fields that ask for it, and the `Grammar` of phase 12 made of them.

An engine without grammars refuses such a request when it reaches the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from common.errors import UserError
from common.http.errors import check_count, wrong
from common.http.limits import Limits
from common.sampling.grammar import Grammar
from phases.appendix.guidance.exact import exact
from serving.parsed import ParsedRequest, listed

MAKERS = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.lark,
}
"""Of each kind of constraint: `structured_outputs` names it so, and `guided_` before it is a field."""
OPTIONS = {
    "disable_any_whitespace",
    "disable_additional_properties",
    "disable_fallback",
    "whitespace_pattern",
}
"""Keys of `structured_outputs` that only say how a grammar is to be made; vLLM's."""


class GrammarFields(Struct, kw_only=True):
    """Request fields that constrain the output: `response_format`, `structured_outputs` and `guided_...`."""

    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class GrammarHandler:
    """Reads the request fields that constrain the output, such as `response_format`, into a `Grammar`."""

    fields = GrammarFields
    names = frozenset(GrammarFields.__struct_fields__)

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def read(self, given: GrammarFields, request: ParsedRequest) -> None:
        """Set `request`'s grammar from the fields in `given`; do nothing if none of them is set.

        Keywords of a schema with `strict: false` that cannot be followed are left out and named in a response
        header.

        Raises:
            ApiError: the fields give two grammars, or one of an unknown form or too large.
        """
        asked = [(f"guided_{kind}", kind, getattr(given, f"guided_{kind}")) for kind in MAKERS]
        asked.append(("response_format", "json", schema_of(given.response_format)))
        for kind, value in (given.structured_outputs or {}).items():
            if kind in OPTIONS and value is not None:
                request.ignored.append(f"structured_outputs.{kind}")
            elif kind == "json_object":
                asked.append(
                    ("structured_outputs", "json", {"type": "object"} if value else None)
                )
            elif kind not in OPTIONS:
                asked.append(("structured_outputs", kind, value))
        found = [one for one in asked if one[2] is not None]
        if not found:
            return
        field, kind, definition = found[0]
        if len(found) > 1:
            both = " and ".join(f"{name} ({kind[:100]})" for name, kind, _ in found[:2])
            raise wrong(field, f"{both} both constrain the output, but only one may")
        if kind not in MAKERS:
            raise wrong(field, f"{field} has {kind[:100]!r}, but may have {', '.join(MAKERS)}")
        size = len(msgspec.json.encode(definition))
        check_count(field, size, self.limits.max_schema_bytes, "bytes")
        form = (given.response_format or {}).get("json_schema")
        if (
            field == "response_format"
            and isinstance(form, dict)
            and form.get("strict") is False
        ):
            left = list[str]()  # a hint, which is left where it cannot be followed
            definition = exact(definition, left=left)
            if left:
                loosen(request, left)
        try:
            request.sampling["grammar"] = MAKERS[kind](definition)
        except UserError as error:
            raise wrong(field, f"{field}: {error}") from None
        request.names["grammar"] = field
        request.constrained = True


def loosen(request: ParsedRequest, keywords: list[str]) -> None:
    """Add the response header that names schema `keywords` which the output does not have to follow."""
    request.headers.append((b"x-ladder-loosened", listed(keywords)))


def schema_of(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema in a `response_format`; None if there is no format, or its type is `text`.

    form: OpenAI's, with the schema under `json_schema`, or the flat form with the schema beside the type.
        Without a schema, `json_object` means `{"type": "object"}`.

    Raises:
        ApiError: the type is unknown, or the schema is missing or no object.
    """
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

"""Schemas of tools that are not strict: what cannot be enforced is left out, and named.

OpenAI takes any schema unless `strict` is true: without it a schema is a hint to the model. So one keyword
that no grammar knows must not refuse a conversation.
"""

from __future__ import annotations

from typing import Any

from phases.appendix.guidance.exact import NUMBERS, exact

ENFORCED = {
    *("type", "enum", "const", "anyOf", "allOf", "$ref", "$defs", "definitions", "properties", "required"),
    *("additionalProperties", "patternProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format", *NUMBERS),
}
FORMATS = ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
SILENT = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$anchor", "nullable", "discriminator", "xml", "externalDocs"),
    *("contentEncoding", "contentMediaType", "unevaluatedProperties"),
}
"""Keywords that ask for nothing a value could break; `unevaluatedProperties` is what grammars do anyway."""
_LOOKS = ("(?=", "(?!", "(?<", "\\1", "\\2", "\\b", "\\B", "\\p")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "items")


def loosen(schema: Any, where: str = "") -> tuple[Any, list[str]]:
    """Return a schema that every valid value still meets, and the keywords that it does without.

    Each is named by its place, as in `filter.pattern`. What asks for nothing is left out and not named.
    """
    if not isinstance(schema, dict):
        return (schema if isinstance(schema, bool) else {}), []
    made: dict[str, Any] = {}
    left: list[str] = []

    def inner(part: Any, name: str) -> Any:
        found, names = loosen(part, f"{where}{name}.")
        left.extend(names)
        return found

    for key, value in schema.items():
        if key in SILENT or key.startswith("x-") or value is None:
            continue
        if key == "oneOf" and isinstance(value, list) and "anyOf" not in schema:
            made["anyOf"] = [inner(part, f"oneOf.{place}") for place, part in enumerate(value)]
        elif key not in ENFORCED or not _can(key, value):
            left.append(where + key)
        elif key in _MAPS and isinstance(value, dict):
            prefix = "" if key == "properties" else f"{key}."
            made[key] = {name: inner(part, prefix + name) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [inner(part, f"{key}.{place}") for place, part in enumerate(value)]
        elif key in _SCHEMAS:
            made[key] = inner(value, key)
        else:
            made[key] = value
    return made, left


def _can(key: str, value: Any) -> bool:
    """Return True if a keyword that grammars know can be enforced with this value."""
    if key == "format":
        return value in FORMATS
    if key in ("pattern", "patternProperties"):
        kind = str if key == "pattern" else dict
        return isinstance(value, kind) and not any(look in str(value) for look in _LOOKS)
    if key == "required":
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    try:
        if key in (*NUMBERS, "const", "enum"):
            exact({key: value})
    except ValueError:
        return False
    return True

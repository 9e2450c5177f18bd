"""A request's tools: checked, and brought into the shapes of templates and grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import UserError
from common.sampling.grammar import Grammar
from common.text.tokenizer import Tokenizer
from phases.appendix.api.grammars import schema_of
from phases.appendix.api.schema import ChatRequest
from phases.appendix.guidance.exact import exact
from phases.appendix.tools.formats import CallFormat, Schema, format_of
from serving.http.errors import too_many, wrong
from serving.http.limits import Limits

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    loosened: keywords of tools that are not strict, which the grammar does without.
    """

    format: CallFormat
    grammar: Grammar
    loosened: list[str]


def tools_of(request: ChatRequest, tokenizer: Tokenizer, limits: Limits) -> Tools | None:
    """A request's tools, unless it has none or `tool_choice` says "none".

    Raises:
        ApiError: they are not of OpenAI's form, too many or too large, the model has no form for calls, or
            the request constrains its output in another way, too.
    """
    tools, chosen = request.tools, request.tool_choice
    if not tools:
        if chosen not in (None, "none", "auto"):
            raise wrong("tool_choice", "tool_choice needs tools")
        return None
    if len(tools) > limits.max_tools:
        raise too_many("tools", len(tools), limits.max_tools, "entries")
    size = len(msgspec.json.encode(tools))
    if size > limits.max_schema_bytes:
        raise too_many("tools", size, limits.max_schema_bytes, "bytes")
    functions, loosened = dict[str, Schema](), list[str]()
    for place, tool in enumerate(tools):
        name, schema, left = _function(f"tools[{place}]", tool)
        if name in functions:
            raise wrong("tools", f"tools has two functions of the name {name!r}")
        functions[name] = schema
        loosened += [name + keyword for keyword in left]
    must, names = _choice(chosen, functions)
    if chosen == "none":
        return None
    try:
        format, _ = format_of(tokenizer)
        grammar = format.grammar(
            [(name, functions[name]) for name in names],
            must=must,
            several=request.parallel_tool_calls is not False,
            content=_content(request, format, must),
        )
    except UserError as error:
        raise wrong("tools", str(error)) from None
    return Tools(format, grammar, loosened)


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates know them: arguments are objects, and a `developer` is the `system`.

    Raises:
        ApiError: a call is not of OpenAI's form.
    """
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def refusal(message: str, grammar: Grammar) -> str:
    """Return the engine's refusal of the tools' grammar, in the words of the client's request."""
    found = re.search(r" is refused: line (\d+), character \d+: (.*)", message)
    if found is None:
        return f"tools cannot be compiled: {message}"
    line = grammar.source.split("\n")[int(found[1]) - 1]
    name = re.search(r'\{\\"name\\": \\"([\w-]+)', line)
    whose = f"the parameters of {name[1]!r} are" if name else "their grammar is"
    return f"tools: {whose} refused: {found[2]}"


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "developer":  # OpenAI's newer name, which templates do not know
        message = {**message, "role": "system"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise wrong("messages", f"{where}.tool_calls must be a list")
    made = [_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
    return {**message, "tool_calls": made}


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("messages", f"{where} must be an object with a function that has a name")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise wrong("messages", f"{where}.function.arguments must be an object as JSON")
    found = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return found | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _function(where: str, tool: Any) -> tuple[str, Schema, list[str]]:
    """Return a tool's name, the schema of its arguments, and what that does without unless it is strict."""
    kind = tool.get("type")
    function = tool.get("function")
    if kind != "function" or not isinstance(function, Mapping):
        raise wrong("tools", f"{where} must be of type function and have a function")
    name, schema = function.get("name"), function.get("parameters")
    if schema is None:  # OpenAI: a function without parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            "tools", f"{where}.function.name must be 1 to 64 of a-z, A-Z, 0-9, _ and -"
        )
    left: list[str] = []
    if not isinstance(schema, dict) or "object" not in _types(schema):
        raise wrong("tools", f"{where}.function.parameters must be the schema of an object")
    try:
        Grammar.json_schema(schema)
    except UserError as error:
        raise wrong("tools", f"{where}.function.parameters: {error}") from None
    if function.get("strict") is not True:
        schema = exact(schema, left=left)
    return name, {**schema, "type": "object"}, left


def _types(schema: Schema) -> list[Any]:
    """Return the types that a schema names; arguments are an object whatever it says beside that."""
    kinds = schema.get("type") or "object"
    return kinds if isinstance(kinds, list) else [kinds]


def _choice(chosen: Any, functions: Mapping[str, Schema]) -> tuple[bool, list[str]]:
    """Return True if a call has to be made, and the functions that may be called."""
    if chosen in (None, "auto", "none", "required"):
        return chosen == "required", list(functions)
    function = chosen.get("function") if isinstance(chosen, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or chosen.get("type") != "function":
        raise wrong(
            "tool_choice",
            "tool_choice must be none, auto, required, or a function with its name",
        )
    if name not in functions:
        raise wrong(
            "tool_choice", f"tool_choice names {name[:64]!r}, which is none of the tools"
        )
    return True, [name]


def _content(request: ChatRequest, format: CallFormat, must: bool) -> Schema | None:
    """The schema of an output that is no call, if `response_format` has one."""
    schema = schema_of(request)
    if schema is not None and (must or not format.trigger):
        what = (
            "response_format constrains the output, and so do tools: only one of them may here"
        )
        raise wrong("response_format", what)
    return schema

"""The tools of a request: checked, and converted to the forms that chat templates and grammars use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import msgspec
from msgspec import Struct

from common.errors import UserError
from common.http.errors import check_count, wrong
from common.http.limits import Limits
from common.sampling.grammar import Grammar
from common.text.tokenizer import Tokenizer
from phases.appendix.api.grammars import loosen
from phases.appendix.api.reasoning import has_channels
from phases.appendix.guidance.exact import exact
from phases.appendix.tools.described import WARNING, described
from phases.appendix.tools.formats import CallFormat, Schema, format_of
from phases.appendix.tools.reader import CallReader
from phases.appendix.tools.written import decode_written
from serving.parsed import ParsedRequest

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class ToolFields(Struct, kw_only=True):
    """Request fields about tools: `tools`, `tool_choice`, `parallel_tool_calls`, and OpenAI's older forms."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None  # OpenAI's older form
    function_call: Any = None


class ToolHandler:
    """Handles a chat's fields about tools: shows tools to the model, constrains and finds tool calls."""

    fields = ToolFields
    names = frozenset({*ToolFields.__struct_fields__, "tool_calls", "tool"})

    def __init__(self, tokenizer: Tokenizer, limits: Limits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits

    @cached_property
    def _format(self) -> tuple[CallFormat, bool]:
        """Return (format in which the model writes tool calls, whether its chat template shows it tools).

        Raises:
            UserError: the model has no template.
        """
        return format_of(self.tokenizer)

    def read(self, given: ToolFields, request: ParsedRequest) -> None:
        """Prepare `request` for the tools in `given`: its messages, and the grammar of its output.

        Raises:
            ApiError: tools are not of OpenAI's form, too many or too large, or the request constrains its
                output in another way, too.
        """
        older = {"functions": given.functions, "function_call": given.function_call}
        for name, value in older.items():
            if value and value not in ("none", "auto"):
                raise wrong(name, f"{name} is not supported, but tools and tool_choice are")
        request.messages = conversation(request.messages)
        functions = self._functions(given, request)
        must, names = _choice(given.tool_choice, functions)
        tools = [tool for tool in given.tools or [] if _is_function(tool)]
        if given.tool_choice == "none":
            tools = []
        try:
            _, shows = self._format
            if tools:
                self._call(given, request, {name: functions[name] for name in names}, must)
        except UserError as error:
            raise wrong("tools" if tools else "messages", str(error)) from None
        if shows:
            request.variables |= {"tools": tools} if tools else {}
            return
        request.messages = described(request.messages, tools)
        if tools:
            request.headers.append((b"x-ladder-warning", WARNING))

    def _call(
        self,
        given: ToolFields,
        request: ParsedRequest,
        functions: Mapping[str, Schema],
        must: bool,
    ) -> None:
        """Set the grammar of an output with tool calls, and the reader that finds the calls in the output.

        functions: {name: schema of the arguments} of those that may be called. must: one has to be called.

        Raises:
            ApiError: the request constrains its output in another way, too.
        """
        format, _ = self._format
        asked = request.names.get("grammar", "response_format")
        if asked != "response_format":  # that one is in the tools' grammar
            raise wrong(asked, f"{asked} and tools both constrain the output")
        format_given = request.sampling.get("grammar")
        content = None if format_given is None else format_given.loaded()
        if must and content is not None:  # nothing but calls can come
            request.ignored.append("response_format")
            content = None
        if content is not None and not format.trigger:
            words = "response_format constrains the output, and so do tools: only one of them may here"
            raise wrong("response_format", words)
        if content is not None:
            try:
                exact(content)
            except ValueError as error:
                raise wrong("response_format", f"response_format: {error}") from None
        named = (
            isinstance(given.tool_choice, dict) and given.tool_choice.get("type") == "function"
        )
        # Which OpenAI calls once.
        several = given.parallel_tool_calls is not False and not named
        grammar = format.grammar(
            [*functions.items()], must=must, several=several, content=content
        )
        if must or content is not None or not has_channels(self.tokenizer):
            request.sampling["grammar"] = (
                grammar  # else there would be no channels, which are no text
            )
        request.names["grammar"] = "tools"
        request.explain = partial(refusal, grammar=grammar)
        request.constrained = must or content is not None
        request.reader = partial(CallReader, format, must)
        request.mark = format.trigger or "^{"  # a client sees no text of a call

    def _functions(self, given: ToolFields, request: ParsedRequest) -> dict[str, Schema]:
        """Return {name: schema of the arguments} of the functions among the tools.

        Tools of other types, and keywords of schemas that are not enforced, are named in response headers.

        Raises:
            ApiError: a tool has a wrong form, there are too many, or two have the same name.
        """
        tools = given.tools or []
        check_count("tools", len(tools), self.limits.max_tools, "entries")
        size = len(msgspec.json.encode(tools))
        check_count("tools", size, self.limits.max_schema_bytes, "bytes")
        functions, loosened = dict[str, Schema](), list[str]()
        for place, tool in enumerate(tools):
            if not _is_function(tool):
                request.ignored.append(f"tools[{place}]")
                continue
            name, schema, left = _function(f"tools[{place}]", tool)
            if name in functions:
                raise wrong("tools", f"tools has two functions of the name {name!r}")
            functions[name] = schema
            loosened += [name + keyword for keyword in left]
        if loosened:
            loosen(request, loosened)
        return functions


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages as templates read them: calls have objects as arguments, results texts.

    Raises:
        ApiError: a call is not of OpenAI's form.
    """
    return [_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def refusal(message: str, grammar: Grammar) -> str:
    """Return a message about the client's tools, made of the engine's error about their grammar.

    message: the engine's, which names a line of the grammar. grammar: made of the tools; the line shows which
        tool is wrong.
    """
    found = re.search(r" is refused: line (\d+), character \d+: (.*)", message)
    if found is None:
        return f"tools cannot be compiled: {message}"
    line = grammar.source.split("\n")[int(found[1]) - 1]
    name = re.search(r'\{\\"name\\": \\"([\w-]+)', line)
    whose = f"the parameters of {name[1]!r} are" if name else "their grammar is"
    return f"tools: {whose} refused: {found[2]}"


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool" and message.get("content") is None:
        message = message | {"content": ""}
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise wrong("messages", f"{where}.tool_calls must be a list")
    made = [_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
    return {**message, "tool_calls": made}


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a tool call from an earlier message, with its arguments as an object.

    Arguments that are no complete JSON object become an empty one. where: position of the call, for errors.

    Raises:
        ApiError: the call is not of OpenAI's form.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong("messages", f"{where} must be an object with a function that has a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str | None):
        arguments = decode_written(arguments or "") or {}
    if not isinstance(arguments, dict):
        raise wrong(
            "messages",
            f"{where}.function.arguments must be an object, or its JSON as a string",
        )
    found = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return found | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "function")


def _function(where: str, tool: Mapping[str, Any]) -> tuple[str, Schema, list[str]]:
    """Return (name, schema of the arguments, keywords of the schema that are not enforced) of a tool.

    where: position of the tool in the request, for errors. All keywords of a strict tool are enforced.

    Raises:
        ApiError: the tool is not of OpenAI's form, or its schema cannot be followed.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong("tools", f"{where} is of type function, but has no function")
    name, schema = function.get("name"), function.get("parameters")
    if schema is None:  # OpenAI: a function without parameters
        schema = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            "tools", f"{where}.function.name must be 1 to 128 of a-z, A-Z, 0-9, _ and -"
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
    """Return the list of JSON types that a tool's schema allows; `["object"]` if it names none."""
    kinds = schema.get("type") or "object"
    return kinds if isinstance(kinds, list) else [kinds]


def _choice(chosen: Any, functions: Mapping[str, Schema]) -> tuple[bool, list[str]]:
    """Return (whether the model must call a tool, names of the functions that it may call).

    chosen: the request field `tool_choice`. functions: {name: schema of the arguments}.

    Raises:
        ApiError: `tool_choice` has a wrong form, or names no tool of the request.
    """
    if chosen in (None, "auto", "none"):
        return False, list(functions)
    if not functions:
        raise wrong("tool_choice", "tool_choice needs tools")
    if chosen == "required":
        return True, list(functions)
    kind = chosen.get("type") if isinstance(chosen, Mapping) else None
    given = (
        chosen.get("allowed_tools", chosen) if kind == "allowed_tools" else {"tools": [chosen]}
    )
    entries = given.get("tools") if isinstance(given, Mapping) else None
    names = [_named(entry) for entry in entries] if isinstance(entries, list) else []
    if kind not in ("function", "allowed_tools") or not names or None in names:
        words = "tool_choice must be none, auto, required, a function with its name, or allowed_tools"
        raise wrong("tool_choice", words)
    for name in names:
        if name not in functions:
            raise wrong(
                "tool_choice",
                f"tool_choice names {str(name)[:64]!r}, which is none of the tools",
            )
    return kind == "function" or given.get("mode") == "required", list(
        dict.fromkeys(map(str, names))
    )


def _named(entry: Any) -> str | None:
    """Return the function's name in an entry of `tool_choice`; None if it has none.

    The name is in the entry, or nested in the entry's `function`.
    """
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None

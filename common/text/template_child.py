"""The child process of `template_sandbox`: describes and renders chat templates, and can do nothing else.

It is run as a program, and imports nothing of this repository.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FIRST = (
    "{{ '\\n' | pprint | striptags | wordwrap }}{{ strftime_now('%c') }}{{ undefined.fails }}"
)
"""A template whose rendering makes Jinja and Python read all the files that they ever need."""


def serve(seconds: float, memory_bytes: int, most_characters: int, out_of_memory: int) -> None:
    """Run the child: read requests from standard input, one JSON object a line; write a line for each.

    Args:
        seconds: processor time that one response may take.
        memory_bytes: memory that this process may have.
        most_characters: characters that a template may write.
        out_of_memory: exit status of this process if it would need more memory.
    """
    with suppress(jinja2.UndefinedError):
        _compiled(_FIRST).render()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends the process
        try:
            answer = json.dumps(_answer(most_characters, **json.loads(line)))
        except MemoryError:
            os._exit(out_of_memory)
        except Exception as error:  # a template is a program: it may fail in any way
            answer = json.dumps({"error": _error_text(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(
    most_characters: int, source: str, variables: dict[str, Any] | None = None
) -> dict[str, Any]:
    if variables is None:
        return _describe(source)
    messages = [_without_null(message) for message in variables.get("messages", ())]
    text = _compiled(source).render(variables | {"messages": messages})
    if len(text) > most_characters:
        raise ValueError(
            f"it writes {len(text):,} characters, but may write {most_characters:,}"
        )
    return {"text": text}


def _describe(source: str) -> dict[str, Any]:
    """Return a dictionary of what a template (its source) reads: `variables`, `names` (attributes, strings).

    A third entry, `takes_parts`, is True if it renders a message's content that is a list of texts.
    """
    _compiled(source)
    tree = _environment().parse(source)
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return {
        "variables": sorted(meta.find_undeclared_variables(tree)),
        "names": sorted(names),
        "takes_parts": _takes_parts(source),
    }


def _takes_parts(source: str) -> bool:
    """Return True if a template (its source) renders a content that is a list of texts like the text itself.

    Templates that only take texts fail or print the list.
    """

    def written(content: Any) -> str:
        messages = [{"role": "user", "content": content}]
        return _compiled(source).render(messages=messages, add_generation_prompt=True)

    try:
        return written([{"type": "text", "text": "words"}]) == written("words")
    except Exception:
        return False


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that `transformers` documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    # Jinja's own filter of this name escapes for HTML, which a language model would see as other text.
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = _is_none
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `x` as JSON: the filter `tojson`, with the arguments that `transformers` gives it."""
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> None:
    """Return None, which JSON writes as null, for a `NullContent` (no content); else raise `TypeError`."""
    if not _is_none(value):
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _is_none(value: Any) -> bool:
    """Return True if `value` is None or a `NullContent` (no content): the templates' test `is none`."""
    return value is None or isinstance(value, NullContent)


class NullContent(jinja2.Undefined):
    """The content of a message without one, such as an assistant's with tool calls only.

    `transformers` leaves such a content out, so it is not defined and writes nothing. Templates of the kind
    of DeepSeek's ask if it is none, so a `NullContent` passes that test as well. Others split, trim or join
    every content, so it has the methods of an empty text.
    """

    __slots__ = ()
    __hash__ = jinja2.Undefined.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr("", name)

    def __getitem__(self, key: Any) -> Any:
        return ""[key]

    def __add__(self, other: Any) -> Any:
        return "" + other

    def __radd__(self, other: Any) -> Any:
        return other + ""

    def __eq__(self, other: object) -> bool:
        return _is_none(other)


class MessageWithoutContent(dict[str, Any]):
    """A message without the key `content`: reading this key returns a `NullContent`."""

    def __missing__(self, key: str) -> NullContent:
        if key != "content":
            raise KeyError(key)
        return NullContent(obj=self, name=key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if there is none.

        For the content of a message with tool calls, and no other default, return a `NullContent`.
        """
        asked = key == "content" and default is None and "tool_calls" in self
        return self[key] if asked else super().get(key, default)


def _without_null(message: Any) -> Any:
    """Return a message whose content is null as one in which templates see no content (undefined, not None);
    return others unchanged.
    """
    if not isinstance(message, dict) or message.get("content") is not None:
        return message
    return MessageWithoutContent(
        {name: value for name, value in message.items() if name != "content"}
    )


def _error_text(error: Exception) -> str:
    """Return an error's message in one line, with the exception's name if Python raised it."""
    words = " ".join(str(error).split())[:500]
    if isinstance(error, jinja2.TemplateSyntaxError):
        words = f"line {error.lineno}: {words}"
    ours = type(error).__module__.split(".")[0] == "jinja2"
    return words if ours else f"{type(error).__name__}: {words}"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]), *map(int, sys.argv[2:]))

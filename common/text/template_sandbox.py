"""Run chat templates in processes of their own, of which each has a limit of time and of memory.

A chat template is a Jinja program by the model's publisher, and it may be hostile. Jinja's sandbox keeps it
from attributes that begin with an underscore and from changing what it was given, but not from counting to
10**27 or from making a string of a terabyte. The operating system does that, and needs no list of what each
filter may cost: one rendering has `SECONDS` of processor time and `MEMORY_BYTES`, and the process of one that
takes more ends. It can open no file and no connection either, and what comes back from it is JSON.

This file is both sides: `TemplateSandbox` is the parent's, and `serve` is all that the child runs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, Final, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS: Final = 1.0
MEMORY_BYTES: Final = 1 << 29
SOURCE_CHARACTERS: Final = 1 << 16
OUTPUT_CHARACTERS: Final = 1 << 22

_OUT_OF_MEMORY: Final = 3
_ENDS: Final = {
    -signal.SIGPROF: f"it takes more than {SECONDS:g} s of processor time",
    _OUT_OF_MEMORY: f"it takes more than {MEMORY_BYTES >> 20} MiB of memory",
}
_FIRST: Final = (
    "{{ '\\n' | pprint | striptags | wordwrap }}{{ strftime_now('%c') }}{{ undefined.fails }}"
)
"""Makes Jinja and Python read all the files that they ever need."""


class TemplateError(Exception):
    """A template that is not valid, fails, or does more than it may; the message says which."""


class TemplateSandbox:
    """The child processes: started when needed, one for each thread that renders, and again after an end."""

    def __init__(self) -> None:
        """Begin without a child."""
        self._idle: list[
            subprocess.Popen[bytes]
        ] = []  # they end with this process, which closes their pipes

    def ask(self, source: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compile a template and describe it, as `_describe` does, or render it: `text`.

        Raises:
            TemplateError: it is not valid, fails, or does more than it may.
        """
        if len(source) > SOURCE_CHARACTERS:
            raise TemplateError(
                f"it has {len(source):,} characters, but may have {SOURCE_CHARACTERS:,}"
            )
        data = json.dumps({"source": source, "variables": variables}).encode() + b"\n"
        child = self._child()
        stdin, stdout = cast("IO[bytes]", child.stdin), cast("IO[bytes]", child.stdout)
        try:
            with suppress(BrokenPipeError):
                stdin.write(data)
                stdin.flush()
            line = stdout.readline()
        except BaseException:  # the next request would read this one's answer
            _end(child)
            raise
        if not line.endswith(b"\n"):
            raise TemplateError(_ENDS.get(_end(child), "its process has died"))
        self._idle.append(child)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise TemplateError(found["error"])
        return found

    def _child(self) -> subprocess.Popen[bytes]:
        while self._idle:
            with suppress(IndexError):  # another thread has taken it
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                _end(child)
        return subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is the parent's
        )


def _end(child: subprocess.Popen[bytes]) -> int:
    """Return its exit status."""
    child.kill()
    with suppress(BrokenPipeError):
        child.communicate()  # closes the pipes
    return child.returncode


# The child.


def serve() -> None:
    """Answer requests, one a line, until there are no more."""
    with suppress(jinja2.UndefinedError):
        _compiled(_FIRST).render()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # whose signal ends the process
        try:
            answer = json.dumps(_answer(**json.loads(line)))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # a template is a program: it may fail in any way
            answer = json.dumps({"error": _error_text(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _answer(source: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
    if variables is None:
        return _describe(source)
    messages = [_without_null(message) for message in variables.get("messages", ())]
    text = _compiled(source).render(variables | {"messages": messages})
    if len(text) > OUTPUT_CHARACTERS:
        raise ValueError(
            f"it writes {len(text):,} characters, but may write {OUTPUT_CHARACTERS:,}"
        )
    return {"text": text}


def _describe(source: str) -> dict[str, Any]:
    """The names it asks for, the attributes and strings in it, and if it writes a list of texts as these."""
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
    """Try it: a template for texts alone fails, or writes the list as Python does."""

    def written(content: Any) -> str:
        messages = [{"role": "user", "content": content}]
        return _compiled(source).render(messages=messages, add_generation_prompt=True)

    try:
        return written([{"type": "text", "text": "words"}]) == written("words")
    except Exception:
        return False


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as `transformers` documents it for chat templates."""
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
    """The filter `tojson`: its arguments have the names and the order that `transformers` gives them."""
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> None:
    """Write a `NullContent` as null."""
    if not _is_none(value):
        raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _is_none(value: Any) -> bool:
    """The test `is none`."""
    return value is None or isinstance(value, NullContent)


class NullContent(jinja2.Undefined):
    """The content of a message that says nothing, such as one that has only calls.

    `transformers` leaves such a content out, so it is not defined and writes nothing. Templates of the kind
    of DeepSeek's ask if it is none, so it is that as well. Others split, trim or join every content, so it
    has what an empty text has.
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
    """A message without the key `content`, of which a template gets a `NullContent` if it asks."""

    def __missing__(self, key: str) -> NullContent:
        if key != "content":
            raise KeyError(key)
        return NullContent(obj=self, name=key)

    def get(self, key: str, default: Any = None) -> Any:
        """See `dict.get`. Beside calls, a content that is asked for in this way writes nothing, too."""
        asked = key == "content" and default is None and "tool_calls" in self
        return self[key] if asked else super().get(key, default)


def _without_null(message: Any) -> Any:
    """Return a message whose content is null as a `MessageWithoutContent`, and others as they are."""
    if not isinstance(message, dict) or message.get("content") is not None:
        return message
    return MessageWithoutContent(
        {name: value for name, value in message.items() if name != "content"}
    )


def _error_text(error: Exception) -> str:
    """An error's message in one line, with its kind where Python raised it."""
    words = " ".join(str(error).split())[:500]
    if isinstance(error, jinja2.TemplateSyntaxError):
        words = f"line {error.lineno}: {words}"
    ours = type(error).__module__.split(".")[0] == "jinja2"
    return words if ours else f"{type(error).__name__}: {words}"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only lets them through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


if __name__ == "__main__":
    serve()

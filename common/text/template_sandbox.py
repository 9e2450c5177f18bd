"""Run chat templates in processes of their own, of which each has a limit of time and of memory.

A chat template is a Jinja program by the model's publisher, and it may be hostile. Jinja's sandbox keeps it
from attributes that begin with an underscore and from changing what it was given, but not from counting to
10**27 or from making a string of a terabyte. The operating system does that, and needs no list of what each
filter may cost: one rendering has `SECONDS` of processor time and `MEMORY_BYTES`, and the process of one that
takes more ends. It can open no file and no connection either, and what comes back from it is JSON.

`template_child.py` is the program of the child.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 1.0
MEMORY_BYTES = 1 << 29
SOURCE_CHARACTERS = 1 << 16
OUTPUT_CHARACTERS = 1 << 22
CHILD = Path(__file__).with_name("template_child.py")

_OUT_OF_MEMORY = 3
_ENDS = {
    -signal.SIGPROF: f"it takes more than {SECONDS:g} s of processor time",
    _OUT_OF_MEMORY: f"it takes more than {MEMORY_BYTES >> 20} MiB of memory",
}
_IDLE = list[subprocess.Popen[bytes]]()
"""Child processes that wait for a template; they end with this process, which closes their pipes."""


class TemplateError(Exception):
    """Raised for a template that is not valid, fails, or exceeds a limit; the message says which."""


def ask_child(source: str, variables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Send a template to a child process, to be rendered or described; return the response.

    variables: values for rendering, which returns `{"text": ...}`; None: describe it, which returns
        `variables` and `names` that it reads, and `takes_parts`.

    Raises:
        TemplateError: the template is not valid, fails, or exceeds a limit.
    """
    if len(source) > SOURCE_CHARACTERS:
        limit = f"{SOURCE_CHARACTERS:,}"
        raise TemplateError(f"it has {len(source):,} characters, but may have {limit}")
    data = json.dumps({"source": source, "variables": variables}).encode() + b"\n"
    child = _child()
    assert child.stdin is not None and child.stdout is not None
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(data)
            child.stdin.flush()
        line = child.stdout.readline()
    except BaseException:  # the next request would read this one's answer
        _end(child)
        raise
    if not line.endswith(b"\n"):
        raise TemplateError(_ENDS.get(_end(child), "its process has died"))
    _IDLE.append(child)
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise TemplateError(found["error"])
    return found


def _child() -> subprocess.Popen[bytes]:
    while _IDLE:
        with suppress(IndexError):  # another thread has taken it
            child = _IDLE.pop()
            if child.poll() is None:
                return child
            _end(child)
    limits = (SECONDS, MEMORY_BYTES, OUTPUT_CHARACTERS, _OUT_OF_MEMORY)
    return subprocess.Popen(
        [sys.executable, "-P", CHILD, *map(str, limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the parent's
    )


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill a child process and return its exit status."""
    child.kill()
    with suppress(BrokenPipeError):
        child.communicate()  # closes the pipes
    return child.returncode

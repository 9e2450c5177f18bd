"""The server of the lesson is the server that runs, and a request enters little code."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import threading
from pathlib import Path
from typing import Any

import serving
from phases import ROOT
from tests.servers import Client
from tests.serving_kit import make_with_grammars as make_with_grammars
from tests.serving_kit import tokenizer as tokenizer

MOST_FILES = 49
MOST_LINES = 7_000
MOST_FUNCTIONS = 282
"""Of both processes; 39 of the files are of common and of phases 01 to 12.

They may only shrink: the aim is 55, 7,000 and 300.
"""
CHAT = {
    "messages": [{"role": "user", "content": "Say this."}],
    "max_tokens": 8,
    "stream": True,
}


def classes_of_the_phase() -> set[str]:
    names = [module.name for module in pkgutil.walk_packages(serving.__path__, "serving.")]
    found = [
        inspect.getmembers(importlib.import_module(name), inspect.isclass) for name in names
    ]
    return {
        name
        for members in found
        for name, kind in members
        if kind.__module__.startswith("serving.")
    }


def test_the_appendix_subclasses_no_class_of_the_phase():
    ours, found = classes_of_the_phase(), []
    assert {"App", "ResponseFormatter", "ChatEndpoint", "Choice", "HttpRequest"} <= ours
    for path in (ROOT / "phases" / "appendix").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                found += [
                    f"{path.relative_to(ROOT)}: {node.name}({base})" for base in bases & ours
                ]
    assert found == []


async def test_a_streamed_chat_enters_few_files(make):
    """Warm, with the engine's code in this process; what tests themselves run is not counted."""
    app, seen = make(), set[tuple[str, str, int]]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            seen.add((code.co_filename, code.co_name, code.co_firstlineno))

    for _ in range(2):
        await Client(app).request("/v1/chat/completions", CHAT).run()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        asked = await Client(app).request("/v1/chat/completions", CHAT).run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert asked.events()[-1] == "[DONE]"
    rooms = (str(ROOT / "common"), str(ROOT / "phases"))
    ours = [one for one in seen if one[0].startswith(rooms)]
    files = {name for name, _, _ in ours}
    lines = sum(len(Path(name).read_text(encoding="utf-8").splitlines()) for name in files)
    shown = f"{len(files)} files, {lines} lines, {len(ours)} functions"
    assert len(files) <= MOST_FILES and lines <= MOST_LINES and len(ours) <= MOST_FUNCTIONS, (
        shown
    )

"""Fill in the code that the lessons show from the source, so that no line of it is typed twice.

An excerpt stands between two comments of a lesson:

    <!-- code: continuous/scheduler.py Scheduler.share Scheduler._take -->
    <!-- /code -->

The first word is a file beside the lesson, the others are functions in it, shown in this order, without
their docstrings and without the class around them. `from=` and `to=` show a part of a single function: from
the line that begins so to the next one that begins so, both included (`"from=if self.windows"` where there
are spaces).

A place in the code is a link with a line number, between two comments of one line:

    <!-- at: ../phases/13_serving/serving/worker.py Worker.turn --><!-- /at -->
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path

from common.errors import UserError

EXCERPT = re.compile(
    r"^(<!-- code: (.*?) -->\n)(?:```python\n.*?^```\n)?(<!-- /code -->)",
    re.DOTALL | re.MULTILINE,
)
PLACE = re.compile(r"(<!-- at: (\S+) (\S+) -->).*?(<!-- /at -->)")


def fill(text: str, folder: Path) -> str:
    """Return `text` with every excerpt and place in it taken again from the files of its folder."""

    def place(found: re.Match[str]) -> str:
        mark, file, name, end = found.groups()
        line = _node(_source(file, folder), name, file).lineno
        return f"{mark}[`{name}`]({file}#L{line}), {Path(file).name}:{line}{end}"

    def block(found: re.Match[str]) -> str:
        return found[1] + _block(shlex.split(found[2]), folder) + found[3]

    return EXCERPT.sub(block, PLACE.sub(place, text))


def _source(file: str, folder: Path) -> str:
    path = folder / file
    if not path.is_file():
        raise UserError(
            f"the lesson in {folder.name} shows code of {file}, which is not there"
        )
    return path.read_text(encoding="utf-8")


def _block(words: list[str], folder: Path) -> str:
    settings = dict(word.split("=", 1) for word in words if word.startswith(("from=", "to=")))
    file, *names = (word for word in words if not word.startswith(("from=", "to=")))
    source = _source(file, folder)
    shown = [_function(source, name, file) for name in names]
    if settings:
        shown = [_part(shown[0], settings.get("from", ""), settings.get("to", ""), file)]
    code = "\n\n\n".join(shown)
    return f"```python\n# {file}\n{code}\n```\n"  # as ruff formats Markdown


def _function(source: str, name: str, file: str) -> str:
    """Return the lines of a function or class, from its decorators on, without docstring and indentation."""
    node = _node(source, name, file)
    lines = source.splitlines()
    first = min(one.lineno for one in (node, *node.decorator_list)) - 1
    kept = lines[first : node.end_lineno]
    if ast.get_docstring(node) is not None:
        text = node.body[0]
        kept = lines[first : text.lineno - 1] + lines[text.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).strip("\n")


def _node(
    source: str, name: str, file: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef:
    """Find a function or class of a file. Raises `UserError` if there is none of that name."""
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        inside = getattr(node, "body", [])
        found = [one for one in inside if getattr(one, "name", None) == part]
        if not found:
            raise UserError(f"{file} has no {name}, which a lesson shows")
        node = found[-1]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return node


def _part(code: str, first: str, last: str, file: str) -> str:
    """From the line that begins with `first` to the next one that begins with `last`, both included."""
    lines = code.splitlines()
    bare = [line.strip() for line in lines]
    starts = [at for at, line in enumerate(bare) if line.startswith(first)]
    ends = [at for at, line in enumerate(bare) if starts and line.startswith(last)]
    ends = [at for at in ends if at >= starts[0]]
    if not ends:
        raise UserError(
            f"no lines of the code shown of {file} begin with {first!r} and {last!r}"
        )
    stop = ends[0] if last else len(lines)
    return textwrap.dedent("\n".join(lines[starts[0] : stop + 1]))

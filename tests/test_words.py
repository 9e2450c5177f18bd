"""One word, one meaning: the product does without the words that the glossary's table avoids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from phases import ROOT

TITLE = "## One word, one meaning"
PENDING = {
    "feature.py",
    "phases/04_continuous",
    "phases/05_paged_cache",
    "phases/09_cuda_graphs",
    "phases/10_quant",
    "phases/11_speculative",
    "phases/12_structured",
    "phases/13_serving",
    "phases/14_parallel",
    "phases/15_replicas/replicas/gate.py",
    "phases/16_experts",
    "phases/17_hybrid_cache",
    "phases/appendix/access",
    "phases/appendix/api",
    "phases/appendix/connections",
    "phases/appendix/cpu_step",
    "phases/appendix/guidance",
    "phases/appendix/masked_graphs",
    "phases/appendix/protocols",
    "phases/appendix/server.py",
    "phases/appendix/tools",
}
"""Folders, files, or names of files that say avoided words still. Delete an entry, and it is checked."""
HELPERS = {"option", "flag", "asking", "drawing", "masking", "printing", "Option", "Argument"}
"""Functions whose texts are shown by `--help`."""


@cache
def avoided() -> dict[str, str]:
    """Word or phrase of the glossary's table -> the words to use."""
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = text.partition(TITLE)[2].partition("\n## ")[0].splitlines()
    cells = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")][2:]
    return {word.strip(): cell[1] for cell in cells for word in cell[0].split(",")}


@cache
def pattern() -> re.Pattern[str]:
    return re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, avoided()))})(?![a-z])")


def words(name: str) -> str:
    """The words of an identifier, in small letters with spaces between: `RunAhead` -> `run ahead`."""
    return " ".join(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)).lower()


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that a node defines: functions, classes, parameters, variables, fields."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.ClassDef(name=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name


def texts(node: ast.AST) -> Iterator[str]:
    """Docstrings and help texts of a node; names in backticks are checked where they are defined."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield re.sub(r"`+[^`]*`+", "", str(node.value.value))
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
        if (called.id if isinstance(called, ast.Name) else called) in HELPERS:
            given = [*node.args, *(each.value for each in node.keywords)]
            yield from (str(each.value) for each in given if isinstance(each, ast.Constant))


def faults(source: str, name: str) -> Iterator[str]:
    """File, line, word and the words to use, for each use of an avoided word in a file called `name`."""
    found = [(1, words(Path(name).stem))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.expr | ast.arg):
            found += [(node.lineno, words(each)) for each in identifiers(node)]
            found += [(node.lineno, text.lower()) for text in texts(node)]
    for line, text in found:
        for word in dict.fromkeys(pattern().findall(text)):
            yield f"{name}:{line}: {word!r}; say {avoided()[word]}"


def is_pending(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return path.name in PENDING or any(f"{name}/".startswith(f"{room}/") for room in PENDING)


def test_the_product_says_what_the_glossary_says() -> None:
    files = [*(ROOT / "common").rglob("*.py"), *(ROOT / "phases").rglob("*.py")]
    checked = [path for path in files if path.name != "bench.py" and not is_pending(path)]
    found = list[str]()
    for path in sorted(checked):
        source = path.read_text(encoding="utf-8")
        if pattern().search(words(f"{path.stem} {source}")):  # parsing takes most of the time
            found += faults(source, path.relative_to(ROOT).as_posix())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def run_ahead(): ...", "ahead"),
        ("class DraftAhead: ...", "ahead"),
        ("def run(few): ...", "few"),
        ("FEW_TOKENS = 8", "few"),
        ("class Row:\n    places: int", "places"),
        ("self.own_sums = 1", "own sums"),
        ("for taker in works: ...", "taker"),
        ('def run():\n    """Reject a draft that was made in vain."""', "in vain"),
        ('LIMIT = 8\n"""Where few tokens are."""', "few"),
        ('size: int = option(8, "for a few requests")', "few"),
        ('typer.Option(help="the usual port")', "usual"),
    ],
)
def test_an_avoided_word_is_found(source: str, word: str) -> None:
    (fault,) = faults(source, "phases/room.py")
    assert fault.endswith(f": {word!r}; say {avoided()[word]}"), (
        "the fault names word and cure"
    )


def test_a_file_name_is_checked_and_longer_words_are_not() -> None:
    assert list(faults("", "phases/doors.py")) == [
        f"phases/doors.py:1: 'doors'; say {avoided()['doors']}"
    ]
    assert not list(faults("fewest = related = replaces = metadata = 1", "phases/room.py"))

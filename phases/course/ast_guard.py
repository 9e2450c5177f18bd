"""A hint to a student whose functions use what no exercise needs: it reads the source, and runs nothing.

What the reference's own file uses is allowed, and the modules that it imports are allowed whole. The guard
turns a mistake into one clear sentence; it is no wall. The operating system confines what is run (`sandbox`),
values are judged in another process (`checking`), and canaries must fail beside the tests.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

from phases.course.blanks import Function, graft

_RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
MODULES = frozenset(_RULES["modules"].split())
BUILTINS = frozenset(_RULES["builtins"].split())
ATTRIBUTES = frozenset(_RULES["attributes"].split())
CLASS_MAKERS = frozenset(_RULES["class_makers"].split())
SPECIAL = frozenset(_RULES["special"].split())
LONGEST = 100_000
"""Characters of a file."""


def refusal(reference: str, student: str, names: Collection[str]) -> str:
    """Return why a student's functions are not run, or nothing.

    names: qualified names of the functions that count.
    """
    if len(student) > LONGEST:
        return f"the file has {len(student)} characters, more than {LONGEST}"
    taken = graft(reference, student, names)
    ours, theirs = ast.parse(reference), ast.parse(taken)
    modules = MODULES | {name for name, _ in _imports(ours)}
    uses = {what for what, _ in _uses(ours, frozenset())}
    for name, line in _imports(theirs):
        if name not in modules:
            return f"it imports {name}, which the reference does not need{_where(taken, line)}"
    for what, line in _uses(theirs, _data_attributes(ours)):
        if what not in uses:
            return f"it uses {what}, which no exercise needs{_where(taken, line)}"
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (module, line) of each import; of a library in `MODULES` its first part alone."""
    for node in ast.walk(tree):
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            found = ["." * node.level + (node.module or "")]
        for name in found:
            first = name.partition(".")[0]
            yield (first if first in MODULES else name), node.lineno  # type: ignore[attr-defined]


def _data_attributes(tree: ast.Module) -> frozenset[str]:
    """Return the attributes that hold data in the reference: read, written or declared, and no functions."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    data, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if id(node) not in called:
                data.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                data.add(name)
            case ast.FunctionDef(name=name):
                defined.add(name)
    return frozenset(data - defined)


def _uses(tree: ast.Module, data: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield (what, line) of each use of something that leads out of an exercise.

    data: the attributes that may be assigned to, of other objects than `self`.
    """
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = [part for each in classes for part in each.body if isinstance(part, Function)]
    owners = {id(each.args.args[0]) for each in methods if each.args.args}
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes:
        for what in _leads_out(node, data, owners, imported):
            yield what, node.lineno  # type: ignore[attr-defined]


def _leads_out(
    node: ast.AST, data: Collection[str], owners: Collection[int], imported: Collection[str]
) -> Iterator[str]:
    match node:
        case ast.Name(id=name) if name in BUILTINS or _special(name):
            yield name
        case ast.Name(id="self", ctx=ast.Store() | ast.Del()):
            yield "self for something else"
        case ast.arg(arg="self") if id(node) not in owners:
            yield "self outside of a method"
        case ast.Attribute(attr=name) if {name, name.lstrip("_")} & ATTRIBUTES or _special(
            name
        ):
            yield "." + name
        case ast.Attribute(attr=name, value=ast.Name(id=owner)) if (
            owner in imported and name[0] == "_"
        ):
            yield f"{owner}.{name}"
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del(), value=owner) if (
            name not in data
        ):
            if not (isinstance(owner, ast.Name) and owner.id == "self"):
                yield f"an assignment to .{name} of another object"
        case ast.ImportFrom(module=module, names=names):
            private = (
                alias.name
                for alias in names
                if alias.name in ATTRIBUTES | {"*"} or alias.name[0] == "_"
            )
            yield from (f"{module}.{name}" for name in private)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _special(name):
            yield f"def {name}"
        case ast.MatchClass(kwd_attrs=names):
            yield from ("." + name for name in names if name in ATTRIBUTES or _special(name))
        case ast.Constant(value=str(name)) if _special(name):
            yield repr(name)
        case ast.Global():
            yield "global"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
            name in CLASS_MAKERS
        ):
            yield f"{name} called"


def _special(name: str) -> bool:
    return (
        name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in SPECIAL
    )


def _where(text: str, line: int) -> str:
    return f": `{text.splitlines()[line - 1].strip()[:60]}`"

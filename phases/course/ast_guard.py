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

from phases.course.blanks import graft

_RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
MODULES = frozenset(_RULES["modules"].split())
BUILTINS = frozenset(_RULES["builtins"].split())
ATTRIBUTES = frozenset(_RULES["attributes"].split())
CLASS_MAKERS = frozenset(_RULES["class_makers"].split())
SPECIAL = frozenset(_RULES["special"].split())
LONGEST = 100_000
"""Characters of a file."""


def refusal(reference: str, student: str, names: Collection[str]) -> str:
    """Return the reason why a student's functions must not be run, such as "uses eval"; "" if there is none.

    reference, student: source texts of the exercise's file; what the reference uses is allowed.
    names: qualified names of the exercise's functions.
    """
    if len(student) > LONGEST:
        return f"the file has {len(student)} characters, more than {LONGEST}"
    taken = graft(reference, student, names)
    ours = ast.parse(reference)
    known = {use for node in ast.walk(ours) for use in _uses_of(node)}
    known |= {
        f"changes .{node.attr}" for node in ast.walk(ours) if isinstance(node, ast.Attribute)
    }
    for node in ast.walk(ast.parse(taken)):
        for use in _uses_of(node):
            if use not in known:
                line = taken.splitlines()[node.lineno - 1].strip()[:60]  # type: ignore[attr-defined]
                return f"it {use}, which no exercise needs: `{line}`"
    return ""


def _uses_of(node: ast.AST) -> Iterator[str]:
    """Yield texts about what a node of a syntax tree uses and no exercise needs: `imports os`, `uses
    eval`.
    """
    match node:
        case ast.Import(names=names):
            yield from (
                f"imports {alias.name}" for alias in names if alias.name not in MODULES
            )
        case ast.ImportFrom(module=module, names=names):
            if module not in MODULES:
                yield f"imports {module}"
            found = [alias.name for alias in names if _leads_out(alias.name, "_*")]
            yield from (f"imports {name} of {module}" for name in found)
        case ast.Name(id=name) if name in BUILTINS:
            yield f"uses {name}"
        case ast.Name(id=name) | ast.Attribute(attr=name) if _leads_out(name, ""):
            yield f"uses {name}"
        case ast.Attribute(attr=name, value=ast.Name(id=owner)) if (
            owner in MODULES and name[0] == "_"
        ):
            yield f"uses {owner}.{name}"
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del(), value=owner):
            if ast.unparse(owner) != "self":
                yield f"changes .{name}"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _leads_out(
            name, ""
        ):
            yield f"defines {name}"
        case ast.MatchClass(kwd_attrs=names):
            yield from (f"uses {name}" for name in names if _leads_out(name, ""))
        case ast.Constant(value=str(name)) if _is_special(name):
            yield f"uses {name!r}"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
            name in CLASS_MAKERS
        ):
            yield f"calls {name}"
        case ast.Global():
            yield "uses global"


def _leads_out(name: str, beginnings: str) -> bool:
    """Return True for a name that gives access to more than an exercise needs.

    Such are names in `ATTRIBUTES`, special names `__x__`, and names that begin with a character of
    `beginnings`.
    """
    return name in ATTRIBUTES or _is_special(name) or name[0] in beginnings


def _is_special(name: str) -> bool:
    return (
        name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in SPECIAL
    )

"""The allowed names of an exercise: nothing in it needs the system, the tests, or another place's code.

This reads the source and runs nothing. What the reference's own file does is allowed; what leads elsewhere is
refused by name. It is no sandbox (docs/coursework.md tells what remains), and not the only wall: `checking`
judges values outside of the student's process, and holds canaries that must fail.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Collection, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from phases.course.blanks import Function, graft

_RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


_NAMES = [
    "plain",
    "parts",
    "ways",
    "files",
    "unwanted",
    "reaching",
    "special",
    "bases",
    "makers",
    "changing",
]
PLAIN, PARTS, WAYS, FILES, UNWANTED, REACHING, SPECIAL, BASES, MAKERS, CHANGING = (
    frozenset(_RULES[name].split()) for name in _NAMES
)
CHANGED = "= "
LONGEST = 100_000
"""Characters of a file."""


def refusal(reference: str, student: str, names: Collection[str]) -> str:
    """Return why a student's functions are not run, or nothing.

    names: qualified names of the functions that count.
    """
    if len(student) > LONGEST:
        return f"the file has {len(student)} characters, more than {LONGEST}"
    taken = graft(reference, student, names)
    ours, theirs = _parsed(reference), _parsed(taken)
    allowed = PLAIN | {name for name, _ in _imports(ours)}
    for name, line in _imports(theirs):
        if name not in allowed:
            return f"it imports {name}, which the reference does not need{_where(taken, line)}"
    known = {found for found, _ in _ways(ours)}
    for way, line in _ways(theirs):
        if way not in known and _leads_away(way, known):
            does = "changes" if way.startswith(CHANGED) else "uses"
            return f"it {does} {way.removeprefix(CHANGED)}, which no exercise needs{_where(taken, line)}"
    used = {told for told, _ in _told(ours, frozenset())}
    for told, line in _told(theirs, _data(ours)):
        if told not in used:
            return f"it uses {told}, which no exercise needs{_where(taken, line)}"
    return ""


def _parsed(source: str) -> ast.Module:
    """A module's tree, in which the text of an annotation is code as well: some libraries evaluate it."""
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for name in ("annotation", "returns"):
            for part in ast.walk(getattr(node, name, None) or ast.Pass()):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    with suppress(
                        SyntaxError, ValueError
                    ):  # what cannot be read cannot be run
                        code = ast.parse(part.value.strip(), mode="eval").body
                        tree.body.append(ast.copy_location(ast.Expr(code), part))
                        for each in ast.walk(code):
                            ast.copy_location(each, part)
    return tree


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module, line) of each import; for a project's module the whole name, for a library its first part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _short(alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield _short(name), node.lineno
            away = (
                REACHING | {"*"} | (frozenset() if name in PLAIN else sys.stdlib_module_names)
            )
            yield from (
                (f"{name}.{alias.name}", node.lineno)
                for alias in node.names
                if alias.name in away
            )


def _short(name: str) -> str:
    first = name.split(".")[0]
    return first if first in PLAIN else name


def _ways(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of all that is taken from an import, or of the import itself where it is a value.

    `CHANGED` stands before what is assigned or deleted.
    """
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if name not in PARTS:
                    yield name, node.lineno
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    changed = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and not _loads(node)
    }
    hidden = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not _loads(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            first, *rest = _chain(node)
            if first in names and (rest or first not in hidden):
                does = CHANGED if id(node) in changed or not _loads(node) else ""
                yield does + ".".join([names[first], *rest]), node.lineno


def _loads(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Load)


def _chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; nothing usable for what begins otherwise."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _leads_away(way: str, known: Collection[str]) -> bool:
    """Return whether a dotted name is a module where a value should be, or goes through an unneeded one."""
    parts = way.split(".")
    if way.startswith(CHANGED) or way in PLAIN | PARTS or parts[0] == "sys":
        return True
    if parts[0] not in PLAIN:  # the reference has it for a purpose
        part_of = any(way.startswith(other + ".") for other in known if "." in other)
        return way not in WAYS and (not part_of or parts[-1] in CHANGING)
    if parts[0] in ("torch", "numpy") and FILES.intersection(parts):
        return True
    for count in range(2, len(parts) + 1):
        head = ".".join(parts[:count])
        if any(other == head or other.startswith(head + ".") for other in known):
            continue
        if parts[count - 1].startswith("_") or (
            head not in PARTS and _is_module(parts[:count])
        ):
            return True
    return False


def _is_module(parts: list[str]) -> bool:
    """Return whether the last of these is a module, as far as that is seen without importing anything."""
    spec = find_spec(parts[0])
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(folder, *parts[1:])
        if place.is_dir() or any(place.parent.glob(f"{parts[-1]}.*")):
            return True
    return parts[-1].lstrip("_") in sys.stdlib_module_names - PLAIN | {
        "torch",
        "numpy",
        "triton",
    }


def _data(tree: ast.Module) -> frozenset[str]:
    """Return the attributes that hold data: read, written or declared in the reference, and no functions."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    data, functions = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if id(node) not in called:
                data.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                data.add(name)
            case ast.FunctionDef(name=name):
                functions.add(name)
    return frozenset(data - functions)


def _told(tree: ast.Module, data: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield (what, line) of all that reaches out of what an exercise is about.

    data: the attributes that may be assigned to, of other objects than `self`.
    """
    parents = {
        id(inner): node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)
    }
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = {each.name for each in definitions}
    functions = [
        part for each in definitions for part in each.body if isinstance(part, Function)
    ]
    methods = {
        each.name for each in functions if not each.decorator_list
    }  # those that need an object
    owners = {id(each.args.args[0]) for each in functions if each.args.args}

    def reaches(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Name(id=("getattr" | "type") as name):
                yield f"{name} in {ast.unparse(parents[id(node)])[:40]}"
            case ast.Name(id=name) if name in UNWANTED or _special(name):
                yield name
            case ast.Name(id="self", ctx=ast.Store() | ast.Del()):
                yield "self for something else"
            case ast.arg(arg="self") if id(node) not in owners:
                yield "self outside of a method"
            case ast.Attribute(attr=name) if {name, name.lstrip("_")} & REACHING or _special(
                name
            ):
                yield "." + name
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del(), value=owner) if (
                name not in data
            ):
                if not (isinstance(owner, ast.Name) and owner.id == "self"):
                    yield f"an assignment to .{name} of another object"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _special(
                name
            ):
                yield f"def {name}"
            case ast.MatchClass(kwd_attrs=found):
                yield from ("." + name for name in found if name in REACHING or _special(name))
            case ast.Constant(value=str(name)) if _special(name):
                yield repr(name)
            case ast.Global():
                yield "global"
            case ast.ClassDef(bases=bases, keywords=keywords):
                yield from (f"{each.arg}= of a class" for each in keywords)
                for base in bases:
                    name = _chain(base.value if isinstance(base, ast.Subscript) else base)[-1]
                    if name not in BASES | classes:
                        yield f"{name} as a base"
            case ast.Call(func=func) if (name := _chain(func)[-1]) in MAKERS:
                yield f"{name} called"
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=args):
                if (
                    owner in classes
                    and name in methods
                    and args
                    and ast.unparse(args[0]) != "self"
                ):
                    yield f"{owner}.{name} of another object"

    for node in ast.walk(tree):
        for told in reaches(node):
            yield told, node.lineno  # type: ignore[attr-defined]


def _special(name: str) -> bool:
    return (
        name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in SPECIAL
    )


def _where(text: str, line: int) -> str:
    return f": `{text.splitlines()[line - 1].strip()[:60]}`"

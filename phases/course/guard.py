"""What an exercise may use: nothing in it needs the system, the tests, or another place's code.

This reads the source and runs nothing. It is no sandbox: it makes honest work the easier way. What it cannot
stop is in docs/coursework.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from phases.course.blanks import graft


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PLAIN = _words(
    """
    __future__ abc bisect collections contextlib copy dataclasses enum functools heapq itertools math numpy
    operator random re string torch triton typing
    """
)
"""Modules that anybody may import, beside those that the reference's file imports."""
PARTS = _words(
    """
    collections.abc numpy.fft numpy.linalg numpy.random numpy.typing torch.fft torch.linalg torch.nn
    torch.nn.functional torch.nn.init torch.special triton.language triton.language.math
    """
)
"""Modules inside of them that anybody may use; others hold the system, the tests' judges, or a way there."""
UNWANTED = _words(
    """
    __import__ breakpoint compile delattr eval exec exit globals locals open quit setattr vars
    """
)
REACHING = _words(
    """
    os sys subprocess socket builtins bltns importlib ctypes gc inspect signal modules _exit f_back f_globals
    f_locals f_builtins tb_frame tb_next gi_frame cr_frame ag_frame fork system popen pickle marshal
    load_library hub utils_cpp _C from_file fromfile tofile memmap attrgetter methodcaller get_type_hints
    ForwardRef Formatter make_dataclass _pytest pytest subprocess_exec subprocess_shell create_subprocess_exec
    create_subprocess_shell create_connection open_connection
    """
)
"""Attributes that lead out of what may be used: `torch.os`, `random._os`, `operator.attrgetter`."""
FILES = _words("load loadtxt genfromtxt fromregex save savetxt savez savez_compressed")
"""What PyTorch and numpy read and write files with."""
SPECIAL = _words(
    """
    __init__ __post_init__ __len__ __name__ __call__ __class__ __iter__ __next__ __enter__ __exit__ __repr__
    __contains__ __getitem__ __setitem__ __lt__ __bool__ __hash__ __slots__
    """
)
"""Not `__eq__`: an answer that is equal to everything is none."""
CHANGED = "= "
LONGEST = 100_000
"""Characters of a file."""


def refusal(reference: str, student: str, names: Collection[str]) -> str:
    """Why a student's functions are not run, or nothing. `names` are the qualified names that count."""
    if len(student) > LONGEST:
        return f"the file has {len(student)} characters, more than {LONGEST}"
    ours, taken = ast.parse(reference), graft(reference, student, names)
    theirs = ast.parse(taken)
    allowed = PLAIN | {name for name, _ in _imports(ours)}
    for name, line in _imports(theirs):
        if name not in allowed:
            return f"it imports {name}, which the reference does not need{_where(taken, line)}"
    used = {name for node in ast.walk(ours) for name in _names(node)}
    known = {found for found, _ in _ways(ours)}
    for way, line in _ways(theirs):
        if way not in known and _leads_away(way, known):
            does = "changes" if way.startswith(CHANGED) else "uses"
            return f"it {does} {way.removeprefix(CHANGED)}, which no exercise needs{_where(taken, line)}"
    for node in ast.walk(theirs):
        found = next((name for name in _names(node) if name not in used and _reaches(node, name)), "")
        if found:
            return f"it uses {found}, which no exercise needs{_where(taken, node.lineno)}"  # type: ignore[attr-defined]
    return ""


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(module, line) of each import; for a project's module the whole name, for a library its first part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _short(alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield _short(name), node.lineno
            for alias in node.names:
                if alias.name in REACHING or (alias.name in sys.stdlib_module_names and name not in PLAIN):
                    yield f"{name}.{alias.name}", node.lineno


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
    hidden = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not _loads(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            first, *rest = _chain(node)
            if first in names and (rest or first not in hidden):
                yield CHANGED * (not _loads(node)) + ".".join([names[first], *rest]), node.lineno


def _loads(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def _chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; nothing usable for what begins otherwise."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _leads_away(way: str, known: Collection[str]) -> bool:
    """Whether a dotted name is a module where a value should be, or goes through one that nobody needs."""
    if way.startswith(CHANGED):
        return True
    parts = way.split(".")
    if way in PLAIN | PARTS or parts[0] == "sys":
        return True
    if parts[0] in sys.stdlib_module_names and parts[0] not in PLAIN:  # the reference has it for a purpose
        return len(parts) < 2 or not parts[1][:1].isalpha() or parts[1] in sys.stdlib_module_names
    if parts[0] in ("torch", "numpy") and FILES.intersection(parts):
        return True
    for count in range(2, len(parts) + 1):
        head = ".".join(parts[:count])
        if any(other == head or other.startswith(head + ".") for other in known):
            continue
        if head not in PARTS and _is_module(parts[:count]):
            return True
    return False


def _is_module(parts: list[str]) -> bool:
    """Whether the last of these is a module, as far as that is seen without importing anything."""
    if parts[0] not in PLAIN:
        return parts[-1] in sys.stdlib_module_names
    spec = find_spec(parts[0])
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(folder, *parts[1:])
        if place.is_dir() or any(place.parent.glob(f"{parts[-1]}.*")):
            return True
    return parts[-1].lstrip("_") in sys.stdlib_module_names - PLAIN | {"torch", "numpy", "triton"}


def _names(node: ast.AST) -> Iterator[str]:
    """The names that a node reads, binds or reaches for."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield "." + node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield f"def {node.name}"
    elif isinstance(node, ast.MatchClass):
        yield from ("." + name for name in node.kwd_attrs)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _special(node.value):
        yield repr(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "getattr":
            name = (
                node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "__"
            )
            plain = isinstance(name, str) and not name.startswith("__") and name not in REACHING
            yield "getattr" if plain else "getattr of such a name"
        elif node.func.id == "type" and len(node.args) > 1:
            yield "type of three"


def _reaches(node: ast.AST, name: str) -> bool:
    """Whether a name reaches out of what an exercise is about."""
    bare = name.removeprefix("def ").removeprefix(".").strip("'")
    if isinstance(node, ast.Name):
        return bare in UNWANTED or _special(bare)
    if isinstance(node, ast.Attribute | ast.MatchClass):
        return bare in REACHING or bare.lstrip("_") in REACHING or _special(bare)
    if isinstance(node, ast.Call):
        return name != "getattr"
    return _special(bare)


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in SPECIAL


def _where(text: str, line: int) -> str:
    return f": `{text.splitlines()[line - 1].strip()[:60]}`"

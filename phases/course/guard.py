"""What an exercise may use: nothing in it needs the system, the tests, or another place's code.

This reads the source and runs nothing. What the reference's own file does is allowed; what leads elsewhere is
refused by name. It is no sandbox (docs/coursework.md tells what remains), and not the only wall: `checking`
judges values outside of the student's process, and holds canaries that must fail.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
WAYS = _words(
    """
    time.monotonic time.perf_counter time.perf_counter_ns time.sleep time.time asyncio.CancelledError
    asyncio.Condition asyncio.Event asyncio.FIRST_COMPLETED asyncio.Future asyncio.Lock asyncio.Queue
    asyncio.QueueEmpty asyncio.QueueFull asyncio.Semaphore asyncio.Task asyncio.TaskGroup asyncio.TimeoutError
    asyncio.create_task asyncio.current_task asyncio.gather asyncio.get_running_loop asyncio.shield
    asyncio.sleep asyncio.timeout asyncio.wait asyncio.wait_for
    """
)
"""Of other modules: what the reference uses of them, and these."""
UNWANTED = _words(
    """
    __import__ breakpoint compile delattr eval exec exit globals locals open quit setattr vars
    """
)
REACHING = _words(
    """
    os sys subprocess socket builtins bltns importlib ctypes gc inspect signal modules _exit f_back f_globals
    f_locals f_builtins tb_frame tb_next gi_frame cr_frame ag_frame fork system popen pickle marshal
    load_library hub utils_cpp _C from_file fromfile tofile dump dumps memmap DataSource attrgetter
    methodcaller get_type_hints ForwardRef Formatter make_dataclass defstruct new_class singledispatch
    singledispatchmethod update_wrapper wraps ABCMeta EnumMeta EnumType global_enum _convert_ _pytest pytest
    runtest subprocess_exec subprocess_shell create_subprocess_exec create_subprocess_shell create_connection
    open_connection set_default_dtype redirect_stdout redirect_stderr
    """
)
"""Names that lead out of what may be used: `torch.os`, `random._os`, `operator.attrgetter`."""
FILES = _words("load loadtxt genfromtxt fromregex save savetxt savez savez_compressed")
"""What PyTorch and numpy read and write files with."""
SPECIAL = _words(
    """
    __init__ __post_init__ __len__ __name__ __call__ __iter__ __next__ __enter__ __exit__ __repr__
    __getitem__ __setitem__ __lt__ __hash__ __slots__
    """
)
"""Not `__eq__`: an answer that is equal to everything is none."""
BASES = _words("ABC Enum Exception Generic KeyError Module NamedTuple Protocol TypedDict ValueError object")
"""Bases of a class, beside those in the file: a number that compares as it likes is none."""
MAKERS = _words("Enum Flag IntEnum IntFlag NamedTuple StrEnum TypedDict type")
"""Called, they make classes with names that are computed."""
CHANGING = _words("add append clear extend insert pop popitem remove setdefault update")
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
                    with suppress(SyntaxError, ValueError):  # what cannot be read cannot be run
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
            for alias in node.names:
                if alias.name in REACHING | {"*"} or (
                    alias.name in sys.stdlib_module_names and name not in PLAIN
                ):
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
    changed = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and not _loads(node)
    }
    hidden = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not _loads(node)}
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
        if parts[count - 1].startswith("_") or (head not in PARTS and _is_module(parts[:count])):
            return True
    return False


def _is_module(parts: list[str]) -> bool:
    """Return whether the last of these is a module, as far as that is seen without importing anything."""
    spec = find_spec(parts[0])
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        place = Path(folder, *parts[1:])
        if place.is_dir() or any(place.parent.glob(f"{parts[-1]}.*")):
            return True
    return parts[-1].lstrip("_") in sys.stdlib_module_names - PLAIN | {"torch", "numpy", "triton"}


def _data(tree: ast.Module) -> frozenset[str]:
    """Return the attributes that hold data: read, written or declared in the reference, and no functions."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in called
    }
    found |= {
        part.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    return frozenset(found - {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)})


@dataclass(frozen=True)
class _Names:
    """The names of a file that decide what a place in it means."""

    data: frozenset[str]
    """Attributes that may be assigned to, of other objects than `self`."""
    literal: frozenset[str]
    """Variables that only loops over literal names bind."""
    classes: frozenset[str]
    methods: frozenset[str]
    """Without those that need no object."""
    owners: frozenset[int]
    """The first parameters of methods, by `id`."""


def _told(tree: ast.Module, data: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield (what, line) of all that reaches out of what an exercise is about.

    data: the attributes that may be assigned to, of other objects than `self`.
    """
    parents = {id(inner): node for node in ast.walk(tree) for inner in ast.iter_child_nodes(node)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [
        node
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    names = _Names(
        data,
        _over_literals(tree),
        frozenset(each.name for each in classes),
        frozenset(each.name for each in methods if not each.decorator_list),
        frozenset(id(each.args.args[0]) for each in methods if each.args.args),
    )
    for node in ast.walk(tree):
        for told in (
            *_of_name(node, parents.get(id(node)), names),
            *_of_shape(node, parents.get(id(node)), names),
        ):
            yield told, node.lineno  # type: ignore[attr-defined]


def _of_name(node: ast.AST, parent: ast.AST | None, names: _Names) -> Iterator[str]:
    match node:
        case ast.Name(id=("getattr" | "type") as name) if not (
            isinstance(parent, ast.Call) and parent.func is node
        ):
            if not (name == "type" and isinstance(parent, ast.Subscript) and parent.value is node):
                yield f"{name} as a value"
        case ast.Name(id=name) if name in UNWANTED or _special(name):
            yield name
        case ast.Name(id="self", ctx=ast.Store() | ast.Del()):
            yield "self for something else"
        case ast.arg(arg="self") if id(node) not in names.owners:
            yield "self outside of a method"
        case ast.Attribute(attr=name) if name in REACHING or name.lstrip("_") in REACHING or _special(name):
            yield "." + name
        case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del(), value=owner) if name not in names.data:
            if not (isinstance(owner, ast.Name) and owner.id == "self"):
                yield f"an assignment to .{name} of another object"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _special(name):
            yield f"def {name}"
        case ast.MatchClass(kwd_attrs=found):
            yield from ("." + name for name in found if name in REACHING or _special(name))
        case ast.Constant(value=str(name)) if _special(name):
            yield repr(name)
        case ast.Global():
            yield "global"


def _of_shape(node: ast.AST, parent: ast.AST | None, names: _Names) -> Iterator[str]:
    match node:
        case ast.ClassDef(bases=bases, keywords=keywords):
            yield from (f"{each.arg}= of a class" for each in keywords)
            for base in bases:
                name = _chain(base.value if isinstance(base, ast.Subscript) else base)[-1]
                if name not in BASES | names.classes:
                    yield f"{name} as a base"
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            if name in REACHING or _special(name):
                yield f"getattr of {name}"
        case ast.Call(func=ast.Name(id="getattr"), args=args):
            if len(args) < 2 or not isinstance(args[1], ast.Name) or args[1].id not in names.literal:
                yield "getattr of a computed name"
        case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id="self")]):
            pass
        case ast.Call(func=ast.Name(id="type"), args=[_]):
            if not (
                isinstance(parent, ast.Compare) or (isinstance(parent, ast.Attribute) and _reads_name(parent))
            ):
                yield "type(...) for more than its name"
        case ast.Call(func=func, args=args) if (name := _chain(func)[-1]) in MAKERS:
            yield f"{name} called"
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=args):
            if owner in names.classes and name in names.methods and args and ast.unparse(args[0]) != "self":
                yield f"{owner}.{name} of another object"


def _reads_name(node: ast.Attribute) -> bool:
    return node.attr == "__name__" and _loads(node)


def _over_literals(tree: ast.Module) -> frozenset[str]:
    """Return the names that only loops over literal names bind: `for name in ("first", "last")`."""
    loops, bound = [], []
    for node in ast.walk(tree):
        match node:
            case (
                ast.For(target=ast.Name(id=name), iter=over)
                | ast.comprehension(target=ast.Name(id=name), iter=over)
            ):
                items = over.elts if isinstance(over, ast.Tuple | ast.List) else [over]
                texts = [item.value if isinstance(item, ast.Constant) else None for item in items]
                if all(
                    isinstance(text, str) and text not in REACHING and not _special(text) for text in texts
                ):
                    loops.append(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(asname=str(name)):
                bound.append(name)
            case (
                ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name))
            ):
                bound.append(name)
            case ast.ExceptHandler(name=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.append(name)
            case ast.alias(name=name):
                bound.append(name)
    return frozenset(name for name in loops if bound.count(name) == loops.count(name))


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in SPECIAL


def _where(text: str, line: int) -> str:
    return f": `{text.splitlines()[line - 1].strip()[:60]}`"

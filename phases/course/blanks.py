"""Replace function bodies in source text; everything around them stays as it is, comments included."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

SHAPE = re.compile(r"#.*(\[[^\]]*\b[A-Z]{1,2}\b[^\]]*\]|\b[A-Z]{1,2}, [A-Z]{1,2}\b)")
"""Matches a comment with a tensor's shape, such as `# [T, H, D]`."""
MASKED = "held back, not to be written"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, list[str]]
"""First and last line, counted from 1, and the lines in their place; the last may be before the first."""


class NotThere(Exception):
    """Raised if a file lacks a function that it should have, or has it in another form."""


def functions(source: str) -> dict[str, Function]:
    """Return {qualified name: syntax tree} of a module's functions and its classes' methods.

    A qualified name is such as `BlockAllocator.allocate`.

    Raises:
        SyntaxError: the source is not valid Python.
    """

    def visit(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")

    return dict(visit(ast.parse(source).body, ""))


def lines_of(source: str, node: ast.stmt) -> list[str]:
    """Return the lines of a statement in `source`, decorators included."""
    return source.split("\n")[_first(node) - 1 : node.end_lineno]


def _first(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, Function | ast.ClassDef) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _edited(source: str, edits: Iterable[Edit]) -> str:
    lines = source.split("\n")
    for first, last, new in sorted(edits, reverse=True):
        lines[first - 1 : last] = new
    return "\n".join(lines)


def blank(source: str, names: Mapping[str, str]) -> str:
    """Return `source` with blank functions: a blank one keeps signature, docstring, shapes and raised
    errors, the last two as comments, and raises `NotImplementedError`.

    names: qualified names of functions to blank -> the exercise's id, or "" for a function that students
        neither see nor write.

    Raises:
        NotThere: there is no function of one of these names.
    """
    there = functions(source)
    if missing := set(names) - set(there):
        raise NotThere(f"there is no {', '.join(sorted(missing))}")
    return _edited(
        source, [_blanked(source, there[name], exercise) for name, exercise in names.items()]
    )


def message_of(exercise: str) -> str:
    """Return the message of the error that a blank function raises. exercise: its id, such as `05.3`."""
    return f"exercise {exercise}" if exercise else MASKED


def _blanked(source: str, node: Function, exercise: str) -> Edit:
    lines = source.split("\n")
    first = node.body[0]
    last = node.end_lineno or 0
    if ast.get_docstring(node) is not None:
        begin = (first.end_lineno or 0) + 1
    else:  # behind the colon of the signature: comments go as well
        begin = first.lineno
        while not re.match(r"(?!\s*#).*:\s*(#.*)?$", lines[begin - 2]):
            begin -= 1
    comments = [*_shapes(lines[begin - 1 : last]), *_raised(source, node)] if exercise else []
    made = [*comments, f'raise NotImplementedError("{message_of(exercise)}")']
    return begin, last, [" " * first.col_offset + line for line in made]


def _shapes(lines: Iterable[str]) -> Iterator[str]:
    """Yield a comment for each line of code that says a tensor's shape, such as `# scores: [H, T]`."""
    for line in lines:
        code, hash_, comment = line.partition("  # ")
        if SHAPE.search(hash_ + comment):
            made = re.match(
                r"\s*([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*)\s*(?::[^=]+)?=[^=]", code
            )
            what = f"{made[1]}: " if made else "returned: " if "return " in code else ""
            yield f"# {what}{comment.strip()}"


def _raised(source: str, node: Function) -> Iterator[str]:
    """Yield a comment for each error that a function raises, such as `# raised: ValueError("...")`.

    Tests may compare these messages. source: the file's text. node: the function in it.
    """
    found = [part.exc for part in ast.walk(node) if isinstance(part, ast.Raise)]
    calls = sorted(
        (call for call in found if isinstance(call, ast.Call)), key=lambda call: call.lineno
    )
    segments = (
        re.sub(r"\s+", " ", ast.get_source_segment(source, call) or "") for call in calls
    )
    texts = (re.sub(r"(?<=\() |,? (?=\)$)", "", text) for text in segments)
    yield from (f"# raised: {text}" for text in dict.fromkeys(texts))


def is_blank(source: str, name: str, exercise: str) -> bool:
    """Return True if a student has left a function blank: it only raises the error that a blank one raises.

    name: qualified name of the function in `source`; False if it is not there. exercise: id of its exercise.
    """
    node = functions(source).get(name)
    if node is None:
        return False
    left = ast.unparse(node.body[-1]) == f"raise NotImplementedError({message_of(exercise)!r})"
    return left and len(node.body) <= (1 if ast.get_docstring(node) is None else 2)


def graft(reference: str, student: str, names: Collection[str]) -> str:
    """Return the reference's source with a student's functions instead of its own, and what they need.

    Added as well are imports, functions, classes, constants and methods of the student's module whose names
    the reference does not have. Other changes of the student are dropped.

    reference, student: texts of the two files. names: qualified names of the functions to replace.

    Raises:
        NotThere: a function is missing, takes other arguments, or is indented otherwise.
        SyntaxError: the student's text is not valid Python.
    """
    theirs = functions(student)
    ours = functions(reference)
    tree = ast.parse(reference)
    if missing := sorted(set(names) - set(theirs)):
        raise NotThere(f"{', '.join(missing)} is missing")
    edits = []
    for name in names:
        mine, new = ours[name], theirs[name]
        if _outside(new) != _outside(mine):
            raise NotThere(
                f"{name} takes other arguments, or has other decorators, than its callers expect: "
                f"def {mine.name}({ast.unparse(mine.args)})"
            )
        if new.col_offset != mine.col_offset:
            raise NotThere(
                f"{name} begins in column {new.col_offset}, and not in {mine.col_offset}"
            )
        # Decorators are the reference's: a kernel stays one.
        edits.append(
            (
                mine.lineno,
                mine.end_lineno or 0,
                student.split("\n")[new.lineno - 1 : new.end_lineno],
            )
        )
    classes = {
        node.name: node.end_lineno or 0 for node in tree.body if isinstance(node, ast.ClassDef)
    }
    for name, node in theirs.items():
        owner, _, method = name.rpartition(".")
        if owner in classes and name not in ours and not method.startswith("__"):
            edits.append((classes[owner] + 1, classes[owner], ["", *lines_of(student, node)]))
    known = {name for other in tree.body for name in names_of(other)}
    at = next(_first(node) for node in tree.body if isinstance(node, Function | ast.ClassDef))
    top = []
    for statement in ast.parse(student).body:
        bound = names_of(statement)
        if bound and not known & bound:
            whole = isinstance(statement, Function | ast.ClassDef)
            text = ast.get_source_segment(student, statement) or ""
            top += (
                [*lines_of(student, statement), "", ""] if whole else [*text.split("\n"), ""]
            )
    return _edited(reference, [*edits, (at, at - 1, top)])


def _outside(node: Function) -> tuple[object, ...]:
    """Return a function's interface: whether it is asynchronous, its decorators, its parameters.

    Functions with equal interfaces can replace each other.
    """
    given = copy.deepcopy(node.args)
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return isinstance(node, ast.AsyncFunctionDef), decorators, ast.unparse(given)


def names_of(statement: ast.stmt) -> set[str]:
    """Return the names that a definition, an assignment or an import binds; empty for other statements."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Assign():
            return {ast.unparse(target) for target in statement.targets}
        case ast.AnnAssign():
            return {ast.unparse(statement.target)}
        case ast.Import() | ast.ImportFrom():
            return {
                alias.asname or alias.name for alias in statement.names if alias.name != "*"
            }
    return set()


def without(source: str, names: Collection[str]) -> str:
    """Return `source` without the functions `names` (qualified), such as hidden tests."""
    removed = [node for name, node in functions(source).items() if name in names]
    return _edited(source, [(_first(node), node.end_lineno or 0, []) for node in removed])

"""Surgery on source text: bodies out, bodies in. Everything around them stays as it is, comments included."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping

import libcst as cst

SHAPE = re.compile(r"#.*(\[[^\]]*\b[A-Z]{1,2}\b[^\]]*\]|\b[A-Z]{1,2}, [A-Z]{1,2}\b)")
"""A comment that tells a tensor's shape: `# [T, H, D]`."""
MASKED = "held back, not to be written"


class NotThere(Exception):
    """A function that ought to be in a file is not."""


def functions(source: str) -> dict[str, cst.FunctionDef]:
    """The functions of a module and the methods of its classes, by qualified name.

    Raises:
        cst.ParserSyntaxError: it is no Python.
    """
    return dict(_functions(cst.parse_module(source).body, ""))


def _functions(
    body: Collection[cst.BaseStatement | cst.BaseSmallStatement], prefix: str
) -> Iterator[tuple[str, cst.FunctionDef]]:
    for node in body:
        if isinstance(node, cst.FunctionDef):
            yield prefix + node.name.value, node
        elif isinstance(node, cst.ClassDef):
            yield from _functions(node.body.body, f"{prefix}{node.name.value}.")


def text_of(node: cst.CSTNode) -> str:
    """A node's source text."""
    return cst.Module(body=()).code_for_node(node)


class _Editing(cst.CSTTransformer):
    """Puts `replaced(name, node)` in the place of each function, and adds methods to classes.

    Names are qualified: `BlockAllocator.allocate`.
    """

    def __init__(
        self,
        replaced: Callable[[str, cst.FunctionDef], cst.BaseStatement | cst.RemovalSentinel],
        methods: Mapping[str, list[cst.FunctionDef]] | None = None,
    ) -> None:
        super().__init__()
        self.replaced, self.methods = replaced, methods or {}
        self.path: list[str] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self.path.append(node.name.value)
        return True

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.BaseStatement:
        added = self.methods.get(".".join(self.path), ())
        self.path.pop()
        body = updated_node.body
        return updated_node.with_changes(body=body.with_changes(body=[*body.body, *added]))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        return self.replaced(".".join([*self.path, updated_node.name.value]), updated_node)


def blank(source: str, names: Mapping[str, str]) -> str:
    """Source without the bodies of some functions. Signature, docstring, shapes and what is raised stay.

    names: qualified name -> the exercise's id, or "" for what is only held back.

    Raises:
        NotThere: there is no function of one of these names.
    """
    missing = set(names)

    def blanked(name: str, node: cst.FunctionDef) -> cst.FunctionDef:
        missing.discard(name)
        return node.with_changes(body=_blank_body(node, names[name])) if name in names else node

    made = cst.parse_module(source).visit(_Editing(blanked)).code
    if missing:
        raise NotThere(f"there is no {', '.join(sorted(missing))}")
    return made


def message_of(exercise: str) -> str:
    """Return the message of a blank function when it is called."""
    return f"exercise {exercise}" if exercise else MASKED


def _blank_body(node: cst.FunctionDef, exercise: str) -> cst.IndentedBlock:
    kept = []
    first = node.body.body[0]
    if node.get_docstring() is not None and isinstance(first, cst.SimpleStatementLine):
        kept.append(first)
    told = [*_shapes(node), *_raised(node)] if exercise else []
    comments = [cst.EmptyLine(comment=cst.Comment(text)) for text in told]
    end = cst.parse_statement(f'raise NotImplementedError("{message_of(exercise)}")')
    assert isinstance(end, cst.SimpleStatementLine)
    assert isinstance(node.body, cst.IndentedBlock)
    return node.body.with_changes(body=[*kept, end.with_changes(leading_lines=comments)], footer=[])


def _shapes(node: cst.FunctionDef) -> Iterator[str]:
    """Comments on the shapes of what a body makes: `# scores: [H, T]`."""
    for line in text_of(node.body).splitlines():
        code, hash_, comment = line.partition("  # ")
        if hash_ and SHAPE.search("# " + comment):
            made = re.match(r"\s*([A-Za-z_][\w.]*(?:, [A-Za-z_][\w.]*)*)\s*(?::[^=]+)?=[^=]", code)
            what = f"{made[1]}: " if made else "returned: " if "return " in code else ""
            yield f"# {what}{comment.strip()}"


def _raised(node: cst.FunctionDef) -> Iterator[str]:
    """Comments on the errors that a body raises: who calls it may read their words."""

    from libcst import matchers as m  # takes 0.4 s

    calls = [found.exc for found in m.findall(node.body, m.Raise(exc=m.Call()))]  # type: ignore[attr-defined]
    texts = (re.sub(r"(?<=\() |,? (?=\)$)", "", re.sub(r"\s+", " ", text_of(call))) for call in calls)
    yield from (f"# raised: {text}" for text in dict.fromkeys(texts))


def is_blank(source: str, name: str, exercise: str) -> bool:
    """Return True if a student has left a function as it was made: all that it does is to raise.

    Raises:
        NotThere: the function is gone.
    """
    node = functions(source).get(name)
    if node is None:
        raise NotThere(f"{name} is gone")
    last = node.body.body[-1]
    left = text_of(last).strip().splitlines()[-1:] == [f'raise NotImplementedError("{message_of(exercise)}")']
    return left and len(node.body.body) <= (1 if node.get_docstring() is None else 2)


def graft(reference: str, student: str, names: Collection[str]) -> str:
    """The reference with a student's functions in place of its own, and what is new beside them.

    What else was changed is not taken. New are imports, functions, classes and constants of the module and
    methods of a class, under names that the reference does not have.

    names: qualified names of the functions that count.

    Raises:
        NotThere: a function is gone, or takes other arguments.
        cst.ParserSyntaxError: the student's text is no Python.
    """
    theirs, tree = functions(student), cst.parse_module(reference)
    ours = dict(_functions(tree.body, ""))
    gone = sorted(set(names) - set(theirs))
    if gone:
        raise NotThere(f"{', '.join(gone)} is gone")
    for name in names:
        if _outside(theirs[name]) != _outside(ours[name]):
            raise NotThere(
                f"{name} takes other arguments, or has other decorators, than its callers expect: "
                f"def {ours[name].name.value}({text_of(ours[name].params).strip()})"
            )

    def taken(name: str, node: cst.FunctionDef) -> cst.FunctionDef:
        # Decorators and parameters are the reference's: others call it, and a kernel stays one.
        return node.with_changes(body=theirs[name].body) if name in names else node

    methods: dict[str, list[cst.FunctionDef]] = {}
    for name, node in theirs.items():
        owner, _, method = name.rpartition(".")
        if owner and name not in ours and not method.startswith("__"):
            methods.setdefault(owner, []).append(node)
    module = tree.visit(_Editing(taken, methods))
    top = [statement for statement in cst.parse_module(student).body if _is_new(statement, tree)]
    at = next(
        (at for at, node in enumerate(module.body) if isinstance(node, cst.FunctionDef | cst.ClassDef)),
        len(module.body),
    )
    return module.with_changes(body=[*module.body[:at], *top, *module.body[at:]]).code


def _outside(node: cst.FunctionDef) -> tuple[object, ...]:
    """Return a function's interface: whether it is asynchronous, its decorators, and its parameters."""
    written = ast.parse(f"def f({text_of(node.params)}\n): ...").body[0]
    assert isinstance(written, ast.FunctionDef)
    given = written.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
    for each in every:
        if each is not None:
            each.annotation = None
    decorators = [text_of(each.decorator).strip() for each in node.decorators]
    return node.asynchronous is not None, decorators, ast.dump(given)


def _is_new(statement: cst.BaseStatement, reference: cst.Module) -> bool:
    """Return True if it is an import, a function, a class or a constant that the reference does not have."""
    if text_of(statement).strip() in {text_of(other).strip() for other in reference.body}:
        return False
    known = {name for other in reference.body for name in names_of(other)}
    names = names_of(statement)
    return bool(names) and not known.intersection(names)


def names_of(statement: cst.CSTNode) -> set[str]:
    """The names that a statement of a module binds; none for anything but definitions and imports."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return {statement.name.value}
    found: set[str] = set()
    if isinstance(statement, cst.SimpleStatementLine):
        for part in statement.body:
            if isinstance(part, cst.Assign):
                found |= {text_of(target.target) for target in part.targets}
            elif isinstance(part, cst.AnnAssign):
                found.add(text_of(part.target))
            elif isinstance(part, cst.Import | cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
                found |= {alias.evaluated_alias or alias.evaluated_name for alias in part.names}
            else:
                return set()
    return found


def without(source: str, names: Collection[str]) -> str:
    """Source without some functions at all: hidden tests."""
    editing = _Editing(lambda name, node: cst.RemoveFromParent() if name in names else node)
    return cst.parse_module(source).visit(editing).code

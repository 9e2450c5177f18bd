"""Make mutants of a source file: each is one edit of a few characters, of a kind that people make, too."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARED = (
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Eq,
    ast.NotEq,
    ast.Is,
    ast.IsNot,
    ast.In,
    ast.NotIn,
)
FLIPPED = dict(
    zip(
        COMPARED,
        ("<=", "<", ">=", ">", "!=", "==", "is not", "is", "not in", "in"),
        strict=True,
    )
)
CONDITIONS = (
    ast.Name,
    ast.Attribute,
    ast.Call,
    ast.BoolOp,
    ast.BinOp,
    ast.Subscript,
    ast.NamedExpr,
)
"""What is negated: a comparison is flipped instead, and a `not` dropped."""
SYMMETRIC = {
    "min",
    "max",
    "isinstance",
    "getattr",
    "equal",
    "allclose",
    "isclose",
    "cast",
    "transpose",
}
"""Calls in which two arguments may change places, or of which Python itself says that they may not."""
SILENT = {"__repr__", "__str__", "__exit__", "__del__"}
"""Methods whose mistakes no user sees, or only in a message."""


@dataclass(frozen=True)
class Mutant:
    """One edit of a file: bytes `start` to `end`, in the function `name`, are replaced by `after`."""

    file: str
    name: str
    operator: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def plant(self, root: Path) -> bytes:
        """Return the file's text with the mistake in it."""
        text = (root / self.file).read_bytes()
        return text[: self.start] + self.after.encode() + text[self.end :]

    @property
    def label(self) -> str:
        """Its name in lists: without a line number, which changes with every edit above."""
        edit = f"{_short(self.before)} -> {_short(self.after)}"
        return f"{Path(self.file).name} {self.name} {self.operator}: {edit}"

    @property
    def rank(self) -> str:
        """A number for the choice that stays the same when a file moves or grows."""
        return hashlib.sha256(
            f"{Path(self.file).name} {self.name} {self.operator}".encode()
        ).hexdigest()


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 70 else words[:67] + "..."


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All mutants of one file, in the order of its lines."""
    source = (root / file).read_text(encoding="utf-8")
    begins = [0]
    for line in source.encode().splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = []
    for name, node in _inside(ast.parse(source).body, ""):
        for operator, part, after in _edits(node):
            start = begins[part.lineno - 1] + part.col_offset
            end = begins[(part.end_lineno or part.lineno) - 1] + (part.end_col_offset or 0)
            before = source.encode()[start:end].decode()
            found.append(Mutant(file, name, operator, part.lineno, start, end, before, after))
    return found


def _inside(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of every function, with the function's qualified name; functions within one are its own."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _inside(node.body, f"{prefix}{node.name}.")
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name not in SILENT
        ):
            for statement in node.body:
                for part in _walk(statement):
                    yield prefix + node.name, part


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement, less what only says something: assertions, errors, texts and annotations."""
    if not isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
        yield node
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from _walk(child)


def _edits(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """For each mistake that can be made at a node: its kind, what is replaced, and by what."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield "drop-call", node, "pass"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield "flip-comparison", node, f"({sides[0]} {FLIPPED[type(node.ops[0])]} {sides[1]})"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off-by-one", node, str(node.value + 1)
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                yield "off-by-one", bound, f"({ast.unparse(bound)} + 1)"
    if isinstance(node, ast.Call) and len(node.args) > 1 and _name(node.func) not in SYMMETRIC:
        first, second = (ast.unparse(one) for one in node.args[:2])
        if first != second and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            swapped = ast.Call(
                node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords
            )
            yield "swap-arguments", node, ast.unparse(swapped)
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, CONDITIONS):
        yield "negate-condition", node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop-not", node, f"({ast.unparse(node.operand)})"
    if (
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value) != "None"
    ):
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        yield (
            "drop-return-value",
            node,
            f"return {not value if isinstance(value, bool) else None}",
        )


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    )


def choose(root: Path, files: Sequence[str], count: int, seed: int = 0) -> list[Mutant]:
    """Up to `count` mutants by name and kind: as many of every file, no two of one kind in a function."""
    turns: list[tuple[int, str, Mutant]] = []
    for file in files:
        one_each = {mutant.rank: mutant for mutant in reversed(mutants_of(root, file))}
        ranked = sorted(
            hashlib.sha256(f"{seed} {rank}".encode()).hexdigest() + rank for rank in one_each
        )
        turns += [(turn, rank, one_each[rank[64:]]) for turn, rank in enumerate(ranked)]
    chosen = [mutant for _, _, mutant in sorted(turns, key=lambda one: one[:2])[:count]]
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line, mutant.operator))

"""The house: imports without circles, short functions, names that mean one thing, budgets, short lessons."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from phases import PHASES, ROOT

BUDGET = 1200
"""Lines of code of a phase's package, comments and docstrings not counted."""
LARGER = {
    "triton_paged_attention": 1500,
    "serving": 1450,
}
"""Packages that are over it still: they may only shrink."""
TWICE = set[str]()
"""Class names that are defined twice still."""
LESSON, MEASURE = 3000, 400
"""Words of a lesson, and of its section on measuring outside of tables and folds."""
QUESTIONS = {"what", "whether", "how", "where", "who", "whose"}
NAMELESS = re.compile(r"\b(nobody|everybody|somebody|anybody|whoever)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""What may have a docstring."""
MOST_LINES = 80
"""Of a function outside kernels."""
PACKAGES = {"common": ROOT / "common", "benchmarks": ROOT / "benchmarks", "phases": ROOT / "phases"} | {
    phase.package: phase.folder / phase.package for phase in PHASES
}


def modules() -> dict[str, Path]:
    """Every module by its importable name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        rooms = ("", "appendix/**/", "commands/", "course/") if package == "phases" else ("**/",)
        for path in (path for room in rooms for path in folder.glob(f"{room}*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, module: str, known: set[str]) -> Iterator[str]:
    """The known modules that a module needs while it is imported: not those that a function imports."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                yield whole if whole in known else source


def test_no_circle_of_imports():
    """Between modules; a package's `__init__` may import what lies in it."""
    paths = modules()
    needs = {
        name: {other for other in imports(path, name, set(paths)) if other in paths and other != name}
        for name, path in paths.items()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle: {' -> '.join([*above[above.index(name) :], name])}"
        if name not in done and name in needs:
            for other in sorted(needs[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(needs):
        visit(name, ())


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES and not kernel:
                yield f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_functions_are_short():
    files = [*modules().values(), *(phase.folder / "bench.py" for phase in PHASES)]
    assert [found for path in files for found in long_functions(path)] == []


def code_lines(path: Path) -> int:
    """Lines with a token that is neither a comment nor a docstring; other files than Python's: not blank."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        bare = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        return sum(bool(line.strip()) and not line.strip().startswith("//") for line in bare.splitlines())
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for item in node.body if isinstance(node, DOCUMENTED) else ():
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                said.update(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout | {tokenize.ENDMARKER}:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - said)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_package_keeps_its_budget(phase):
    folder = phase.folder / phase.package
    lines = sum(code_lines(path) for pattern in ("*.py", "*.cu*") for path in folder.rglob(pattern))
    most = LARGER.get(phase.package, BUDGET)
    assert lines <= most, f"{phase.package} has {lines} lines of code, and may have {most}"


def test_a_class_name_means_one_class():
    places = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not name.startswith("benchmarks"):
                places[node.name].append(name)
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in TWICE}
    assert twice == {}


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for path in modules().values():
        if (ROOT / "benchmarks") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, DOCUMENTED):
                first = re.match(r"[A-Za-z]+", ast.get_docstring(node) or "")
                if first and first[0].lower() in QUESTIONS:
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {first[0]}")
    assert found == []


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Return the first line and the text of every comment and docstring, those of names included."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def test_the_actor_has_a_name():
    """A request, the scheduler, rank 0: comments and docstrings do without nobody and whoever."""
    found = [
        f"{path.relative_to(ROOT)}:{line + said[: word.start()].count(chr(10))} {word[0]}"
        for path in sorted([*(ROOT / "phases").rglob("*.py"), *(ROOT / "common").rglob("*.py")])
        for line, said in prose(path.read_text(encoding="utf-8"))
        for word in NAMELESS.finditer(said)
    ]
    assert found == []


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_lesson_is_of_one_sitting(phase):
    text = (phase.folder / "README.md").read_text(encoding="utf-8")
    words = len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    assert words <= LESSON, f"{phase.name}: {words} words"
    shown = re.sub(r"<details>.*?</details>|```.*?```|^\|[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"^## ", shown, flags=re.MULTILINE)
    (measure,) = [len(part.split()) for part in parts if re.match(r"[\d. ]*Measure", part)]
    assert measure <= MEASURE, f"{phase.name}: {measure} words in the section on measuring"


# Imports point one way: a phase imports from phases below it and from common, common from no phase.


NUMBERS = {phase.package: phase.number for phase in PHASES}
ABOVE_ALL = 99
"""The commands and the benchmarks stand above every phase: no phase's package may import them."""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.split(".")[0]


def wrong_imports(folder: Path, number: int) -> list[str]:
    """The imports in `folder` that reach above `number`."""
    levels = NUMBERS | {"phases": ABOVE_ALL, "benchmarks": ABOVE_ALL, "tests": ABOVE_ALL}
    return [
        f"{path.relative_to(folder.parent)}:{line} imports {package}"
        for path in sorted(folder.rglob("*.py"))
        for line, package in imported(path)
        if levels.get(package, 0) > number
    ]


def test_common_imports_no_phase():
    assert wrong_imports(ROOT / "common", 0) == []


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_imports_only_from_below(phase):
    assert wrong_imports(phase.folder / phase.package, phase.number) == []


def test_commands_import_benchmarks_and_never_the_other_way():
    found = [
        f"{path.relative_to(ROOT)} imports phases.commands"
        for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "phases").glob("*/bench.py")]
        if "phases.commands" in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_every_phase_folder_is_known():
    folders = {path.name for path in (ROOT / "phases").glob("[0-9]*") if any(path.glob("*/__init__.py"))}
    assert folders == {phase.name for phase in PHASES}

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

BUDGET = 10_000
"""Tokens of code of a phase's package, comments and docstrings not counted."""
LARGER = {
    "triton_paged_attention": 14_000,
    "structured": 11_000,
    "serving": 11_000,
    "experts": 11_000,
    "hybrid_cache": 12_000,
}
"""Packages with more to teach."""
OVER = dict[str, int]()
"""Packages that are over their budget still: they may only shrink."""
BENCHES = 85_000
"""Tokens of all that measures, draws and fills in tables: `benchmarks` and each phase's `bench.py`."""
WIDTH, WIDE = 95, 0.03
"""Columns of a line of code, and the share of a room's lines that may have more."""
TWICE = set[str]()
"""Class names that are defined twice still."""
LESSON, MEASURE = 3000, 400
"""Words of a lesson, and of its section on measuring outside of tables and folds."""
QUESTIONS = {"what", "whether", "how", "where", "who", "whose"}
NAMELESS = re.compile(r"\b(nobody|everybody|somebody|anybody|whoever)\b", re.IGNORECASE)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""What may have a docstring."""
MOST_LINES = 95
"""Of a function outside kernels."""
PACKAGES = {
    "common": ROOT / "common",
    "benchmarks": ROOT / "benchmarks",
    "phases": ROOT / "phases",
} | {phase.package: phase.folder / phase.package for phase in PHASES}


def modules() -> dict[str, Path]:
    """Every module by its importable name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        rooms = (
            ("", "appendix/**/", "commands/", "course/") if package == "phases" else ("**/",)
        )
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
        name: {
            other
            for other in imports(path, name, set(paths))
            if other in paths and other != name
        }
        for name, path in paths.items()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, (
            f"a circle: {' -> '.join([*above[above.index(name) :], name])}"
        )
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


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that are no code."""


def code_of(path: Path) -> tuple[int, list[str]]:
    """Return a file's tokens of code, comments and docstrings not counted, and its lines that have any."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        bare = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
        lines = [line for line in bare.splitlines() if line.strip()]
        return len(re.findall(r"\w+|[^\w\s]", bare)), lines
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for item in node.body if isinstance(node, DOCUMENTED) else ():
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                documented.update(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    used: set[int] = set()
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in documented:
            count += 1
            used.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return count, [lines[number - 1] for number in sorted(used)]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_package_keeps_its_budget(phase):
    folder = phase.folder / phase.package
    files = [path for pattern in ("*.py", "*.cu*") for path in folder.rglob(pattern)]
    tokens = sum(code_of(path)[0] for path in files)
    budget = LARGER.get(phase.package, BUDGET)
    most = max(budget, OVER.get(phase.package, 0))
    assert tokens <= most, f"{phase.package} has {tokens} tokens of code, and may have {most}"
    assert tokens > budget or phase.package not in OVER, (
        f"{phase.package} has {tokens} tokens, within its budget of {budget}: take it out of OVER"
    )


def test_what_measures_keeps_its_budget():
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "phases").glob("*/bench.py")]
    tokens = sum(code_of(path)[0] for path in files)
    assert tokens <= BENCHES, f"benches have {tokens} tokens of code, and may have {BENCHES}"


def rooms() -> dict[str, list[Path]]:
    """Return the files of every room: a phase's package, an entry of the appendix, or a top folder."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in [*modules().values(), *sorted((ROOT / "tests").rglob("*.py"))]:
        parts = path.relative_to(ROOT).parts
        deep = 3 if parts[:2] == ("phases", "appendix") else 2 if parts[0] == "phases" else 1
        if "other_engines" not in parts:  # they stand as they ran
            found["/".join(parts[:deep])].append(path)
    return found


def test_lines_of_code_are_short():
    for room, files in rooms().items():
        lines = [line for path in files for line in code_of(path)[1]]
        wide = sum(len(line) > WIDTH for line in lines)
        assert wide <= WIDE * len(lines), (
            f"{room}: {wide} of {len(lines)} lines of code have more than {WIDTH} columns"
        )


def test_an_assignment_is_one_thought():
    found = []
    for path in (path for files in rooms().values() for path in files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = max(
                    len(target.elts) if isinstance(target, ast.Tuple) else 1
                    for target in node.targets
                )
                if names > 2:
                    found.append(
                        f"{path.relative_to(ROOT)}:{node.lineno}: {names} names at once"
                    )
    assert found == [], "\n".join(found)


PARTS = {"engine", "scheduler", "runner", "loop", "drafter", "grammar_manager"}
"""Names of objects that get all they have in their constructors."""


def test_no_part_of_an_engine_is_changed_from_outside():
    found = []
    product = [*(ROOT / "common").rglob("*.py"), *(ROOT / "phases").rglob("*.py")]
    serving = ROOT / "phases" / "13_serving"  # whose `engine` is the client of one
    for path in product:
        if path.name == "bench.py" or path.is_relative_to(serving):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    owner = target.value if isinstance(target, ast.Attribute) else None
                    name = owner.id if isinstance(owner, ast.Name) else None
                    name = owner.attr if isinstance(owner, ast.Attribute) else name
                    if name in PARTS:
                        found.append(
                            f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(target)}"
                        )
    assert found == [], "\n".join(found)


def test_a_class_name_means_one_class():
    places = defaultdict(list)
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not name.startswith("benchmarks"):
                places[node.name].append(name)
    twice = {
        name: found for name, found in places.items() if len(found) > 1 and name not in TWICE
    }
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
                    found.append(
                        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {first[0]}"
                    )
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
        for path in sorted(
            [*(ROOT / "phases").rglob("*.py"), *(ROOT / "common").rglob("*.py")]
        )
        for line, said in prose(path.read_text(encoding="utf-8"))
        for word in NAMELESS.finditer(said)
    ]
    assert found == []


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_lesson_is_of_one_sitting(phase):
    text = (phase.folder / "README.md").read_text(encoding="utf-8")
    words = len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    assert words <= LESSON, f"{phase.name}: {words} words"
    shown = re.sub(
        r"<details>.*?</details>|```.*?```|^\|[^\n]*$",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
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


IN_A_CHECKOUT = {
    "phases/commands/early.py": "load",
    "phases/commands/plain.py": "the gains of list",
    "phases/course/grading.py": "course",
}
"""Files that import benchmarks, which no wheel has, and the commands for which they do."""


def test_what_a_wheel_has_does_without_benchmarks():
    files = [
        path
        for folder in ("common", "inference_ladder", "phases")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "bench.py"
        and any(package == "benchmarks" for _, package in imported(path))
    ]
    assert {str(path.relative_to(ROOT)) for path in files} == IN_A_CHECKOUT.keys()


def test_benchmarks_do_not_import_commands():
    found = [
        f"{path.relative_to(ROOT)} imports phases.commands"
        for path in [
            *(ROOT / "benchmarks").rglob("*.py"),
            *(ROOT / "phases").glob("*/bench.py"),
        ]
        if "phases.commands" in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_every_phase_folder_is_known():
    folders = {
        path.name
        for path in (ROOT / "phases").glob("[0-9]*")
        if any(path.glob("*/__init__.py"))
    }
    assert folders == {phase.name for phase in PHASES}

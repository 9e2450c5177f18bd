"""The house: no circle of imports, no function that does not fit on a screen or two."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from phases import PHASES, ROOT

MOST_LINES = 80
"""Of a function outside kernels."""
PACKAGES = {"common": ROOT / "common", "benchmarks": ROOT / "benchmarks", "phases": ROOT / "phases"} | {
    phase.package: phase.folder / phase.package for phase in PHASES
}


def modules() -> dict[str, Path]:
    """Every module by its importable name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        inside = (
            folder.rglob("*.py")
            if package != "phases"
            else [
                p
                for n in ("*.py", "appendix/**/*.py", "commands/*.py", "course/*.py")
                for p in folder.glob(n)
            ]
        )
        for path in inside:
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

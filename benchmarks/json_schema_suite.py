"""Which JSON schemas each backend of phase 12 understands: the official test suite, draft 2020-12.

    ladder bench json_schema_suite
    python -m benchmarks.json_schema_suite --folder path/to/maskbench/data

The suite is taken from the source distribution of `jsonschema`, checked against a hash. The second form reads
a folder of JSON files with `schema` and `tests` (`valid`, `data`), as JSONSchemaBench's MaskBench has them,
and prints its table only.

A backend may refuse a schema. If it does not, each value of the test is given to it as text, byte by byte: a
valid value must be taken in some spelling, an invalid one in none. Spellings differ in the order of keys,
which a grammar may fix, and in zeros behind a whole number. Left out is `format.json`, which says that the
keyword has no meaning: to make a date where one is asked for is no mistake.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.plotting import COLOURS, panels, save
from common.errors import UserError
from common.paths import cache_home
from common.sampling.grammar import Grammar
from structured.feature import Name, backend_named
from structured.matcher import Backend, Matcher
from structured.vocabulary import Vocabulary

PACKAGE = "jsonschema==4.25.1"
SHA256 = "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85"
TESTS = "jsonschema-4.25.1/json/tests/draft2020-12"
NAME = "json_schema_suite"
MOST_KEYS = 5
"""Of an object whose keys are tried in every order."""


@dataclass(frozen=True)
class Case:
    """A schema, and values with whether it allows them."""

    name: str
    schema: Any
    values: tuple[tuple[Any, bool], ...]


@dataclass
class Score:
    """What a backend made of some cases: how many schemas it refused, and what it got wrong of the others."""

    schemas: int = 0
    refused: int = 0
    passed: int = 0
    values: int = 0
    wrong_accepts: int = 0
    wrong_rejects: int = 0
    compile_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def archive() -> Path:
    """The source distribution, downloaded once by pip. Raises `UserError` if it is not what it should be."""
    path = cache_home() / "suites" / "jsonschema-4.25.1.tar.gz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary=jsonschema",
            ]
            done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
            found = next(Path(folder).glob("*.tar.gz"), None)
            if done.returncode or found is None:
                said = done.stderr.strip().splitlines()[-1:] or ["it gave no reason"]
                raise UserError(f"pip could not download {PACKAGE}: {said[0]}")
            found.rename(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise UserError(f"{path} has the SHA-256 {digest}, but must have {SHA256}: delete it")
    return path


def suite() -> list[Case]:
    """The cases of the draft, those under `optional` and those about `format` aside."""
    found = []
    with tarfile.open(archive()) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            inside = member.name.removeprefix(TESTS + "/")
            stream = tar.extractfile(member)
            if inside != member.name and "/" not in inside and inside.endswith(".json") and stream:
                if inside == "format.json":
                    continue
                found += list(cases(inside.removesuffix(".json"), json.load(stream)))
    return found


def cases(name: str, raw: Any) -> Iterator[Case]:
    """The cases of one file of the suite, or of MaskBench."""
    for group in raw if isinstance(raw, list) else [raw]:
        values = tuple(
            (test["data"], bool(test["valid"])) for test in group.get("tests", ()) if "data" in test
        )
        yield Case(f"{name}: {group.get('description', '')}", group["schema"], values)


def folder_cases(folder: Path) -> list[Case]:
    """Every case of the JSON files below a folder."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(raw, (dict, list)) and "schema" in (raw[0] if isinstance(raw, list) and raw else raw):
            found += list(cases(path.stem, raw))
    return found


def spellings(value: Any) -> Iterator[str]:
    """A value as text, the keys of the outermost object in every order, with and without zeros."""
    orders: Iterator[Any] = iter([value])
    if isinstance(value, Mapping) and len(value) <= MOST_KEYS:
        orders = ({key: value[key] for key in keys} for keys in itertools.permutations(value))
    for ordered in orders:
        yield json.dumps(ordered, ensure_ascii=False)
        if json.dumps(plain := _without_zeros(ordered)) != json.dumps(ordered):
            yield json.dumps(plain, ensure_ascii=False)


def _without_zeros(value: Any) -> Any:
    """The same value with whole numbers as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_without_zeros(part) for part in value]
    if isinstance(value, Mapping):
        return {key: _without_zeros(part) for key, part in value.items()}
    return value


def takes(make: Callable[[], Matcher], value: Any) -> bool:
    """Whether a grammar has some spelling of a value."""
    for text in spellings(value):
        try:
            tokens = [byte + 1 for byte in text.encode()]
        except UnicodeEncodeError:  # half of a surrogate pair, which no text can hold
            tokens = [byte + 1 for byte in json.dumps(value).encode()]
        matcher = make()
        if matcher.advance(tokens) == len(tokens) and matcher.accepting:
            return True
    return False


def score(backend: Backend, given: list[Case]) -> Score:
    """Try every case."""
    found = Score(schemas=len(given))
    for case in given:
        begun = time.perf_counter()
        try:
            compiled = backend.compile(Grammar.json_schema(case.schema))
        except UserError:
            found.refused += 1
            continue
        found.compile_ms.append(1e3 * (time.perf_counter() - begun))
        before = len(found.wrong)
        for value, valid in case.values:
            found.values += 1
            if takes(compiled.matcher, value) != valid:
                found.wrong_rejects += valid
                found.wrong_accepts += not valid
                kind = "rejects" if valid else "accepts"
                found.wrong.append(f"{case.name}: {kind} {json.dumps(value)[:60]}")
        found.passed += len(found.wrong) == before
    return found


def byte_vocabulary() -> Vocabulary:
    """A token for every byte; token 0 ends a text."""
    tokens = (b"", *(bytes([byte]) for byte in range(256)))
    return Vocabulary(tokens, (0,), lambda text: [byte + 1 for byte in text.encode()])


def backends() -> dict[str, Backend]:
    """Those that are installed; xgrammar also without this project's check, in both of its modes."""
    words, found = byte_vocabulary(), dict[str, Backend]()
    found["automata (by hand)"] = backend_named("automata")(words)
    names: tuple[Name, ...] = ("llguidance", "xgrammar")
    for name in names:
        try:
            kind: Any = backend_named(name)
        except UserError:
            continue
        label = f"{name} {metadata.version(name)}"
        found[label] = kind(words)
        if name == "xgrammar":
            found[f"{label}, unchecked, strict"] = kind(words, check=False)
            found[f"{label}, unchecked, not strict"] = kind(words, check=False, strict=False)
    return found


def table(scores: Mapping[str, Score]) -> str:
    """The scores as a table in Markdown."""
    lines = ["| backend | schemas | refused | all right | wrong accepts | wrong rejects | compile (ms) |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, found in scores.items():
        numbers = [found.schemas, found.refused, found.passed, found.wrong_accepts, found.wrong_rejects]
        compile_ms = median(found.compile_ms) if found.compile_ms else 0.0
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {compile_ms:.2f} |")
    return "\n".join(lines)


def run(options: BenchOptions) -> Evidence:
    """Every backend on the whole suite."""
    given = suite()
    if options.quick:
        given = given[::10]
    runs = []
    for name, backend in backends().items():
        found = score(backend, given)
        counts = {
            "schemas": found.schemas,
            "refused": found.refused,
            "passed": found.passed,
            "values": found.values,
            "wrong_accepts": found.wrong_accepts,
            "wrong_rejects": found.wrong_rejects,
            "compile_ms": median(found.compile_ms),
        }
        metrics = {key: Metric((float(value),)) for key, value in counts.items()}
        work = "JSON-Schema-Test-Suite 2020-12" + (" (a tenth)" if options.quick else "")
        runs.append(Run(name, work, SHA256, "none", "none", "none", metrics))
    return collect(NAME, runs, options.device)


def draw(evidence: Evidence, out: Path) -> None:
    """Of each backend: schemas that are right, wrong and refused."""
    figure, (axes,) = panels(1, height=2.6)
    names = [found.variant for found in evidence.runs]
    left = [0.0] * len(names)
    for label, colour, values in (
        ("every value right", COLOURS[2], [found.median("passed") for found in evidence.runs]),
        (
            "some value wrong",
            COLOURS[3],
            [
                found.median("schemas") - found.median("refused") - found.median("passed")
                for found in evidence.runs
            ],
        ),
        ("refused", "#C8C8C8", [found.median("refused") for found in evidence.runs]),
    ):
        axes.barh(names, values, left=left, color=colour, label=label, height=0.6)
        left = [begin + value for begin, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("schemas of the official test suite, draft 2020-12")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    axes.grid(visible=False, axis="y")
    save(figure, out, evidence)


def main() -> None:
    """Print the table, and with `--wrong` what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="a folder of cases instead of the suite")
    parser.add_argument("--wrong", action="store_true", help="also print every value that is judged wrongly")
    given = parser.parse_args()
    found = folder_cases(given.folder) if given.folder else suite()
    scores = {name: score(backend, found) for name, backend in backends().items()}
    print(table(scores))
    if given.wrong:
        for name, one in scores.items():
            print(*(f"{name}: {line}" for line in one.wrong), sep="\n")


if __name__ == "__main__":
    main()

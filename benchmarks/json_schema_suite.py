"""Which JSON schemas each backend of phase 12 understands: the official test suite, draft 2020-12.

    ladder bench json_schema_suite

The suite is taken from the source distribution of `jsonschema`, checked against a hash.

A backend may refuse a schema. If it does not, each value of the test is given to it as text, byte by byte: a
valid value must be taken in some spelling, an invalid one in none. Spellings differ in the order of keys,
which a grammar may fix, and in zeros behind a whole number. Left out is `format.json`, which says that the
keyword has no meaning: to make a date where one is asked for is no mistake.

A case is given up on which a matcher stops at a limit of its own, which ends the request with an error, or of
which not all spellings can be tried.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.plotting import BAD, GOOD, panels, save
from common.errors import UserError
from common.paths import cache_home
from common.sampling.grammar import Grammar
from phases.appendix.guidance.feature import library
from phases.appendix.guidance.spelling import Spelling
from structured.automata.backend import AutomataBackend
from structured.matcher import Backend, Matcher

PACKAGE = "jsonschema==4.25.1"
SHA256 = "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85"
TESTS = "jsonschema-4.25.1/json/tests/draft2020-12"
NAME = "json_schema_suite"
MOST_TRIES = 5000
"""Beginnings of a value's text that are tried."""
MOST_BACK = 64
"""Bytes that a matcher is taken back, at most; xgrammar's forget more."""


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
    given_up: int = 0
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
            done = subprocess.run(
                [*command, "--dest", folder, PACKAGE], capture_output=True, text=True
            )
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
            if (
                inside != member.name
                and "/" not in inside
                and inside.endswith(".json")
                and stream
            ):
                if inside == "format.json":
                    continue
                found += list(cases(inside.removesuffix(".json"), json.load(stream)))
    return found


def cases(name: str, raw: Any) -> Iterator[Case]:
    """The cases of one file of the suite."""
    for group in raw:
        values = tuple((test["data"], bool(test["valid"])) for test in group["tests"])
        yield Case(f"{name}: {group['description']}", group["schema"], values)


class GivenUp(Exception):
    """A matcher has hit a limit, and says so."""


class Search:
    """Looks for a spelling that a grammar takes: keys in other orders, numbers with and without zeros.

    A grammar that fixes the order of keys leaves one way to go on, so it is soon found, or soon missed.
    """

    def __init__(self, make: Callable[[], Matcher], zeros: bool) -> None:
        self.make = make
        self.zeros = zeros
        self.tries = MOST_TRIES
        self._matcher, self._taken = make(), list[int]()

    def takes(self, value: Any) -> bool:
        """Whether there is one, as far as `MOST_TRIES` go."""
        return any(self._goes(text) and self._may_end() for text in self._after("", value))

    def _may_end(self) -> bool:
        """Whether the mask allows token 0, which ends a text."""
        words = np.zeros(9, np.int32)
        self._matcher.fill(words)
        return bool(words[0] & 1)

    def _goes(self, text: str) -> bool:
        """Whether a text is taken, by a matcher that goes back to where it parts from the one before."""
        self.tries -= 1
        if self.tries <= 0:
            return False
        tokens = [byte + 1 for byte in text.encode()]
        pairs = enumerate(zip(tokens, self._taken, strict=False))
        same = next(
            (at for at, (new, old) in pairs if new != old), min(len(tokens), len(self._taken))
        )
        if self._matcher.problem or len(self._taken) - same > MOST_BACK:
            self._matcher, same = self.make(), 0
        else:
            self._matcher.rollback(len(self._taken) - same)
        count = same + self._matcher.advance(tokens[same:])
        self._taken = tokens[:count]
        problem = self._matcher.problem
        if "limit" in problem or "too" in problem:
            raise GivenUp(problem)
        return count == len(tokens)

    def _after(self, text: str, value: Any) -> Iterator[str]:
        """Every text that goes on with the value."""
        if isinstance(value, Mapping) and value:
            yield from self._members(text + "{", dict(value))
        elif isinstance(value, list) and value:
            yield from self._items(text + "[", value)
        else:
            for spelled in dict.fromkeys(self._scalar(value)):
                if self._goes(text + spelled):
                    yield text + spelled

    def _members(self, text: str, left: dict[str, Any]) -> Iterator[str]:
        for key in left:
            begun = f"{text}{_spelled(key)}: "
            if self._goes(begun):
                others = {name: part for name, part in left.items() if name != key}
                for more in self._after(begun, left[key]):
                    if others:
                        yield from self._members(more + ", ", others)
                    elif self._goes(more + "}"):
                        yield more + "}"

    def _items(self, text: str, left: list[Any]) -> Iterator[str]:
        for more in self._after(text, left[0]):
            if left[1:]:
                yield from self._items(more + ", ", left[1:])
            elif self._goes(more + "]"):
                yield more + "]"

    def _scalar(self, value: Any) -> Iterator[str]:
        yield _spelled(value)
        if isinstance(value, float):
            yield format(Decimal(repr(value)), "f")
            if self.zeros and value.is_integer():
                yield str(int(value))


def _spelled(value: Any) -> str:
    """A value as text; half of a surrogate pair, which no text can hold, as JSON escapes it."""
    text = json.dumps(value, ensure_ascii=False)
    with suppress(UnicodeEncodeError):
        text.encode()
        return text
    return json.dumps(value)


def takes(make: Callable[[], Matcher], value: Any, schema: Any, *, valid: bool = True) -> bool:
    """Whether a grammar has some spelling of a value.

    Raises:
        GivenUp: the matcher has, or of a `valid` value not all spellings can be tried.
    """
    # To draft 4 a number with zeros behind the point is no integer.
    draft_4 = isinstance(schema, Mapping) and "draft-04" in str(schema.get("$schema"))
    search = Search(make, zeros=not draft_4)
    found = search.takes(value)
    if not found and valid and search.tries <= 0:
        raise GivenUp("there are too many spellings")
    return found


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
        try:
            for value, valid in case.values:
                found.values += 1
                if takes(compiled.matcher, value, case.schema, valid=valid) != valid:
                    found.wrong_rejects += valid
                    found.wrong_accepts += not valid
                    kind = "rejects" if valid else "accepts"
                    found.wrong.append(f"{case.name}: {kind} {json.dumps(value)[:60]}")
        except GivenUp:  # an output would end with an error of its own
            found.given_up += 1
            continue
        found.passed += len(found.wrong) == before
    return found


def byte_vocabulary() -> Spelling:
    """A token for every byte; token 0 ends a text."""
    tokens = (b"", *(bytes([byte]) for byte in range(256)))
    return Spelling(tokens, (0,), lambda text: [byte + 1 for byte in text.encode()])


def backends() -> dict[str, Callable[[], Backend]]:
    """Those that are installed; xgrammar also without this project's check, in both of its modes."""
    words, found = byte_vocabulary(), dict[str, Callable[[], Backend]]()
    found["automata (by hand)"] = partial(AutomataBackend, words)
    with suppress(UserError):
        found[f"llguidance {metadata.version('llguidance')}"] = partial(library(), words)
    if find_spec("xgrammar"):
        from benchmarks.xgrammar_backend import XGrammarBackend

        label = f"xgrammar {metadata.version('xgrammar')}"
        found[label] = partial(XGrammarBackend, words)
        found[f"{label}, unchecked, strict"] = partial(XGrammarBackend, words, check=False)
    return found


def run(options: BenchOptions) -> Evidence:
    """Every backend on the whole suite."""
    given = suite()
    if options.quick:
        given = given[::10]
    work = "JSON-Schema-Test-Suite 2020-12" + (" (a tenth)" if options.quick else "")
    scores = {name: score(make(), given) for name, make in backends().items()}
    return collect(
        NAME,
        [as_run(name, work, SHA256, found) for name, found in scores.items()],
        options.device,
    )


def as_run(name: str, work: str, digest: str, found: Score) -> Run:
    """A backend's score as evidence."""
    counts: dict[str, float] = {
        "schemas": found.schemas,
        "refused": found.refused,
        "given_up": found.given_up,
        "passed": found.passed,
        "values": found.values,
        "wrong_accepts": found.wrong_accepts,
        "wrong_rejects": found.wrong_rejects,
    }
    if found.compile_ms:
        counts["compile_ms"] = median(found.compile_ms)
    metrics = {key: Metric((float(value),)) for key, value in counts.items()}
    return Run(name, work, digest, "none", "none", "none", metrics)


def draw(evidence: Evidence, out: Path) -> None:
    """Of each backend: schemas that are right, wrong and refused."""
    figure, (axes,) = panels(1, height=2.6)
    names = [found.variant for found in evidence.runs]
    left = [0.0] * len(names)
    for label, colour, values in (
        ("every value right", GOOD, [found.median("passed") for found in evidence.runs]),
        (
            "some value wrong",
            BAD,
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
    axes.set_xlabel(f"schemas of {evidence.runs[0].workload}")
    sure = [
        run
        for run in evidence.runs
        if run.median("wrong_accepts") + run.median("wrong_rejects") == 0
    ]
    best = max(sure or evidence.runs, key=lambda run: run.median("passed"))
    axes.set_title(
        f"Of those that judge no value wrong, {best.variant} takes the most: {best.median('passed'):,.0f} of "
        f"{best.median('schemas'):,.0f} schemas"
        if sure
        else f"Every backend judges some value wrong; {best.variant} takes {best.median('passed'):,.0f}"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    axes.grid(visible=False, axis="y")
    save(figure, out, evidence)

"""Fill in the numbers that sentences name from the evidence, so that none of them is typed by hand.

A number stands between two comments, which the rendered text hides and which must not begin a line:

    one request makes <!--n:09.single-->1,804<!--/n--> tokens a second

Its name leads to an entry of `numbers.toml`: the entry `single` of the table `09`. An entry says where the
number comes from, and how it is written:

    single = "h200/09_cuda_graphs output_tokens_per_s variant=09_cuda_graphs workload=single-512 model=..."
    gain = { of = "h200/09_cuda_graphs output_tokens_per_s ...", over = "variant=...", as = "times" }

The first word is an evidence file, the second a metric (or `roofline`, or a ceiling of
the machine, `ceilings.read_bytes_per_s`), and words with `=` choose the one run. `over` divides by another
run: what it leaves out is as in `of`, and an empty setting (`budget=`) is one that the run has not. `divides`
is a constant that is divided by the value, `scale` a factor, and `as` one of `WAYS`.

A number that a sentence works out before the reader's eyes, by hand, is marked too: inside a line by
`<!--w-->3.5 ms<!--/w-->`, and a paragraph by lines with `<!--worked-->` and `<!--/worked-->`, each alone.
A test refuses the numbers with a unit that are neither.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from benchmarks.evidence import RESULTS, ROOT, Evidence
from benchmarks.labels import number
from common.errors import UserError

NUMBER = re.compile(r"(<!--n:([\w.-]+)-->)([^<\n]*)(<!--/n-->)")


def _digits(places: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{places}f}"


WAYS: Mapping[str, Callable[[float], str]] = {
    "number": number,
    "times": lambda value: f"{value:.1f}" if value < 10 else f"{value:.0f}",
    "percent": lambda value: f"{100 * value:.0f}",
    "more": lambda value: f"{100 * (value - 1):.0f}",
    "less": lambda value: f"{100 * (1 - value):.0f}",
    "0": _digits(0),
    "1": _digits(1),
    "2": _digits(2),
    "4": _digits(4),
}
"""Ways to write a value: three digits, a factor, a share, what it is over or under 1, so many decimals."""


def fill(text: str) -> str:
    """Return `text` with every marked number read again. Raises `UserError` if one has no entry or no run."""
    return NUMBER.sub(lambda found: found[1] + value(found[2]) + found[4], text)


def value(name: str) -> str:
    """Return the number of this name as it is written."""
    table, _, key = name.partition(".")
    entry = entries().get(table, {}).get(key)
    if entry is None:
        raise UserError(
            f"a text names the number {name}, which benchmarks/numbers.toml does not have"
        )
    entry = {"of": entry} if isinstance(entry, str) else entry
    found = _read(name, words := shlex.split(entry["of"]))
    if "over" in entry:
        found /= _read(name, words + shlex.split(entry["over"]))
    if "divides" in entry:
        found = entry["divides"] / found
    return WAYS[entry.get("as", "number")](found * entry.get("scale", 1.0))


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the entries of each table of `numbers.toml`, by name."""
    return tomllib.loads((ROOT / "benchmarks" / "numbers.toml").read_text(encoding="utf-8"))


@cache
def _evidence(name: str) -> Evidence:
    return Evidence.load(RESULTS / f"{name}.json")


def _read(name: str, words: list[str]) -> float:
    """Return what words say: a file, a metric (the last one), and settings (the last of each name)."""
    file, *metrics = (word for word in words if "=" not in word)
    metric = metrics[-1]
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    evidence = _evidence(file)
    if metric.startswith("ceilings."):
        return float(evidence.machine["ceilings"][metric.removeprefix("ceilings.")])
    runs = [
        run
        for run in evidence.runs
        if all(str(run.facts.get(key, "")) == value for key, value in settings.items())
    ]
    if len(runs) != 1:
        raise UserError(
            f"the number {name} is of {len(runs)} runs of {file}, and must be of 1: {settings}"
        )
    (run,) = runs
    return (
        run.roofline.fraction if metric == "roofline" and run.roofline else run.median(metric)
    )

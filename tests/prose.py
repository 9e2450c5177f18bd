"""Find the numbers with a unit that a text types by hand; see `benchmarks.numbers`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.numbers import NUMBER

WORKED = re.compile(
    r"<!--w-->.*?<!--/w-->|^<!--worked-->$.*?^<!--/worked-->$", re.DOTALL | re.MULTILINE
)
GENERATED = re.compile(
    r"^<!-- (?:table|code):.*?^<!-- /(?:table|code) -->$", re.DOTALL | re.MULTILINE
)
QUOTED = re.compile(r"^```.*?^```$|`[^`\n]+`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
UNIT = re.compile(
    r"(?<![\w.])\d[\d.,]*\s?"
    r"(?:×(?!\s?\d)|%|(?:tokens\s(?:a|per)\ssecond|tokens/s|times|percent|ms|µs|us|(?<=\s)s|seconds?|minutes?|hours?"
    r"|[KMGT]i?B(?:/s)?|[GT]FLOP/s)\b)"
)
"""A number with the unit of something that is measured."""
SECTIONS = ("1", "2", "6", "9")
"""The sections of a lesson in which every such number is marked."""


def unmarked(text: str, sections: tuple[str, ...] = SECTIONS) -> Iterator[str]:
    """Find the numbers with a unit that are typed by hand, in the sections that begin so."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        if part.startswith(sections):
            bare = part
            for pattern in (GENERATED, WORKED, NUMBER, QUOTED):
                bare = pattern.sub("~", bare)
            for found in UNIT.finditer(bare):
                yield f"{part[0]}: {' '.join(bare[max(0, found.start() - 40) : found.end() + 10].split())}"

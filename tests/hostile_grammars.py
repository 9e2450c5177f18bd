"""Grammars that are sent to stop an engine, and what one of them takes."""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Callable
from typing import Any

from common.errors import UserError
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from paged_cache import PagedEngine

Given = dict[str, Callable[[], Grammar]]
"""Each makes a grammar, or raises `UserError`."""
PROMPT = [1, 2, 3, 4]


def nested(depth: int) -> Any:
    """Objects in objects."""
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def hostile() -> Given:
    """Each makes a grammar, or raises `UserError` at once. The texts are here before, as a client's are."""

    def schema(value: Any) -> Callable[[], Grammar]:
        source = value if isinstance(value, str) else json.dumps(value)
        return lambda: Grammar.json_schema(source)

    return {
        "counts": lambda: Grammar.regex("a{1,9999}{1,9999}"),
        "counts of counts": lambda: Grammar.regex("(a{1,999}b?){1,999}"),
        "catastrophic": lambda: Grammar.regex("((a+)+|(a|aa)+b|(.*a){25})c"),
        "blow-up": lambda: Grammar.regex("(a|b)*a(a|b){20}"),
        "deep": schema(nested(42)),
        "too deep": schema('{"a":' * 500_000),
        "4 MB": schema({"enum": ["x" * 1000 + str(n) for n in range(4000)]}),
        "wide": schema({"properties": {f"p{n}": True for n in range(7000)}}),
        "many strings": schema({"enum": [f"{'x' * 20}{n}" for n in range(8000)]}),
        "no base": schema(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
        ),
        "itself": schema({"$ref": "#"}),
        "ambiguous": lambda: Grammar.lark('start: s\ns: s s | "a" |'),
        "left": lambda: Grammar.lark('start: start "a" | "b"'),
    }


def alone(make: Callable[[], Grammar], engine: PagedEngine) -> tuple[float, int]:
    """Seconds until a grammar is refused or has produced 8 tokens, and the bytes that it took."""
    gc.collect()
    before, begun = resident_bytes(), time.perf_counter()
    try:
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, grammar=make())
        (request,) = engine.add(PROMPT, params)
    except UserError:
        return time.perf_counter() - begun, 0
    while request.finish_reason is None:
        engine.step()
    return time.perf_counter() - begun, max(0, resident_bytes() - before)


def resident_bytes() -> int:
    """What this process holds in memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0

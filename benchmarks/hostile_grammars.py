"""Grammars that are sent to stop an engine: how long others wait meanwhile, and what the grammars take.

Used by the benchmark of phase 12. Some requests without a grammar generate, beside others that come and go:
harmless ones, whose grammar is known; among them, one in fifteen, a harmless one that is new; in its place a
hostile one; or all of them with schemas that are all new. What differs between the gaps of tokens
is what the grammars have done. The kinds take turns, because one turn differs from the next by as much.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.measure import kept_out
from common.errors import UserError
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from paged_cache import PagedEngine

Given = dict[str, Callable[[], Grammar]]
"""Each makes a grammar, or raises `UserError`."""
BYSTANDERS = 8
BESIDE, PER_STEP = 24, 2
"""Requests with grammars that run at a time, and that come in a step, at most."""
LENGTHS = 2, 40
"""Tokens that they ask for. With equal lengths they would go on in step: all come, and go, at once."""
BETWEEN = 14
"""Harmless ones from one that is not, or new, to the next."""
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


def schemas(count: int, *, distinct: bool, first: int = 0) -> Given:
    """Small schemas, all of them the same, or each of its own; those are numbered from `first` on."""

    def make(number: int) -> Callable[[], Grammar]:
        key = {"type": "string", "maxLength": 20}
        schema = {"type": "object", "properties": {f"key{(number + 1) * distinct}": key}}
        return lambda: Grammar.json_schema(schema)

    kind = "new" if distinct else "known"
    return {f"{kind} {number}": make(number) for number in range(first, first + count)}


def unknown(given: Given, turn: int) -> Given:
    """The same, but not as they were in another turn: an engine remembers what it has compiled."""

    def spaced(make: Callable[[], Grammar]) -> Callable[[], Grammar]:
        return lambda: replace(grammar := make(), source=grammar.source + turn * " ")

    return {name: spaced(make) for name, make in given.items()}


def among(some: Given, many: Given) -> Given:
    """Each of some put among many, behind `BETWEEN` of them; those behind the last of some are many's own."""
    mixed, rest = Given(), list(reversed(some.items()))
    for number, (name, make) in enumerate(many.items(), start=1):
        mixed[name] = make
        if rest and number % BETWEEN == 0:
            mixed.update([rest.pop()])
    return mixed | dict(rest)


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


def checked(make: Callable[[], Grammar]) -> Grammar | None:
    """A grammar that is one, by its text; None: it is refused. A server's other process does this."""
    try:
        return make()
    except UserError:
        return None


def gaps(engine: PagedEngine, given: Given, tokens: int) -> list[float]:
    """Milliseconds between the tokens of bystanders while requests come and go."""
    free = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    others = [engine.add(PROMPT, free)[0] for _ in range(BYSTANDERS)]
    times: dict[Request, list[float]] = {request: [] for request in others}
    waiting = deque(
        grammar for make in given.values() if (grammar := checked(make)) is not None
    )
    # What others have left behind is not these', and Python's collector shall not look through all that waits
    # in the middle of a step.
    gc.collect()
    rng, beside = random.Random(0), list[Request]()
    while any(request.finish_reason is None for request in others):
        ready = all(len(found) >= 2 for found in times.values())
        beside = [request for request in beside if request.finish_reason is None]
        for _ in range(min(PER_STEP, BESIDE - len(beside), len(waiting)) if ready else 0):
            length, seed = rng.randint(*LENGTHS), rng.getrandbits(32)
            params = SamplingParams(
                max_tokens=length, temperature=1.0, seed=seed, grammar=waiting.popleft()
            )
            beside += engine.add(PROMPT, params)
        for output in engine.step():
            if output.request in times and output.token_id is not None:
                times[output.request].append(output.time)
    while not engine.idle:
        engine.step()
    return [1e3 * float(gap) for found in times.values() for gap in np.diff(found)]


def resident_bytes() -> int:
    """What this process holds in memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def measure(engine: PagedEngine, tokens: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Metrics by workload, a sample each turn: beside harmless, new, hostile and distinct grammars.

    The 99th percentile of one turn is the second or third of its longest steps, which is chance for the most
    part. That of all turns' gaps together (`itl_ms_p99_all_turns`) is the better number to compare.
    """
    some, most = len(hostile()), PER_STEP * tokens
    harmless = schemas(most, distinct=False)
    gaps(
        engine, among(unknown(hostile(), turns + 1), harmless), max(2, tokens // 4)
    )  # a warm-up
    found: dict[str, dict[str, list[float]]] = {}
    all_waits: dict[str, list[float]] = {}
    with kept_out():
        for turn in range(turns):
            sets = {
                "harmless grammars": harmless,
                "new grammars": among(
                    schemas(some, distinct=True, first=turn * (some + most)), harmless
                ),
                "hostile grammars": among(unknown(hostile(), turn), harmless),
                "distinct grammars": schemas(
                    most, distinct=True, first=turn * (some + most) + some
                ),
            }
            first = turn % len(sets)  # none is always the first, or the last
            for name in (*sets, *sets)[first : first + len(sets)]:
                waits, metrics = gaps(engine, sets[name], tokens), found.setdefault(name, {})
                all_waits.setdefault(name, []).extend(waits)
                metrics.setdefault("itl_ms_p99", []).append(float(np.percentile(waits, 99)))
                metrics.setdefault("itl_ms_max", []).append(max(waits))
                metrics["itl_ms_p99_all_turns"] = [float(np.percentile(all_waits[name], 99))]
        each = [alone(make, engine) for make in unknown(hostile(), turns).values()]
        found["hostile grammars"] |= {
            "worst_seconds": [max(seconds for seconds, _ in each)],
            "peak_memory_bytes": [float(max(grown for _, grown in each))],
        }
    return found

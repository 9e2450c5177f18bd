"""Rungs of `ladder demo`: what each is for, and a number for it, counted so that no neighbour changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from forward.model import Model
from paged_cache.memory import weight_bytes
from phases import Phase
from phases.registry import BLOCKS, ROWS, load_engine

MAX_LEN = 192
"""Tokens of a request that a row of phase 04 has room for: a question and its answer take half."""
MEMORY_ROWS = 2
"""Rows of a batch in phase 03, and of the cache that every phase from 04 on has."""
CHUNK = 64
"""Tokens of a step from phase 07 on."""
CHUNKED = 7


@dataclass(frozen=True)
class Show:
    """One rung: what it adds in a sentence, the count of `COUNTS` that shows it, and what makes it visible.

    option: a pair of an option's name and its value.
    """

    why: str
    count: str = ""
    option: tuple[str, Any] | None = None


COUNTS = {
    "computed": "tokens computed",
    "steps": "passes over the weights",
    "largest": "tokens of the largest step",
    "at_once": "requests at once, in the same memory",
    "weights": "MiB of weights",
}
"""Of answering all questions, by the name in `counted`."""
SHOWS = {
    1: Show("Every new token computes all tokens before it again.", "computed"),
    2: Show("Keys and values are kept, so every step computes one token.", "computed"),
    3: Show("Questions share each step: the weights are read once for them.", "steps"),
    4: Show("A finished answer leaves the batch at once, and a waiting question takes its place.", "steps"),
    5: Show("The cache is blocks handed out on demand, so more requests fit the same memory.", "at_once"),
    6: Show("Kernels read the blocks where they lie: compare the speed."),
    7: Show("Long prompts are cut into chunks, so that nobody waits for one.", "largest"),
    8: Show("Prompts that begin alike are computed once.", "computed"),
    9: Show(
        "The next step is scheduled while this one runs. With CUDA, a step is one launch: see its speed."
    ),
    10: Show("Weights and keys may have 8 or 4 bits.", "weights", ("quantization", "int8")),
    11: Show(
        "Tokens are guessed and checked in one step; the text stays the same.", "steps", ("speculate", True)
    ),
}
"""By number of the phase. Others are for something that questions and answers do not show."""
ROUNDS = 10
"""The phase whose answers may be others: its weights are rounded."""
ELSEWHERE = {
    12: "ladder run 12 --chat --prompt 'Is the sky blue?' --choice yes,no --trace",
    14: "ladder run 14 --tensor-parallel 2",
    15: "ladder serve --replicas 2",
    16: "ladder run 16 --active-experts 4",
    17: "ladder run 17 --model gemma3-270m",
}


def load(phase: Phase, model: Model) -> Any:
    """Make the rung's engine, with little memory: from phase 04 on as much as two rows of phase 04 take."""
    option = SHOWS[phase.number].option
    options: dict[str, Any] = {} if option is None else dict([option])
    if phase.number == ROWS - 1:
        options["batch_size"] = MEMORY_ROWS
    if phase.number >= ROWS:
        options |= {"max_len": MAX_LEN, "max_rows": MEMORY_ROWS}
        options["cache_bytes"] = MEMORY_ROWS * (MAX_LEN + 16) * model.config.kv_bytes_per_token(model.dtype)
    if phase.number >= BLOCKS:
        options["max_rows"] = 8
    if phase.number >= CHUNKED:
        options["step_tokens"] = CHUNK
    return load_engine(phase, model, **options)


@contextmanager
def counted(phase: Phase, engine: Any) -> Iterator[dict[str, float]]:
    """Count an engine's work inside a block: what is yielded has all of `COUNTS` when the block ends."""
    model: Model = engine.runner.model if phase.number >= ROWS else engine.model
    work = {"computed": 0, "steps": 0, "largest": 0, "at_once": 1, "weights": weight_bytes(model) / 2**20}

    def passed(module: Any, arguments: tuple[Any, ...]) -> None:
        ids = arguments[0]
        work["computed"] += ids.numel()
        work["steps"] += 1
        work["largest"] = max(work["largest"], ids.numel())
        work["at_once"] = max(work["at_once"], ids.shape[0] if ids.dim() > 1 else 1)

    before = replace(engine.stats) if phase.number >= ROWS else None
    hook = model.register_forward_pre_hook(passed)
    try:
        yield work
    finally:
        hook.remove()
    if before is not None:  # the model is not called where a step is a graph
        stats = engine.stats
        work["computed"] = stats.computed_tokens - before.computed_tokens
        work["steps"] = stats.steps - before.steps
        work["at_once"] = stats.most_running


def change(phase: Phase, before: Mapping[str, float] | None, now: Mapping[str, float]) -> str:
    """Say what a rung has changed: `tokens computed: 9,812 to 642 (15× fewer)`."""
    name = SHOWS[phase.number].count
    if not name:
        return ""
    new, old = round(now[name]), round(before[name]) if before else 0
    if not old or not new or old == new:
        return f"{COUNTS[name]}: {new:,}"
    factor, more = max(new, old) / min(new, old), "more" if new > old else "fewer"
    return f"{COUNTS[name]}: {old:,} to {new:,} ({factor:.2g}× {more})"

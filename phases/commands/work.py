"""Count what an engine does for a command (tokens, steps), and describe it in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common.events import Completion
from common.words import count
from forward.model import Model
from phases import Phase
from phases.registry import BLOCKS, QUANT, ROWS

CHUNKED, PREFIXES = 7, 8
"""The first phases with steps of limited size, and with a prefix cache."""
COUNTS = {
    "computed": "tokens computed",
    "steps": "passes over the weights",
    "largest": "tokens of the largest step",
    "at_once": "requests at once, in the same memory",
    "weights": "MiB of weights",
}
"""Name in `counted` -> its words in the table."""


def model_of(phase: Phase, engine: Any) -> Model:
    """Return the model of a phase's engine: `engine.runner.model` from phase 04 on, else `engine.model`."""
    return engine.runner.model if phase.number >= ROWS else engine.model


@contextmanager
def counted(phase: Phase, engine: Any) -> Iterator[dict[str, float]]:
    """Count an engine's work while a `with` block runs; yield a dictionary that is complete after the block.

    Its keys: "computed" (tokens), "steps", "largest" (tokens of a step) and "at_once" (requests).
    """
    model = model_of(phase, engine)
    work: dict[str, float] = {
        "computed": 0,
        "steps": 0,
        "largest": 0,
        "at_once": 1,
    }

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


def describe_work(
    phase: Phase,
    engine: Any,
    work: Mapping[str, float],
    completions: Sequence[Completion],
    drafts: Any = None,
) -> str:
    """Return one line about the work of an engine: tokens computed, and the numbers that its phase improves.

    engine: a new one, whose counters are of these completions alone.
    work: the dictionary that `counted` yielded.
    drafts: the `SpeculationStats` of speculative decoding, or None.
    """
    number = phase.number
    parts = [
        f"{count(round(work['computed']), 'token')} computed in {count(round(work['steps']), 'step')}"
    ]
    if number in (ROWS - 1, ROWS):
        parts.append(f"at most {count(round(work['at_once']), 'request')} at once")
    if number == CHUNKED:
        parts.append(f"at most {round(work['largest']):,} in one")
    if BLOCKS <= number < PREFIXES:
        size = engine.cache.block_size
        lengths = [len(each.prompt_ids) + len(each.token_ids) for each in completions]
        used = sum(-(-length // size) for length in lengths)
        parts.append(
            f"{used:,} of {engine.cache.allocator.count:,} blocks of {size} tokens used"
        )
    if number >= PREFIXES:
        from prefix_cache.cache import PrefixCache  # a phase must not need those above it

        if isinstance(engine.cache, PrefixCache):
            found = engine.cache.stats
            parts.append(
                f"{found.hit_tokens:,} of {found.lookup_tokens:,} found in the prefix cache"
            )
    if number == QUANT:
        from paged_cache.memory import weight_bytes

        parts.append(f"{weight_bytes(engine.runner.model) / 2**20:,.0f} MiB of weights")
    if drafts is not None:
        parts.append(f"{sum(drafts.accepted):,} of {sum(drafts.drafted):,} drafts accepted")
    return ", ".join(parts)

"""Phase 04: rows over steps beside phase 03's, one ragged batch, and one request's counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import batching
import continuous
from benchmarks.pictures.driving import exactly, tiny, token_ids
from benchmarks.pictures.svg import (
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    cells,
    picture,
    strip,
    table,
    titled,
)
from common.events import generate
from continuous.batch import HostBatch
from continuous.work import Work

NAMES = "abcde"
PROMPTS, OUTPUTS = (3, 2, 4, 1, 3), (2, 9, 3, 4, 2)
IDS = [[7 + at] * count for at, count in enumerate(PROMPTS)]
PARAMS = [exactly(most) for most in OUTPUTS]
ROWS = 3
WATCHED = 2
"""Whose counts are shown."""
Step = dict[int, list[str]]
"""The tokens that a step computes in each row; those without a name serve no request."""


@dataclass
class Trace:
    """Steps of phase 04: their works by row, and the batch that the model and attention are given.

    watched: moments of one request: what happens, its counts of tokens by their looks, and its three counts.
    """

    works: list[list[Work]] = field(default_factory=list)
    batches: list[HostBatch] = field(default_factory=list)
    watched: Lines = field(default_factory=list)


def record() -> Trace:
    """Drive phase 04's engine by hand."""
    engine: Any = continuous.load(tiny(), max_rows=ROWS, max_len=32)
    pairs = enumerate(zip(IDS, PARAMS, strict=True))
    one = [engine.add(*pair, index=at)[0] for at, pair in pairs][WATCHED]
    trace = Trace()

    def note(moment: str, now: int = 0) -> None:
        known, coming = len(one.tokens), one.placeholders
        computed = one.num_computed_tokens
        looks = {
            "kept": computed - now,
            "now": now,
            "known": known - computed,
            "coming": coming,
        }
        tokens = strip(NAMES[WATCHED], NAMES[WATCHED], **looks)
        trace.watched.append([moment, tokens, known, coming, computed])

    note("waits in line")
    while not engine.idle:
        engine.process_inbox()
        works = sorted(engine.schedule(), key=lambda work: work.row)
        trace.works.append(works)
        trace.batches.append(HostBatch.of(works, engine.runner.rows.prompt_lens))
        now = sum(work.count for work in works if work.request is one)
        if now:
            note(f"step {len(trace.works)} is scheduled", now)
        engine.collect(engine.sample(engine.forward(works)))
        if now:
            note(f"step {len(trace.works)} is finished")
        engine.take_outputs()
    return trace


def named(work: Work) -> list[str]:
    """The tokens of a work: its request's letter, and their numbers."""
    who = NAMES[work.request.index]
    return [f"{who}{work.start + at}" for at in range(work.count)]


def static() -> list[Step]:
    """Phase 03's steps, read off the ids that its model gets: 0 is padding, and each prompt has one id."""
    engine: Any = batching.load(tiny(), batch_size=ROWS)
    with token_ids() as seen:
        generate(engine, IDS, PARAMS)
    steps: list[Step] = []
    for ids in seen:
        if ids.shape[1] > 1:  # a prefill: the next batch
            batch = [int(line[-1]) - 7 for line in ids]
            at = 0
        steps.append({})
        for place, who in enumerate(batch):
            end = PROMPTS[who] + at
            names = [f"{NAMES[who]}{token}" for token in range(end - 1 if at else 0, end)]
            padding = [""] * ids[place].tolist().count(0)
            steps[-1][place] = padding + names if at < OUTPUTS[who] else [""]
        at += 1
    assert flat(steps).count("") == engine.waste.padding + engine.waste.finished, (
        "as it counts"
    )
    return steps


def flat(steps: Sequence[Step]) -> list[str]:
    """All positions that these steps compute."""
    return [name for step in steps for names in step.values() for name in names]


def panel(phase: str, steps: Sequence[Step]) -> Box:
    """Rows over steps, a cell for each token that is computed."""
    names = flat(steps)
    wasted = names.count("")
    words = (
        f"{phase}: {len(steps)} steps, {len(names)} positions, {wasted} of them for no request"
    )
    lines: Lines = [["", *range(1, len(steps) + 1)]]
    for place in range(ROWS):
        lines.append([f"row {place}"])
        for step in steps:
            found = step.get(place, [])
            looks = [f"now {name[0]}" if name else "idle" for name in found]
            lines[-1].append(cells(found, looks, 27))
    return titled(words, table(lines, gap=9))


def rows() -> Picture:
    """Both phases' rows."""
    steps = [{work.row: named(work) for work in works} for works in record().works]
    return picture(
        "Three rows over the steps of phase 03 and of phase 04",
        panel("03", static()),
        panel("04", steps),
        "now b: a token of a request",
        "idle: padding, or a row that has finished",
    )


def ragged(number: int = 4) -> Picture:
    """The batch of a step, from 1 on: which tokens of which rows, and the arrays that say so."""
    trace = record()
    works, arrays = trace.works[number - 1], trace.batches[number - 1]
    held: Lines = [[f"row {place}", "free"] for place in range(ROWS)]
    for work in works:
        who = NAMES[work.request.index]
        held[work.row][1] = strip(who, who, kept=work.start, now=work.count)
    tokens = [name for work in works for name in named(work)]
    starts, every = arrays.query_starts, range(len(tokens))
    lines: Lines = [["tokens", *(Cell(name, f"now {name[0]}") for name in tokens)]]
    columns: dict[str, tuple[Iterable[int], str]] = {
        "token_rows": (every, "whose keys"),
        "positions": (every, "and which of them"),
        "query_starts": (starts, "where each request begins"),
        "context_lens": (starts, "its keys, the new ones too"),
        "sample_at": (arrays.sample_at, "what is sampled"),
    }
    for name, (at, says) in columns.items():
        values = dict(zip(at, vars(arrays)[name], strict=False))
        shown = [str(values.get(token, "")) for token in range(len(tokens) + 1)]
        lines.append([name, *shown, Box(14), Text(says, "soft")])
    return picture(
        f"The ragged batch of step {number}",
        titled(f"step {number}: what is in the rows, and what is new", table(held)),
        titled("the batch", table(lines, down=4)),
        f"kept {who}: computed before: in the cache",
        f"now {who}: computed in this step",
    )


def counts() -> Picture:
    """The three counts of one request, at every moment of its life."""
    who = NAMES[WATCHED]
    return picture(
        f"Request {who} from arrival to end: tokens, placeholders and computed tokens",
        table([["", "", "tokens", "placeholders", "computed"], *record().watched], gap=14),
        f"known {who}: known, not computed",
        f"now {who}: computed in this step",
        f"kept {who}: in the cache",
        f"coming {who}: a placeholder",
    )


PICTURES = {"rows": rows, "batch": ragged, "counts": counts}
show = ragged

"""Phase 04: rows over steps beside phase 03's, one ragged batch, and one request's counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import batching
import continuous
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.svg import SOFT, Kind, Picture
from common.events import generate
from common.sampling.params import SamplingParams
from continuous.batch import HostBatch
from continuous.work import Work

NAMES = "abcde"
PROMPTS, OUTPUTS = (3, 2, 4, 1, 3), (2, 9, 3, 4, 2)
ROWS = 3
STEP, WATCHED = 4, "c"
"""Which step is shown as a batch, and whose counts."""

CELL = 27
Span = tuple[str, int, int]
"""A request's letter, the first of its tokens that a step computes, and how many."""


@dataclass(frozen=True)
class Counts:
    """Where a request stands at one moment."""

    moment: str
    tokens: int
    placeholders: int
    computed: int
    fresh: int = 0


@dataclass(frozen=True)
class Step:
    """One step: what each row computes, and the arrays that the model and attention are given."""

    rows: Mapping[int, Span]
    arrays: HostBatch


@dataclass(frozen=True)
class Trace:
    """All steps, and what they did to the request that is watched."""

    steps: Sequence[Step]
    watched: Sequence[Counts]


def _requests() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[7 + at] * count for at, count in enumerate(PROMPTS)]
    return prompts, [exactly(most) for most in OUTPUTS]


def record() -> Trace:
    """Drive phase 04's engine by hand, three calls a step."""
    engine: Any = continuous.load(tiny(), max_rows=ROWS, max_len=32)
    asked = zip(*_requests(), strict=True)
    requests = [engine.add(*pair, index=at)[0] for at, pair in enumerate(asked)]
    one = requests[NAMES.index(WATCHED)]
    watched = list[Counts]()

    def note(moment: str, works: Sequence[Work] = ()) -> None:
        fresh = sum(work.count for work in works if work.request is one)
        if fresh or not works:
            counts = (len(one.tokens), one.placeholders, one.num_computed_tokens)
            watched.append(Counts(moment, *counts, fresh))

    prepare, given = engine.runner.prepare, list[HostBatch]()

    def watch(works: list[Work]) -> Any:
        batch = prepare(works)
        given.append(batch.host)
        return batch

    engine.runner.prepare = watch
    note("waits in line")
    steps = list[Step]()
    while not engine.idle:
        engine.process_inbox()
        works = engine.schedule()
        rows = {
            work.row: (NAMES[work.request.index], work.start, work.count) for work in works
        }
        takes_part = one.finish_reason is None
        note(f"step {len(steps) + 1} is scheduled", works)
        engine.collect(engine.sample(engine.forward(works)))
        engine.take_outputs()
        steps.append(Step(rows, given[-1]))
        if takes_part:
            note(f"step {len(steps)} has landed")
    return Trace(steps, watched)


def record_static() -> list[dict[int, tuple[str, int, int, int]]]:
    """Phase 03's steps: of each row the request, padding, first token, count; no request: a wasted row."""
    engine: Any = batching.load(tiny(), batch_size=ROWS)
    prompts, params = _requests()
    shapes: list[tuple[int, int]] = []
    step = engine._step

    def watch(ids: Any, *rest: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return step(ids, *rest)

    engine._step = watch
    said = [len(done.token_ids) for done in generate(engine, prompts, params)]
    assert said == list(OUTPUTS)
    steps: list[dict[int, tuple[str, int, int, int]]] = []
    first, at = -ROWS, 0
    for height, width in shapes:
        if width > 1:  # a prefill: the next batch
            first, at = first + ROWS, 0
        rows = {}
        for row in range(height):
            who = first + row
            if at >= OUTPUTS[who]:
                rows[row] = ("", 0, 0, 1)
            else:
                count = PROMPTS[who] if width > 1 else 1
                start = 0 if width > 1 else PROMPTS[who] + at - 1
                rows[row] = (NAMES[who], width - count, start, count)
        steps.append(rows)
        at += 1
    assert _wasted(steps) == engine.waste.padding + engine.waste.finished, (
        "as the engine counts it"
    )
    return steps


def _wasted(steps: Sequence[Mapping[int, tuple[str, int, int, int]]]) -> int:
    """Positions of phase 03 that are padding, or of rows that have finished."""
    return sum(pad if who else 1 for step in steps for who, pad, _, _ in step.values())


def rows(trace: Trace) -> Picture:
    """Both phases' rows over their steps, a cell for each token that is computed."""
    static = record_static()
    wasted = _wasted(static)
    now = [
        {row: (who, 0, start, count) for row, (who, start, count) in step.rows.items()}
        for step in trace.steps
    ]
    total = [
        sum(pad + n for step in steps for _, pad, _, n in step.values())
        for steps in (static, now)
    ]
    picture = Picture(
        "Three rows over the steps of phase 03 and of phase 04",
        f"Phase 03 computes {total[0]} positions in {len(static)} steps, {wasted} of them padding or rows "
        f"that have finished. Phase 04 computes {total[1]} in {len(trace.steps)} steps, none in vain.",
        height=296,
    )
    words = [
        f"03: {len(static)} steps compute {total[0]} positions, {wasted} of them for no request",
        f"04: {len(trace.steps)} steps compute {total[1]} tokens; a free row is taken in the next step",
    ]
    for panel, (steps, headline) in enumerate(zip((static, now), words, strict=True)):
        top = 16 + panel * 136
        picture.text(16, top + 8, headline, bold=True)
        for row in range(ROWS):
            picture.text(62, top + 52 + 28 * row, f"row {row}", "end", SOFT)
        x = 74.0
        for number, step in enumerate(steps, 1):
            wide = CELL * max(pad + count for _, pad, _, count in step.values())
            picture.text(x + wide / 2, top + 28, str(number), "middle", SOFT, 11)
            for row, (who, pad, start, count) in step.items():
                for at in range(pad + count):
                    real = who and at >= pad
                    name = f"{who}{start + at - pad}" if real else ""
                    place = (x + CELL * at, top + 34 + 28 * row)
                    picture.cell(*place, CELL, 27, "now" if real else "idle", who, name)
            x += wide + 9
    picture.legend(
        74,
        284,
        [
            ("now", "b", "a token of a request"),
            ("idle", "b", "padding, or a row that has finished"),
        ],
    )
    return picture


def ragged(step: Step, number: int) -> Picture:
    """One step's batch: which tokens of which rows, and the arrays that say so."""
    arrays, count = step.arrays, len(step.arrays.positions)
    spans = sorted(step.rows.items(), key=lambda item: list(arrays.rows).index(item[0]))
    longest = max(start + fresh for _, start, fresh in step.rows.values())
    left, widest = 150, max(count + 0.5, longest, 5)
    cell = min(44, int(340 / widest))
    picture = Picture(
        f"The ragged batch of step {number}",
        f"{len(spans)} requests bring {count} tokens, end to end and without padding: "
        + ", ".join(f"{who}{start + at}" for _, (who, start, n) in spans for at in range(n)),
        height=62 + 30 * ROWS + 176,
    )
    picture.text(16, 24, f"step {number}: what is in the rows, and what is new", bold=True)
    starts, x = dict[int, float](), float(left)
    base = 74 + 30 * ROWS + 12
    for row, (_, _, fresh) in spans:
        starts[row], x = x, x + cell * fresh
    for row in range(ROWS):
        y = 40 + 30 * row
        picture.text(left - 16, y + 18, f"row {row}", "end", SOFT)
        who, start, fresh = step.rows.get(row, ("", 0, 0))
        for at in range(start + fresh):
            kind: Kind = "now" if at >= start else "kept"
            picture.cell(left + cell * at, y, cell, 27, kind, who, f"{who}{at}")
        if not who:
            picture.text(left + 4, y + 18, "free", fill=SOFT)
    picture.text(left - 16, base + 18, f"tokens, T = {count}", "end", bold=True)
    lines = ("token_rows", "positions", "query_starts", "context_lens", "sample_at")
    ys = {name: base + 50 + 22 * at for at, name in enumerate(lines)}
    for name, y in ys.items():
        picture.text(left - 16, y, name, "end", mono=True)
    for at, (row, (who, start, fresh)) in enumerate(spans):
        for token in range(fresh):
            x = starts[row] + cell * token
            name = f"{who}{start + token}"
            picture.cell(x, base, cell, 27, "now", who, name)
            index = int(arrays.query_starts[at]) + token
            for array, value in (
                ("token_rows", arrays.token_rows),
                ("positions", arrays.positions),
            ):
                picture.text(x + cell / 2, ys[array], str(value[index]), "middle")
            if index in arrays.sample_at:
                picture.text(x + cell / 2, ys["sample_at"], str(index), "middle")
        x = starts[row]
        picture.text(x + 3, ys["query_starts"], str(arrays.query_starts[at]))
        picture.line([(x, base - 4), (x, ys["query_starts"] + 3)], dash="2 3")
        wide = cell * fresh
        picture.text(x + wide / 2, ys["context_lens"], str(arrays.context_lens[at]), "middle")
    end = left + cell * count
    picture.line([(end, base - 4), (end, ys["query_starts"] + 3)], dash="2 3")
    picture.text(end + 3, ys["query_starts"], str(arrays.query_starts[-1]))
    right = left + cell * widest + 24
    for name, says in (
        ("token_rows", "whose keys"),
        ("positions", "and which of them"),
        ("query_starts", "where each request begins"),
        ("context_lens", "keys it can see, the new ones too"),
        ("sample_at", "whose hidden state becomes a token"),
    ):
        picture.text(right, ys[name], says, fill=SOFT)
    first = spans[0][1][0]
    picture.legend(right, 58, [("kept", first, "computed before: in the cache")])
    picture.legend(right, 82, [("now", first, "computed in this step")])
    return picture


def counts(trace: Trace) -> Picture:
    """The three counts of one request, at every moment of its life."""
    height = 27
    picture = Picture(
        f"Request {WATCHED} from arrival to end: tokens, placeholders and computed tokens",
        "; ".join(
            f"{c.moment}: {c.tokens} tokens, {c.placeholders} placeholders, {c.computed} computed"
            for c in trace.watched
        ),
        height=78 + height * len(trace.watched),
    )
    for x, name in ((480, "tokens"), (568, "placeholders"), (668, "computed")):
        picture.text(x, 24, name, "middle", SOFT)
    picture.text(16, 24, f"request {WATCHED}", bold=True)
    for at, counts in enumerate(trace.watched):
        y = 36 + height * at
        picture.text(150, y + 17, counts.moment, "end")
        for token in range(counts.tokens + counts.placeholders):
            kind: Kind = (
                "now"
                if counts.computed - counts.fresh <= token < counts.computed
                else "kept"
                if token < counts.computed
                else "known"
                if token < counts.tokens
                else "coming"
            )
            name = f"{WATCHED}{token}" if token < counts.tokens else "?"
            picture.cell(166 + 38 * token, y, 38, height - 2, kind, WATCHED, name)
        for x, value in (
            (480, counts.tokens),
            (568, counts.placeholders),
            (668, counts.computed),
        ):
            picture.text(x, y + 17, str(value), "middle")
    picture.legend(
        16,
        58 + height * len(trace.watched),
        [
            ("known", WATCHED, "known, not computed"),
            ("now", WATCHED, "computed in this step"),
            ("kept", WATCHED, "in the cache"),
            ("coming", WATCHED, "a placeholder: not seen yet"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's three."""
    trace = record()
    return {
        "rows": rows(trace),
        "batch": ragged(trace.steps[STEP - 1], STEP),
        "counts": counts(trace),
    }


def show(step: int) -> Picture:
    """The batch of any step, from 1 on."""
    return ragged(record().steps[step - 1], step)

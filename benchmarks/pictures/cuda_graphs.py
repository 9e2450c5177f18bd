"""Phase 09: what host and device do in which order, one step after the other and one ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cuda_graphs
from benchmarks.pictures import capture
from benchmarks.pictures.driving import exactly, tiny
from benchmarks.pictures.svg import LINE, SOFT, Kind, Picture

PROMPT, OUTPUT = 3, 4
PLAN = 2
DEAL = 2
STEP = 4
"""How long each is drawn. The order is the engine's; the lengths are not measured."""


class Event(NamedTuple):
    """The host plans and launches a step, or deals out its token; what it knew of the request then."""

    what: str
    step: int
    tokens: int
    placeholders: int


def record(overlap: bool) -> list[Event]:
    """One request from its prompt to its last token."""
    engine: Any = cuda_graphs.load(tiny(), overlap=overlap, max_rows=1, max_len=32)
    events: list[Event] = []
    schedule, collect = engine.schedule, engine.collect
    (request,) = engine.add([1, 2, 3][:PROMPT], exactly(OUTPUT))

    def note(what: str) -> None:
        number = sum(event.what == what for event in events)
        events.append(Event(what, number, len(request.tokens), request.placeholders))

    def watch_schedule() -> Any:
        before = (len(request.tokens), request.placeholders)
        works = schedule()
        if works:
            note("plan")
            events[-1] = events[-1]._replace(tokens=before[0], placeholders=before[1])
        return works

    def watch_collect(pending: Any) -> None:
        note("deal")
        collect(pending)

    engine.schedule, engine.collect = watch_schedule, watch_collect
    while not engine.idle:
        engine.step()
    return events


def times(events: Sequence[Event]) -> tuple[list[int], dict[int, tuple[int, int]], int]:
    """When each of the host's events begins, when each step runs on the device, and when all is done.

    A step begins when it is launched and the one before it has ended; a deal waits for its step.
    """
    now, free = 0, 0
    starts: list[int] = []
    steps: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.what == "deal":
            now = max(now, steps[event.step][1])
        starts.append(now)
        now += PLAN if event.what == "plan" else DEAL
        if event.what == "plan":
            begin = max(now, free)
            free = begin + STEP
            steps[event.step] = (begin, free)
    return starts, steps, now


def timeline(panels: Sequence[tuple[str, Sequence[Event]]]) -> Picture:
    """Lanes of host and device, and what the host knows of the tokens whenever it plans."""
    left = 96
    unit = 20
    high = 148
    longest = max(times(events)[2] for _, events in panels)
    picture = Picture(
        "Host and device, one after the other and overlapped",
        "; ".join(
            f"{title}: {', '.join(f'{e.what} {e.step}' for e in events)}"
            for title, events in panels
        ),
        height=high * len(panels) + 34,
    )
    for panel, (title, events) in enumerate(panels):
        top = 10 + high * panel
        starts, steps, end = times(events)
        picture.text(16, top + 16, title, bold=True)
        for lane, name in enumerate(("host", "device")):
            y = top + 30 + 36 * lane
            picture.text(left - 14, y + 19, name, "end")
            picture.line([(left, y + 15), (left + unit * longest, y + 15)], LINE)
        picture.text(left - 14, top + 116, "host knows", "end", SOFT)
        for event, start in zip(events, starts, strict=True):
            wide = unit * (PLAN if event.what == "plan" else DEAL)
            x = left + unit * start
            plan = event.what == "plan"
            picture.cell(x, top + 30, wide, 30, "kept" if plan else "known", "")
            words = f"{event.what} {event.step}"
            picture.text(x + wide / 2, top + 49, words, "middle", size=11)
            if plan:
                for token in range(event.tokens + event.placeholders):
                    kind: Kind = "known" if token < event.tokens else "coming"
                    picture.cell(x + 12 * token, top + 104, 13, 17, kind, "a")
                picture.line([(x + wide - 1, top + 60), (x + wide - 1, top + 66)])
        for number, (begin, done) in steps.items():
            wide = unit * (done - begin)
            picture.cell(left + unit * begin, top + 66, wide, 30, "now", "a", f"step {number}")
        x = left + unit * end
        if x + 40 > picture.width:
            continue
        picture.line([(x, top + 26), (x, top + 100)], SOFT, dash="3 3")
        picture.text(x + 6, top + 40, "done", fill=SOFT)
    picture.legend(
        16,
        picture.height - 14,
        [
            ("now", "a", "the device computes"),
            ("known", "a", "a token that the host knows when it plans"),
            ("coming", "a", "a placeholder: on its way"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's two."""
    return capture.pictures() | {
        "overlap": timeline(
            [("one after the other", record(False)), ("one step ahead", record(True))]
        ),
    }


def show(overlap: bool) -> Picture:
    """One of the two."""
    return timeline(
        [("one step ahead" if overlap else "one after the other", record(overlap))]
    )

"""A request's life as a picture: `python -m benchmarks.request_life` records one and draws it.

A real server, a real engine process and a client that streams. What each of them does is noted when it
happens; the picture is drawn from these notes alone (`phases/13_serving/life.json`), to scale.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.evidence import ROOT
from common.files import whole
from common.text.tokenizer import Tokenizer

FOLDER = ROOT / "phases" / "13_serving"
TRACE, PICTURE = FOLDER / "life.json", FOLDER / "life.svg"
MODEL, OUTPUT = "random:tiny", 5
NEIGHBOUR = {"prompt": "somebody else is being served all the while", "max_tokens": 60}
REQUEST = {"prompt": "this prompt is 28 bytes long", "max_tokens": OUTPUT}

Note = dict[str, Any]


class Recorder:
    """An ASGI application around the server's that notes what one request does, and when.

    notes: `{"lane", "what", "at", "until"}`, in `time.perf_counter()` seconds.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.notes = app, list[Note]()
        self.of: bytes | None = None
        self._transmit = app.engine.transmit
        app.engine.transmit = self.transmit
        app.engine.on_step.insert(0, self.on_step)

    def note(self, lane: str, what: str, at: float, until: float | None = None) -> None:
        """Something has happened."""
        self.notes.append(
            {"lane": lane, "what": what, "at": at, "until": at if until is None else until}
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass everything through; note it for the request that is looked at."""
        if (
            scope["type"] != "http"
            or dict(scope["headers"]).get(b"x-request-id") != b"looked-at"
        ):
            await self.app(scope, receive, send)
            return
        self.note("api", "headers", time.perf_counter())

        async def received() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                self.note("api", "body", time.perf_counter())
            return message

        async def sent(message: Any) -> None:
            at = time.perf_counter()
            await send(message)
            what = "status" if message["type"] == "http.response.start" else "chunk"
            self.note("api", what, at, time.perf_counter())

        await self.app(scope, received, sent)

    def transmit(self, data: bytes) -> None:
        """A message leaves for the engine."""
        self.note("api", "to the engine", time.perf_counter())
        self._transmit(data)

    def on_step(self, step: Any) -> None:
        """A report has come; it says how long its step took."""
        now = self.app.engine.now
        self.note("engine", f"{step.stats.step_tokens}", now - step.stats.step_seconds, now)
        self.note("api", "report", now)


async def life(recorder: Recorder, server: Any, port: int) -> None:
    """Ask: first the neighbour, and once it is served, the request that is looked at."""
    from benchmarks.loadtest.user import Target, ask

    target = Target("127.0.0.1", port)
    await ask(target, {**NEIGHBOUR, "max_tokens": 4})  # the first steps allocate
    neighbour = asyncio.ensure_future(ask(target, {**NEIGHBOUR, "ignore_eos": True}))
    await asyncio.sleep(0.08)
    outcome = await ask(
        target, {**REQUEST, "ignore_eos": True}, headers={"x-request-id": "looked-at"}
    )
    assert outcome.ok, outcome.error
    recorder.note("client", "asks", outcome.started)
    for at in outcome.times:
        recorder.note("client", "token", at)
    recorder.note("client", "end", outcome.ended)
    await neighbour
    server.should_exit = True


def make_engine(folder: str, options: dict[str, Any]) -> Any:
    """The engine, in its own process."""
    from phases import phase_named
    from phases.registry import load_engine

    tokenizer = Tokenizer(folder)
    return load_engine(
        phase_named("13"), MODEL, device="cpu", dtype="float32", tokenizer=tokenizer, **options
    )


def record() -> list[Note]:
    """Notes of one life, in milliseconds from the client's first word to a little after its last."""
    import uvloop

    from common.sockets import listen
    from common.text.made_up import write_tokenizer
    from serving.app import App
    from serving.http.server import HttpServer
    from serving.liveness import EngineProcess

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), 257, (0,))
        options = {"max_rows": 8, "cache_bytes": 1 << 22}
        engine = EngineProcess(partial(make_engine, folder, options))
        app = App(engine, Tokenizer(folder), "tiny")
        recorder, listening = Recorder(app), listen("127.0.0.1", 0)
        port = listening.getsockname()[1]
        server = HttpServer(
            app,
            on_ready=lambda: tasks.append(asyncio.ensure_future(life(recorder, server, port))),
        )
        server.config.app = recorder
        tasks: list[asyncio.Future[None]] = []
        uvloop.run(server.serve([listening]))
        tasks[0].result()
    start = next(note["at"] for note in recorder.notes if note["what"] == "asks")
    end = next(note["at"] for note in recorder.notes if note["what"] == "end")
    return [
        note
        | {
            "at": round((note["at"] - start) * 1e3, 3),
            "until": round((note["until"] - start) * 1e3, 3),
        }
        for note in recorder.notes
        if start - 0.004 <= note["until"] and note["at"] <= end + 0.001
    ]


LANES = {"client": 54, "api": 128, "engine": 202}
WIDTH = 960
HEIGHT = 262
LEFT = 118
RIGHT = 24
INK = "#23211e"
SOFT = "#6d6962"
ACCENT = "#2a65a0"
WARM = "#c98a3d"
PALE = "#b9cbe0"


def draw(notes: list[Note]) -> str:
    """The picture: three lanes, one below the other; what is said goes from lane to lane."""
    first, last = min(note["at"] for note in notes), max(note["until"] for note in notes)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)

    def x(at: float) -> float:
        return round(LEFT + (at - first) * scale, 1)

    def text(at: float, y: float, words: str, anchor: str = "middle", fill: str = INK) -> str:
        return f'<text x="{at}" y="{y}" text-anchor="{anchor}" fill="{fill}">{words}</text>'

    def arrow(start: float, top: int, end: float, bottom: int, colour: str) -> str:
        return f'<path d="M{start} {top} L{end} {bottom}" stroke="{colour}" marker-end="url(#tip)"/>'

    def bar(left: float, y: int, wide: float, high: int, colour: str) -> str:
        place = f'x="{left:.1f}" y="{y - high // 2}" width="{wide:.1f}" height="{high}"'
        return f'<rect {place} rx="{min(3, wide / 2):.1f}" fill="{colour}"/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="A request\'s life: client, API process, engine process">',
        '<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        f'<path d="M0 0 L6 3 L0 6 z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fffefc"/>',
    ]
    names = {"client": "client", "api": "API process", "engine": "engine process"}
    for lane, y in LANES.items():
        out.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e4e0d8"/>'
        )
        out.append(text(LEFT - 14, y + 4, names[lane], "end"))
    client, api, engine = LANES.values()
    steps = [note for note in notes if note["lane"] == "engine"]
    for step in steps:
        wide = max(1.5, x(step["until"]) - x(step["at"]) - 1)
        colour = WARM if int(step["what"]) > 2 else ACCENT
        out.append(bar(x(step["at"]), engine, wide, 26, colour))
        if wide > 14:
            out.append(text(x(step["at"]) + wide / 2, engine + 4, step["what"], fill="#fff"))
        out.append(arrow(x(step["until"]), engine - 14, x(step["until"]), api + 9, SOFT))
    asked = next(note["at"] for note in notes if note["what"] == "asks")
    heard = next(note["at"] for note in notes if note["what"] == "headers")
    told = [
        note["at"] for note in notes if note["what"] == "to the engine" and note["at"] >= heard
    ]
    out.append(arrow(x(asked), client + 6, x(heard), api - 9, SOFT))
    out.append(text(x(asked), client - 12, "asks"))
    if told:
        out.append(arrow(x(told[0]), api + 8, x(told[0]), engine - 15, ACCENT))
    for note in notes:
        if note["lane"] == "api":
            high = {"report": 5, "chunk": 8, "headers": 8, "body": 8}.get(note["what"], 6)
            out.append(bar(x(note["at"]) - 1, api, 2.4, 2 * high, PALE))
    chunks = [note for note in notes if note["what"] == "chunk"]
    tokens = [note for note in notes if note["what"] == "token"]
    for chunk, token in zip(chunks, tokens, strict=False):
        out.append(arrow(x(chunk["at"]), api - 9, x(token["at"]), client + 7, ACCENT))
    for number, token in enumerate(tokens):
        out.append(f'<circle cx="{x(token["at"])}" cy="{client}" r="5" fill="{ACCENT}"/>')
        out.append(text(x(token["at"]), client - 12, f"{number + 1}"))
    out.append(text(x(asked), HEIGHT - 12, "0 ms", "middle", SOFT))
    out.append(text(WIDTH - RIGHT, HEIGHT - 12, f"{last:.1f} ms", "end", SOFT))
    says = "in each step: tokens computed, of this request and of a neighbour; brown: with its prompt"
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, says, fill=SOFT))
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    """Record and draw, or only draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--draw", action="store_true", help="draw the trace that is there again"
    )
    args = parser.parse_args()
    if not args.draw:
        notes = record()
        with whole(TRACE) as scratch:
            scratch.write_text(
                "[\n" + ",\n".join(json.dumps(note) for note in notes) + "\n]\n"
            )
    with whole(PICTURE) as scratch:
        scratch.write_text(
            draw(json.loads(TRACE.read_text(encoding="utf-8"))), encoding="utf-8"
        )
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

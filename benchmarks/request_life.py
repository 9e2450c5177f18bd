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
from benchmarks.pictures.svg import LINE, PALE, PAPER, SOFT, STRONG, Picture
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
    from phases.appendix.connections.server import HttpServer
    from serving.app import App
    from serving.endpoints import ServedModel
    from serving.liveness import EngineProcess

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), 257, (0,))
        options = {"max_rows": 8, "cache_bytes": 1 << 22}
        engine = EngineProcess(partial(make_engine, folder, options))
        app = App(engine, ServedModel("tiny", Tokenizer(folder)))
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


LANES = {
    "client": ("client", 54),
    "api": ("API process", 128),
    "engine": ("engine process", 202),
}
WIDTH = 960
HEIGHT = 262
LEFT = 118
RIGHT = WIDTH - 24
OURS, PROMPT = STRONG["a"], STRONG["b"]
"""Colours of steps and tokens, and of a step with the prompt in it."""


def draw(notes: list[Note]) -> Picture:
    """The picture: three lanes, one below the other; what is said goes from lane to lane."""
    first, last = min(note["at"] for note in notes), max(note["until"] for note in notes)
    picture = Picture(
        "A request's life",
        "The client asks, the API process sends one message, and each step comes back as a token.",
        HEIGHT,
        WIDTH,
    )

    def x(at: float) -> float:
        return LEFT + (at - first) * (RIGHT - LEFT) / (last - first)

    def arrow(start: float, top: float, end: float, bottom: float, colour: str = SOFT) -> None:
        picture.line([(x(start), top), (x(end), bottom)], colour, tip=True)

    for name, y in LANES.values():
        picture.line([(LEFT, y), (RIGHT, y)], LINE)
        picture.text(LEFT - 14, y + 4, name, "end")
    client, api, engine = (y for _, y in LANES.values())
    by_what: dict[str, list[float]] = {}
    for note in notes:
        by_what.setdefault(note["what"], []).append(note["at"])
        if note["lane"] == "api":
            high = {"report": 5, "chunk": 8, "headers": 8, "body": 8}.get(note["what"], 6)
            at = {"x": x(note["at"]) - 1, "y": api - high}
            picture.add("rect", **at, width=2.4, height=2 * high, fill=PALE["a"])
        if note["lane"] == "engine":
            begin, end = x(note["at"]), x(note["until"])
            wide = max(1.5, end - begin - 1)
            colour = PROMPT if int(note["what"]) > 2 else OURS
            at = {"x": begin, "y": engine - 13}
            picture.add("rect", **at, width=wide, height=26, rx=3, fill=colour)
            if wide > 14:
                picture.text(begin + wide / 2, engine + 4, note["what"], "middle", PAPER)
            arrow(note["until"], engine - 14, note["until"], api + 9)
    (asked,), (heard,) = by_what["asks"], by_what["headers"]
    arrow(asked, client + 6, heard, api - 9)
    picture.text(x(asked), client - 12, "asks", "middle")
    for told in [at for at in by_what["to the engine"] if at >= heard][:1]:
        arrow(told, api + 8, told, engine - 15, OURS)
    for number, token in enumerate(by_what["token"]):
        picture.add("circle", cx=x(token), cy=client, r=5, fill=OURS)
        picture.text(x(token), client - 12, str(number + 1), "middle")
    for chunk, token in zip(by_what["chunk"], by_what["token"], strict=False):
        arrow(chunk, api - 9, token, client + 7, OURS)
    says = "in each step: tokens computed, of this request and of a neighbour; brown: with its prompt"
    picture.text(x(asked), HEIGHT - 12, "0 ms", "middle", SOFT)
    picture.text(RIGHT, HEIGHT - 12, f"{last:.1f} ms", "end", SOFT)
    picture.text((LEFT + RIGHT) / 2, HEIGHT - 12, says, "middle", SOFT)
    return picture


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
        scratch.write_text(str(draw(json.loads(TRACE.read_text()))), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

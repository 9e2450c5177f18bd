"""The server's web page at `/`, and the events that show the engine on it.

There are at most ten events a second, and none while no page is open.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from common.http.errors import ApiError
from common.json_text import encode_json
from serving.app import App
from serving.http.request import EVENTS, HttpRequest
from serving.messages import DrawEngine, Ready, StepReport

PAGE = Path(__file__).parent / "page"
"""`page.html`, and what stands in it: the style and the scripts, which are one module."""
HTML = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
SECONDS = 0.1
"""Seconds between two events."""
MOST_WATCHERS = 16
QUIET = 10.0
"""Seconds after which an event is sent though nothing has changed: a write finds a reader that has
disconnected.
"""


def whole_page() -> bytes:
    """Return the HTML of the page at `/` with style and scripts inside, so that one request loads it."""
    html = (PAGE / "page.html").read_bytes()
    return re.sub(
        rb"/\* (\w+\.(?:css|js)) \*/\n",
        lambda name: (PAGE / name[1].decode()).read_bytes(),
        html,
    )


class Live:
    """The routes `/` (a page about the running engine) and `/events` (its server-sent events) of `app`.

    watchers: pages that read events now.
    picture: the newest picture of KV blocks, requests and prefix tree, as JSON data; None: none yet.
    """

    def __init__(self, app: App) -> None:
        self.watchers, self._drawn = 0, 0.0
        self.picture: dict[str, Any] | None = None
        self._steps: deque[tuple[int, float, int, int, int]] = deque(maxlen=512)
        self.app, self.engine = app, app.engine
        app.routes["/events"] = {"GET": self.events}
        app.routes["/"] = {"GET": lambda http: http.answer(200, whole_page(), HTML)}

    async def events(self, http: HttpRequest) -> None:
        """Send server-sent events (what `event` returns) until the client disconnects or the server closes.

        Raises:
            ApiError: 429, if `MOST_WATCHERS` pages read events already.
        """
        if http.method == "HEAD":  # nothing follows the headers, and a stream would never end
            await http.answer(200, b"", EVENTS)
            return
        if self.watchers >= MOST_WATCHERS:
            raise ApiError(429, f"{self.watchers} clients watch, and no more may")
        if not self.watchers:
            self._steps.clear()
            self.app.engine.on_step.append(self.stepped)
        self.watchers += 1
        leaving = asyncio.ensure_future(http.disconnected())
        try:
            await http.start(200, EVENTS)
            last = b""
            quiet = 0.0
            seen = 0
            while not leaving.done() and not self.app.closing:
                if time.monotonic() - self._drawn > 0.9 * SECONDS:
                    self._drawn = time.monotonic()
                    self.engine.tell(DrawEngine())
                event = self.event(seen)
                data = encode_json(event)
                if data != last or quiet >= QUIET:
                    await http.write(b"data: " + data + b"\n\n")
                    last, quiet = data, 0.0
                    seen = max((step[0] for step in event["steps"]), default=seen)
                await asyncio.wait({leaving}, timeout=SECONDS)
                quiet += SECONDS
            await http.write(b"", more=False)
        finally:
            self.watchers -= 1
            if not self.watchers:
                self.app.engine.on_step.remove(self.stepped)
            leaving.cancel()

    def stepped(self, step: StepReport) -> None:
        """Store a step's numbers, and the drawing of the cache if the report `step` has one, for the page's
        next event.

        The numbers are: step number, milliseconds, tokens computed, requests running, tokens sampled.
        """
        stats, ms = step.stats, round(step.stats.step_seconds * 1e3, 3)
        if stats.step_tokens or step.tokens:  # or it only brought a picture
            if self._steps and stats.steps <= self._steps[-1][0]:
                self._steps.clear()  # another engine, which counts from the beginning
            self._steps.append(
                (stats.steps, ms, stats.step_tokens, stats.running, len(step.tokens))
            )
        self.picture = step.picture or self.picture

    def event(self, after: int) -> dict[str, Any]:
        """Return an event as JSON data: the engine's sizes, statistics, newest picture, and recent steps.

        after: number of the last step that this page was sent; only later steps are in the event.
        """
        engine = self.engine
        if self._steps and self._steps[-1][0] < after:
            after = 0  # of another engine
        return {
            **asdict(engine.ready or Ready(0, 0, 0)),
            **asdict(engine.stats),
            "state": engine.state,
            "waiting": max(0, engine.in_flight - engine.stats.running),
            "steps": [list(step) for step in self._steps if step[0] > after],
            "picture": self.picture,
        }

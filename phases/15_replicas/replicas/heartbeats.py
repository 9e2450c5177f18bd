"""Heartbeats of requests, by which the proxy notices a replica that hangs but lives.

A replica says once a second that it is at work on a request. The proxy, which knows from the router who has
the request, asks another replica if it hears nothing at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from serving.http.request import Receive, Scope, Send

ALIVE = "ladder.alive"
"""Type of the message; the proxy passes it on to no client."""
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""Without a word after which another replica is asked, while no part of a response has been sent."""
BROKEN_SECONDS = 15.0
"""Without a word after which a response that has begun is given up."""
SUSPECT_SECONDS = 30.0
"""For which a replica that was silent gets no requests that another can take."""


class HeartbeatSender:
    """An ASGI application around a replica's, which sends `ALIVE` once a second while that responds."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        beating = asyncio.ensure_future(self._beat(send))
        try:
            await self.app(scope, receive, send)
        finally:
            beating.cancel()

    async def _beat(self, send: Send) -> None:
        with suppress(RuntimeError):  # the response is complete
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                await send({"type": ALIVE})


class Assignments:
    """Map of the requests of a proxy to the replicas that its router has chosen.

    replicas: by the number that the proxy has given a request.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, str] = {}
        self._suspects: dict[str, float] = {}

    def suspect(self, replica: str) -> None:
        """Note that a replica was silent."""
        self._suspects[replica] = time.monotonic() + SUSPECT_SECONDS

    def suspects(self) -> set[str]:
        """Return the replicas that get no requests for now."""
        now = time.monotonic()
        self._suspects = {name: end for name, end in self._suspects.items() if end > now}
        return set(self._suspects)


ASSIGNMENTS = Assignments()
"""Of this process."""


class Watch:
    """Notices that nothing is heard of a request.

    number: of the request; see `Assignments`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._heard: float | None = None  # there is no replica yet
        self._passing = False

    async def pass_on(self, send: Send, message: MutableMapping[str, Any]) -> None:
        """Send a message, unless it is a heartbeat. A reader that is slow to take it is no silence."""
        if message["type"] != ALIVE:
            self._passing = True
            await send(message)
            self._passing = False
        self._heard = time.monotonic()

    def silent(self, begun: bool) -> str:
        """Return the replica that says nothing, empty for none. begun: a part of a response was sent."""
        replica = ASSIGNMENTS.replicas.get(self.number, "")
        if self._heard is None and replica:
            self._heard = time.monotonic()
        if self._heard is None or self._passing:
            return ""
        most = BROKEN_SECONDS if begun else SILENT_SECONDS
        return replica if time.monotonic() - self._heard > most else ""

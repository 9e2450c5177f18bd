"""Heartbeats of requests, by which the proxy notices a replica that hangs but lives.

While a replica is at work on a request, it says so once a second. The proxy knows from the router which
replica has the request, and asks another one if this one says nothing at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass
class HeartbeatSender:
    """An ASGI application around a replica's `app`, which sends the message `ALIVE` once a second while `app`
    responds.
    """

    app: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request by the inner application, and send heartbeats (`ALIVE`) meanwhile."""
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
    """The replicas that a proxy's router has chosen for its requests, and replicas suspected to hang.

    replicas: names of replicas, by the number that the proxy has given a request.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, str] = {}
        self._suspects: dict[str, float] = {}

    def suspect(self, replica: str) -> None:
        """Record that the replica of this name was silent; it is among `suspects` for `SUSPECT_SECONDS`."""
        self._suspects[replica] = time.monotonic() + SUSPECT_SECONDS

    def suspects(self) -> set[str]:
        """Return the names of replicas that were silent lately; they get no request that another can take."""
        now = time.monotonic()
        self._suspects = {name: end for name, end in self._suspects.items() if end > now}
        return set(self._suspects)


ASSIGNMENTS = Assignments()
"""Of this process."""


@dataclass
class Watch:
    """Notices that the replica of a request has sent nothing, not even a heartbeat, for too long.

    number: the proxy's number of the request.
    """

    number: int
    _heard: float | None = None  # there is no replica yet
    _passing: bool = False

    async def pass_on(self, send: Send, message: MutableMapping[str, Any]) -> None:
        """Send an ASGI message of a replica to the client by `send`, unless it is a heartbeat.

        The replica counts as alive from now, and is not silent while a slow client takes the message.
        """
        if message["type"] != ALIVE:
            self._passing = True
            await send(message)
            self._passing = False
        self._heard = time.monotonic()

    def silent(self, begun: bool) -> str:
        """Return the name of the request's replica if it has been silent for too long, else an empty text.

        begun: whether a part of a response was sent; then the replica may be silent for `BROKEN_SECONDS`,
            otherwise for `SILENT_SECONDS`.
        """
        replica = ASSIGNMENTS.replicas.get(self.number, "")
        if self._heard is None and replica:
            self._heard = time.monotonic()
        if self._heard is None or self._passing:
            return ""
        most = BROKEN_SECONDS if begun else SILENT_SECONDS
        return replica if time.monotonic() - self._heard > most else ""

"""One replica: phase 13's application in an actor of Ray Serve, for as long as its engine lives."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from replicas.gate import ENGINE_LOST, KEY, NAME
from serving.app import App
from serving.http.request import Receive, Scope, Send

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
ERROR_SECONDS = 1.0
"""Most seconds for which a replica whose engine has died waits for its streams to send their errors."""


class Replica:
    """An ASGI application around phase 13's, whose process ends when its engine dies.

    app: phase 13's application. name: what the router calls this replica.
    end: ends this process, with an exit status.

    A server without replicas restarts an engine that has died. A replica does not: other replicas serve
    meanwhile, and Ray restarts this one, on another machine if need be. A replica without an engine would
    send errors sooner than any other could respond, and so get all the work.
    """

    def __init__(self, app: App, name: str, end: Callable[[int], None] = os._exit) -> None:
        self.app = app
        self.name = name.encode()
        self._end = end
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one HTTP request; for a scope of the type `lifespan`, start or end (`_live`).

        While the engine is not `ready`, the response is a 503 with the headers `NAME` (this replica's name)
        and `ENGINE_LOST` (`1`), in that order, and an empty body: the proxy then asks another replica. Else
        the application responds; its start message gets the header `NAME` after its own, and then
        `ENGINE_LOST` if it is a 503 and the engine has died meanwhile, since no part of a response has been
        sent. The proxy's fields for the router are removed from the scope, where they are under `KEY`; if
        there are some, the request's body is received from their `body` (`BufferedBody`). The application
        finds this replica's name in the scope, under `replica`.
        """
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self.app.engine.state != "ready":
            headers = [(NAME, self.name), (ENGINE_LOST, b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        said = scope.pop(KEY, None)
        scope["replica"] = self.name

        async def named(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                lost = message["status"] == 503 and self.app.engine.state != "ready"
                message["headers"] = [
                    *message["headers"],
                    (NAME, self.name),
                    *[(ENGINE_LOST, b"1")] * lost,
                ]
            await send(message)

        await self.app(
            scope, receive if said is None else BufferedBody(said["body"], receive), named
        )

    def check_health(self) -> None:
        """Raise `RuntimeError`, which names the engine's state, unless that is "ready". Ray asks from time to
        time.
        """
        if self.app.engine.state != "ready":
            raise RuntimeError(f"the engine is {self.app.engine.state}")

    async def start(self) -> None:
        """Start the engine, and return when it is ready.

        Raises:
            StartupError: the engine cannot be made.
            UserError: the engine cannot be made, and a user can correct that.
        """
        running = asyncio.ensure_future(self.app.engine.run())
        while self.app.engine.state != "ready" and not running.done():
            await asyncio.sleep(LOOK_SECONDS)
        if self.app.engine.state != "ready":
            await running
        self._tasks = [running, asyncio.ensure_future(self._watch())]

    async def stop(self) -> None:
        """End the engine for good."""
        for task in reversed(self._tasks):
            task.cancel()
        await self.app.engine.stop()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self) -> None:
        """Wait while the engine is `ready`, and then end this process with status 1.

        Before this process ends, open streams send the error that the engine has died. So it waits while the
        application has requests, at most `ERROR_SECONDS`, and then `LOOK_SECONDS` more, for the sockets.
        """
        while self.app.engine.state == "ready":
            await asyncio.sleep(LOOK_SECONDS)
        log.error("the engine has ended, and so does this replica")
        rounds = int(ERROR_SECONDS / LOOK_SECONDS)
        while self.app.requests and rounds:
            await asyncio.sleep(LOOK_SECONDS)
            rounds -= 1
        await asyncio.sleep(LOOK_SECONDS)  # what is said has to leave this process
        self._end(1)


@dataclass
class BufferedBody:
    """ASGI `receive` of a request whose body was read before.

    Its first message is that body; later ones only say that the client has left.

    receive: that of the connection.
    """

    _body: bytes | None
    _receive: Receive

    async def __call__(self) -> MutableMapping[str, Any]:
        """Return the body as a message at the first call, and the connection's next message later."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

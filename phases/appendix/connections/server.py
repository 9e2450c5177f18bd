"""The HTTP server around the application: uvicorn with httptools, and a shutdown in two steps.

While streams may still finish, `/ready` already says no.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from common.interrupts import TERMINATED
from common.words import count
from phases.appendix.connections.connection import NEVER, Connection
from serving.app import App
from serving.completion import ChoiceGroup

log = logging.getLogger(__name__)

CONFIG: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "server_header": False,
    "log_config": None,
    "access_log": False,
    "http": Connection,
    "timeout_keep_alive": NEVER,
    "timeout_graceful_shutdown": 2,
    "backlog": 4096,
}


class HttpServer(uvicorn.Server):
    """The HTTP server (uvicorn), which shuts down in two steps: streams finish, then connections close.

    app: the application that it serves. on_ready: called when the engine first takes requests.
    code: the exit code with which the process should end.
    """

    code = 0

    def __init__(self, app: App, on_ready: Callable[[], None] = lambda: None) -> None:
        self.app = app
        app.engine.on_ready.append(on_ready)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(uvicorn.Config(app, **CONFIG))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # as many connections as the system allows
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Call `drain` at SIGTERM or SIGINT: the first signal lets streams finish, a second does not.

        sig, frame: the signal and the interrupted frame, not used.
        """
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Take no new requests, and shut down when all running ones have finished.

        At the latest, shut down after `limits.grace_seconds`; a second call shuts down at once.
        """
        if self.app.draining:
            self.code = TERMINATED
            self.should_exit = self.force_exit = True
            return
        self.app.draining = True
        log.warning(
            "draining: %s may finish, nothing new is taken",
            count(len(self._groups), "request"),
        )
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        end = time.monotonic() + self.app.limits.grace_seconds
        while self._groups and time.monotonic() < end and not self.should_exit:
            await asyncio.sleep(0.05)
        for group in self._groups:
            group.give_up("died", "the server is shutting down")
        self.app.closing = self.should_exit = True

    async def serve(
        self, sockets: Any = None, engine: asyncio.Future[None] | None = None
    ) -> None:
        """Serve until a signal comes or the engine ends.

        sockets: those to listen on; None: uvicorn opens its own. engine: the task that runs the engine; None:
            it is started here.

        Raises:
            StartupError, UserError: the engine cannot be started.
        """
        self._loop = asyncio.get_running_loop()
        engine = engine or asyncio.ensure_future(self.app.engine.run())
        serving = asyncio.ensure_future(super().serve(sockets))
        try:
            await asyncio.wait({engine, serving}, return_when=asyncio.FIRST_COMPLETED)
            self.should_exit = True
            await serving
        finally:
            await self.app.engine.stop()
            serving.cancel()
            engine.cancel()
            await asyncio.wait({serving, engine})
        if not engine.cancelled():
            engine.result()

    @property
    def _groups(self) -> list[ChoiceGroup]:
        """Return the running requests that generate tokens, each as its `ChoiceGroup` (completions)."""
        return [http.group for http in self.app.requests if http.group is not None]

"""The HTTP server around the application: uvicorn with httptools, and what uvicorn leaves to others.

It adds a hand on the connection of a slow reader, and a shutdown in which streams may finish while `/ready`
already says no.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import UserError
from common.words import count
from serving.alive import CannotStart
from serving.app import App

log = logging.getLogger(__name__)

TERMINATED = 143
KEEP_ALIVE_SECONDS = 75
"""That a connection may wait for its next request."""


class Server(uvicorn.Server):
    """Ends in two steps: first nothing new is taken and streams may finish, then the connections go.

    Args:
        on_ready: called when the engine is there.
        connection: reads requests; the appendix has one with limits of its own.
        keep_alive: seconds that a connection may wait for its next request.

    failure: why the engine could not be started, if it could not.
    code: that the process should end with.
    """

    failure: CannotStart | None = None
    code = 0

    def __init__(
        self,
        app: App,
        on_ready: Callable[[], None] = lambda: None,
        *,
        connection: type[HttpToolsProtocol] = HttpToolsProtocol,
        keep_alive: int = KEEP_ALIVE_SECONDS,
    ) -> None:
        self.app, self.on_ready = app, on_ready
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                ws="none",
                loop="uvloop",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive,
                timeout_graceful_shutdown=2,
                backlog=4096,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain; the second one ends at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def drain(self) -> None:
        """The first call lets streams finish, within the grace period; the second does not wait."""
        if self.app.service.draining:
            self.code = TERMINATED
            self.should_exit = self.force_exit = True
            return
        self.app.service.draining = True
        log.warning("draining: %s may finish, nothing new is taken", count(len(self.app.groups), "request"))
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        end = time.monotonic() + self.app.limits.grace_seconds
        while self.app.groups and time.monotonic() < end and not self.should_exit:
            await asyncio.sleep(0.05)
        for group in self.app.groups:
            group.give_up("died", "the server is shutting down")
        self.app.closing = True
        self.should_exit = True

    async def serve(self, sockets: Any = None) -> None:
        """Run until a signal, or until the engine cannot be started."""
        _allow_files()
        engine = asyncio.ensure_future(self.app.engine.run())
        engine.add_done_callback(self._engine_ended)
        janitor = asyncio.ensure_future(self._sweep())
        try:
            await super().serve(sockets)
        finally:
            janitor.cancel()
            await self.app.engine.stop()
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError, CannotStart):
                await engine

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say so as soon as the engine is there."""
        await super().startup(sockets)
        self._announced = asyncio.ensure_future(self._announce())

    async def _announce(self) -> None:
        while self.app.engine.state != "ready":
            await asyncio.sleep(0.02)
        self.on_ready()

    def _engine_ended(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and isinstance(task.exception(), CannotStart):
            self.failure = task.exception()  # type: ignore[assignment]
            self.should_exit = True
        elif not task.cancelled() and task.exception() is not None:
            log.error("the engine is no longer kept alive", exc_info=task.exception())
            self.code, self.should_exit = 1, True

    async def _sweep(self) -> None:
        """Hang up on readers that do not take what was written for them."""
        while True:
            await asyncio.sleep(min(1.0, self.app.limits.slow_seconds / 4))
            oldest = time.monotonic() - self.app.limits.slow_seconds
            for exchange in list(self.app.exchanges):
                group, late = exchange.group, exchange.sending is not None and exchange.sending < oldest
                if group is not None and late:
                    group.give_up("slow", "the reader is too slow")
                if late or (group is not None and group.trouble is not None and group.trouble[0] == "slow"):
                    exchange.hang_up()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free. Raises `UserError` if that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=4096)
    except OSError as error:
        raise UserError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from None


def _allow_files() -> None:
    """A connection is an open file: take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

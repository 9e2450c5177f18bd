"""An engine process that is kept alive: started, listened to, and started again when it ends."""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import wait
from typing import Any

import zmq
import zmq.asyncio

from common.collector import collector_paused, freeze_collector
from common.errors import UserError
from common.temporary import delete_folder, temporary_folder
from serving.client import EngineClient
from serving.messages import (
    Command,
    Failed,
    Ready,
    Report,
    StepReport,
    StepStats,
    Stop,
    commands,
    encode,
    report,
)

log = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Seconds between two tries to start an engine that ends at once."""
QUICK = 60.0
"""An engine that lived shorter than this did not recover: the pause before the next one doubles."""


class StartupError(Exception):
    """Raised if the first engine cannot be made, and the user cannot correct it (else `UserError`)."""


class EngineProcess(EngineClient):
    """An `EngineClient` whose engine runs in a process of its own, which it starts, watches and restarts.

    make: function without arguments that returns the engine; called in that process, so it must be picklable.
    silence: seconds without a message, while a client waits for tokens, after which the engine counts as
        hanging and is restarted.
    observer: function that gets the engine and returns an `Observer` of its steps, also called in that
        process; None: no observer.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        silence: float = 300.0,
        observer: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.make = make
        self.silence = silence
        self.observer = observer
        self.process: Any = None
        self._socket: zmq.asyncio.Socket | None = None
        self._stopping = False
        atexit.register(
            self._kill
        )  # it ignores SIGTERM, and Python would wait for it for ever

    def transmit(self, data: bytes) -> None:
        """Send an encoded message to the engine process; if that has ended, the message is dropped."""
        if self._socket is not None:
            # A future, also where no engine is there yet to send it to; unasked, it would complain of that.
            sent = asyncio.ensure_future(self._socket.send(data, zmq.NOBLOCK))
            sent.add_done_callback(lambda sent: sent.cancelled() or sent.exception())

    async def run(self) -> None:
        """Start the engine, and start it again whenever it ends, until `stop`.

        Raises:
            StartupError: the first engine could not be made.
            UserError: the first engine could not be made, and the user can correct that.
        """
        pause = 0.0
        while not self._stopping:
            started = time.monotonic()
            try:
                failure = await self._live()
            except (OSError, zmq.ZMQError) as error:  # no folder, no socket, no process
                failure = StartupError(f"the engine process cannot be started: {error}")
            finally:
                self._lose()
            if self._stopping:
                return
            if self.ready is None:
                raise failure
            self.restarts += 1
            quick = time.monotonic() - started < QUICK
            pause = min(2 * pause or 0.5, LONGEST_PAUSE) if quick else 0.0
            log.error("%s; the next engine starts in %.1f s", failure, pause)
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """Stop the engine for good: a ready one has five seconds to end, then its process is killed."""
        rounds = 50 if self.state == "ready" else 0
        self._stopping, self.state = True, "stopped"
        self.tell(Stop())
        while rounds and self.process is not None and self.process.is_alive():
            rounds -= 1
            await asyncio.sleep(0.1)
        if self.process is not None:
            self.process.kill()  # `_live` sees it and tidies up

    async def _live(self) -> Exception:
        """Run one engine process from its start to its end; return the reason of its end, as an exception.

        Raises:
            OSError, zmq.ZMQError: the process or its socket cannot be made.
        """
        with ExitStack() as undo:
            folder = temporary_folder()
            undo.callback(delete_folder, folder)
            socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
            undo.callback(socket.close)
            socket.sndhwm = 0  # what may be in flight has limits of its own
            socket.linger = 0
            address = f"ipc://{folder}/engine"
            socket.bind(address)
            arguments = (self.make, address, self.observer)
            child = multiprocessing.get_context("spawn").Process(target=main, args=arguments)
            child.start()
            self._socket, self.process = socket, child
            undo.callback(self._kill)
            reading = asyncio.ensure_future(self._read(socket))
            undo.callback(reading.cancel)
            self._heard = time.monotonic()
            alive = True
            while alive and not reading.done():
                alive = child.is_alive()  # one more look at what it has said before it ended
                await asyncio.wait({reading}, timeout=0.05)
                if not self._sinks:
                    self._heard = time.monotonic()  # it has no reason to speak
                silence = time.monotonic() - self._heard
                if self.state == "ready" and silence > self.silence:
                    words = f"the engine has said nothing for {silence:.0f} s, and is ended"
                    return StartupError(words)
            return (
                reading.result() if reading.done() else StartupError("its process has ended")
            )

    async def _read(self, socket: zmq.asyncio.Socket) -> Exception:
        """Receive the engine process's messages from `socket`, and pass the tokens in them to their sinks.

        Runs until it is cancelled, or until the engine reports that it cannot be made.

        Returns:
            The engine's error: a `UserError` if the user can correct it, else a `StartupError`.
        """
        while True:
            message = report(await socket.recv())
            self._heard, self.now = time.monotonic(), time.perf_counter()
            match message:
                case StepReport():
                    self._route_tokens(message)
                case Ready():
                    self.ready, self.stats = message, StepStats(free_blocks=message.blocks)
                    self.state = "stopped" if self._stopping else "ready"
                    while self.on_ready:
                        self.on_ready.pop(0)()
                case Failed():
                    return (UserError if message.wrong_input else StartupError)(message.reason)

    def _kill(self) -> None:
        self._socket = None
        child, self.process = self.process, None
        if child is not None:
            child.kill()
            child.join()
            child.close()


# In the engine process. `main` imports what needs PyTorch, since the API process imports this file, too.


class Pipe:
    """The engine process's connection to the API process, over ZeroMQ.

    address: where the API process listens.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(address)

    def receive(self, seconds: float) -> list[Command]:
        """Return all commands that have come, if any; wait for the first at most `seconds`."""
        found: list[Command] = []
        while self._socket.poll(0 if found else int(seconds * 1e3)):
            found += commands(self._socket.recv())
        return found

    def send(self, report: Report) -> None:
        """Send a report to the API process."""
        self._socket.send(encode(report))


def main(
    make: Callable[[], Any], address: str, observer: Callable[..., Any] | None = None
) -> None:
    """Run the engine process: make the engine, and run steps until the API process sends `Stop`.

    make: function without arguments that returns the engine.
    address: the ZeroMQ address where the API process listens.
    observer: function that gets the engine and returns an `Observer` of its steps; None: no observer.
    """
    # Signals of the terminal or of systemd go to the whole group: the API process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe = Pipe(address)
    try:
        with (
            collector_paused()
        ):  # imports make many objects to look at, and hardly any garbage
            engine = make()
            from serving.sizes import ready
            from serving.worker import Worker

            observing = observer and observer(engine)
    except UserError as error:
        pipe.send(Failed(str(error), wrong_input=True))
        return
    except BaseException as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", wrong_input=False))
        raise
    freeze_collector()  # the model and its modules are here to stay
    pipe.send(ready(engine))
    Worker(engine, pipe, observing).run()


def _die_with_parent() -> None:
    """Wait until the API process has ended, and end this process at once then, since no client is left."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

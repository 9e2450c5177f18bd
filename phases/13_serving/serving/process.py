"""The engine's process around its loop: how it is started, how it hears and speaks, and when it ends.

The API process imports this module too, to start the other one. So what needs PyTorch is imported in `main`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import zmq

from common.collector import collector_paused, freeze_collector
from common.errors import UserError
from serving.messages import Command, Failed, Report, commands, encode


class Pipe:
    """The engine process's connection to the API process, over ZeroMQ.

    address: where the API process listens.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(address)

    def receive(self, seconds: float) -> list[Command]:
        """Return all commands that have come; wait for the first at most `seconds`."""
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
    """Run the engine process: make the engine, connect to the API process, and run steps until a `Stop`
    comes.

    make: makes the engine; any callable that can be pickled.
    address: the ZeroMQ address where the API process listens.
    observer: makes an observer of the steps; None: there is none.
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
            from serving.worker import Worker, ready

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
    """Ask the system to end this process when the API process ends: without it an engine serves no client."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

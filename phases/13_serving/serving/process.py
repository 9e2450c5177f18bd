"""The engine's process around its loop: how it is started, how it hears and speaks, and when it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import zmq

from common.collector import freeze_collector
from common.errors import UserError
from continuous.engine import Engine
from paged_cache import PagedCache
from serving.messages import Command, Failed, Ready, Report, commands, encode
from serving.worker import NullObserver, Observing, Worker


def ready(engine: Engine, vocab_size: int) -> Ready:
    """Return what the API process learns about an engine."""
    found = Ready(engine.max_len, vocab_size)
    if isinstance(engine, Engine) and isinstance(engine.cache, PagedCache):
        found.max_rows, found.memory_plan = (
            engine.scheduler.rows.count,
            str(engine.memory_plan),
        )
        found.blocks, found.block_size = engine.cache.allocator.count, engine.cache.block_size
        found.policy = getattr(engine.scheduler.policy, "__name__", "")
    return found


class Pipe:
    """A `Channel` over ZeroMQ."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(address)

    def receive(self, seconds: float) -> list[Command]:
        """See `Channel`."""
        found: list[Command] = []
        while self._socket.poll(0 if found else int(seconds * 1e3)):
            found += commands(self._socket.recv())
        return found

    def send(self, report: Report) -> None:
        """See `Channel`."""
        self._socket.send(encode(report))


def main(make: Callable[[], Any], address: str, observer: Observing = NullObserver) -> None:
    """The whole life of the engine process.

    Args:
        make: makes the engine; any callable that can be pickled.
        address: where the API process listens.
        observer: makes what reads along.
    """
    # Signals of the terminal or of systemd go to the whole group: the API process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    pipe = Pipe(address)
    try:
        engine = make()
    except UserError as error:
        pipe.send(Failed(str(error), wrong_input=True))
        return
    except BaseException as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", wrong_input=False))
        raise
    freeze_collector()  # the model and its modules are here to stay
    pipe.send(ready(engine, engine.config.vocab_size))
    Worker(engine, pipe, observer(engine)).run()


def _die_with_parent() -> None:
    """End with the API process: without it an engine serves no client."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

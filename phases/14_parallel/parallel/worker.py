"""The process of any rank but rank 0: it builds the engines that rank 0 asks for, and runs their steps."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from common.errors import UserError
from parallel.broadcast import StepWorker
from parallel.feature import rank_engine
from parallel.messages import (
    Build,
    Closed,
    ForwardMessage,
    Join,
    Joining,
    RunFunction,
    SampleMessage,
)
from parallel.ranks import Ranks, device_of, open_store


def main(descriptor: int, rank: int) -> None:
    """Run a worker process of the rank `rank`: serve rank 0 until it ends.

    descriptor: file descriptor of the connection to rank 0.
    """
    # Ctrl-C goes to all processes of a terminal: rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    try:
        serve(Connection(descriptor), rank)
    except UserError:
        os._exit(2)  # rank 0 has found the same error and reports it
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an ordinary exit would wait for NCCL, which waits for the others


def serve(connection: Connection, rank: int) -> NoReturn:
    """Receive rank 0's messages from `connection` and carry out each of them: build an engine, run halves of
    its steps, run a function. Never returns: the process ends with rank 0.
    """
    ranks: Any = None
    worker: Any = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(message, ForwardMessage):
            worker.forward(message)
        elif isinstance(message, SampleMessage):
            worker.sample(message)
        elif isinstance(message, Join):
            connection.send(Joining())
            torch.set_num_threads(message.threads)
            store = open_store(message.path, message.size)
            ranks = Ranks(rank, message.size, device_of(message.device, rank), store)
        elif isinstance(message, Build):
            runner: Any = rank_engine(message.recipe, ranks).runner
            worker = StepWorker(runner, runner.cache)
        elif isinstance(message, RunFunction):
            connection.send(resolve_function(message)(ranks, *message.given))
        elif isinstance(message, Closed) and ranks is not None:
            if worker is not None:
                worker.runner.release()
                worker = runner = None
            ranks.close()


def resolve_function(call: RunFunction) -> Callable[..., Any]:
    """Return the function that the message `call` names, imported from its module or made from its source."""
    if call.source:
        space: dict[str, Any] = {}
        exec(call.source, space)
    else:
        space = vars(importlib.import_module(call.module))
    return space[call.name]


def end_with(descriptor: int) -> None:
    """End this process when rank 0 closes the connection `descriptor`, also while a device is waited for."""
    poll = select.poll()
    hang_up = getattr(select, "POLLRDHUP", 0)
    poll.register(descriptor, select.POLLHUP | select.POLLERR | hang_up)
    poll.poll()
    os._exit(0)

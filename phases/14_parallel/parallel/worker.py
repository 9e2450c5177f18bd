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
    RunFunction,
    SampleMessage,
)
from parallel.ranks import Ranks, device_of, open_store


def main(descriptor: int, rank: int) -> None:
    """Run the process of the rank `rank` (1 or more): carry out rank 0's messages until rank 0 ends.

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
    """Receive rank 0's messages from `connection` and carry out each of them, for ever.

    A message builds an engine, runs a step's forward pass or its sampling, or runs a function. This function
    never returns: the process ends with rank 0.
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
            connection.send("joining")  # see `rendezvous`
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
    """Return the function that the message `call` names, from its module, or from source in the message."""
    if call.source:
        space: dict[str, Any] = {}
        exec(call.source, space)
    else:
        space = vars(importlib.import_module(call.module))
    return space[call.name]


def end_with(descriptor: int) -> None:
    """End this process when rank 0 closes the connection `descriptor`, even during a wait for a GPU."""
    poll = select.poll()
    hang_up = getattr(select, "POLLRDHUP", 0)
    poll.register(descriptor, select.POLLHUP | select.POLLERR | hang_up)
    poll.poll()
    os._exit(0)

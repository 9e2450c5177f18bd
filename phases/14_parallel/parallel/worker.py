"""The life of a rank that is not the first: it makes the engines that it is told to, and follows rank 0."""

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
from common.text.tokenizer import Tokenizer
from parallel.feature import own_engine
from parallel.messages import (
    BroadcastChannel,
    Build,
    Closed,
    Here,
    Join,
    Rehearsed,
    RunFunction,
    StepMessage,
)
from parallel.ranks import Ranks, device_of, graphs_of, open_store


def main(descriptor: int, rank: int) -> None:
    """Until rank 0 is gone: its end of the connection closes however it ends."""
    # Ctrl-C goes to the whole group of a terminal: rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with, args=(descriptor,), daemon=True).start()
    try:
        obey(BroadcastChannel(Connection(descriptor)), rank)
    except UserError:
        os._exit(2)  # rank 0 has found the same and says it
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an ordinary end would wait for NCCL, which waits for the others


def obey(line: BroadcastChannel, rank: int) -> NoReturn:
    """Do what rank 0 says."""
    ranks: Ranks | None = None
    while True:
        message = line.receive()
        if isinstance(message, Join):
            line.send(Here())
            torch.set_num_threads(message.threads)
            store = open_store(message.path, message.size)
            ranks = Ranks(rank, message.size, device_of(message.device, rank), store)
        elif isinstance(message, Build):
            assert ranks is not None
            live(message, ranks, line)
            ranks.close()
        elif isinstance(message, RunFunction):
            line.send(resolve_function(message)(ranks, *message.given))
        elif isinstance(message, Closed) and ranks is not None:
            ranks.close()


def live(order: Build, ranks: Ranks, line: BroadcastChannel) -> None:
    """One engine's life."""
    tokenizer = Tokenizer(order.tokenizer) if order.tokenizer is not None else None
    engine: Any = own_engine(order.recipe, ranks, tokenizer, line=line)
    while not isinstance(message := line.receive(), Closed):
        if isinstance(message, Rehearsed):
            engine.cache.forget()
            continue
        assert isinstance(message, StepMessage), f"rank {ranks.rank} was told {message!r}"
        engine.loop.follow(engine, message)
    graphs_of(engine)()


def resolve_function(call: RunFunction) -> Callable[..., Any]:
    """The function that is meant."""
    if call.source:
        space: dict[str, Any] = {}
        exec(call.source, space)
    else:
        space = vars(importlib.import_module(call.module))
    found: Callable[..., Any] = space[call.name]
    return found


def end_with(descriptor: int) -> None:
    """Rank 0 may go while this rank waits for it on the device, and then it does not listen."""
    poll = select.poll()
    poll.register(
        descriptor, select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
    )
    poll.poll()
    os._exit(0)

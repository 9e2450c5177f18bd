"""Rank 0's side of a start: processes that meet, and a function or an engine that runs in all of them."""

from __future__ import annotations

import inspect
import os
import textwrap
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common.temporary import temporary_folder
from parallel import worker_group
from parallel.messages import Closed, Here, Join, RunFunction
from parallel.ranks import ENVIRONMENT, Ranks, device_of, open_store
from parallel.worker_group import WorkerGroup, WorkerLostError


@cache
def store_folder() -> Path:
    """Return the folder of this process's stores, which only this user may enter.

    It stays as long as the process: NCCL looks into its store as long as it lives.
    """
    return temporary_folder()


def rendezvous(workers: WorkerGroup, device: torch.device) -> Ranks:
    """Rank 0 among all ranks of a crew, the others on the devices behind its own.

    Raises:
        WorkerLostError: a rank does not come.
    """
    os.environ.update(ENVIRONMENT)
    device = device_of(str(device), 0)
    threads = max(1, torch.get_num_threads() // workers.size)
    path = str(store_folder() / uuid.uuid4().hex)
    workers.tell(Join(workers.size, str(device), path, threads))
    here: set[int] = set()
    while (
        len(here) < workers.size - 1
    ):  # inside the library a wait for a rank cannot hear that it has ended
        here |= {
            rank
            for rank, message in workers.collect_replies(wait=0.05)
            if isinstance(message, Here)
        }
        workers.check()
    ranks = Ranks(0, workers.size, device, open_store(path, workers.size))
    workers.on_loss, workers.on_end = ranks.abort, ranks.leave
    return ranks


def part(
    workers: WorkerGroup, ranks: Ranks, let_go: Callable[[], None] = lambda: None
) -> None:
    """The end: the ranks leave each other, and the processes wait for the next engine.

    let_go: destroys the graphs in which they add up.
    """
    with workers.awaited():
        let_go()
        if not workers.reason:
            workers.tell(Closed())
            ranks.close()
    worker_group.give_back(workers)


def together(
    size: int, function: Callable[..., Any], *given: Any, device: str = "cpu"
) -> list[Any]:
    """Run `function(ranks, *given)` on every rank; what each of them returns, by rank.

    A function of a notebook or a program is sent as its text, so it imports what it needs itself.

    Raises:
        WorkerLostError: a rank has ended.
    """
    local = function.__module__ == "__main__"
    source = textwrap.dedent(inspect.getsource(function)) if local else ""
    workers = worker_group.take(size)
    try:
        with workers.awaited():
            ranks = rendezvous(workers, torch.device(device))
            workers.tell(RunFunction(function.__module__, function.__name__, source, given))
            results = {0: function(ranks, *given)}
        while len(results) < size:
            results |= dict(workers.collect_replies(wait=0.05))
            workers.check()
    except BaseException as error:
        if not isinstance(error, WorkerLostError):
            workers.check(patient=isinstance(error, RuntimeError))
        workers.kill()
        raise
    part(workers, ranks)
    return [results[rank] for rank in range(size)]

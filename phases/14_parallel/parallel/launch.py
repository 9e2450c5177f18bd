"""Rank 0's side of a process group: to make it, to leave it, and to run a function on all its ranks."""

from __future__ import annotations

import inspect
import os
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from common.temporary import temporary_folder
from parallel import worker_group
from parallel.messages import Closed, Join, RunFunction
from parallel.ranks import ENVIRONMENT, Ranks, device_of, open_store
from parallel.worker_group import WorkerGroup

store_folder = cache(temporary_folder)
"""Returns the folder of this process's `torch.distributed` stores, made once, which only this user may enter.

It stays as long as the process, because NCCL reads its store as long as it lives."""


@contextmanager
def borrowed_workers(size: int) -> Iterator[WorkerGroup]:
    """Give a `with` block the processes of ranks 1 to `size - 1`, for which the block may wait.

    If the block fails, the processes are killed; else the caller has to give them back.

    Raises:
        WorkerLostError: the block has failed with a RuntimeError because a rank has ended.
    """
    workers = worker_group.take(size)
    try:
        with workers.awaited():
            yield workers
    except RuntimeError:
        workers.wait_for_loss()
        workers.kill()
        workers.check()
        raise
    except BaseException:
        workers.kill()
        raise


def rendezvous(workers: WorkerGroup, device: torch.device) -> Ranks:
    """Make a process group of this process, as rank 0, and the worker processes; return rank 0's `Ranks`.

    Args:
        device: rank 0's. Rank `r` takes the `r`-th GPU after it, or the CPU.

    Raises:
        WorkerLostError: a rank has ended before it joined.
    """
    os.environ.update(ENVIRONMENT)
    device = device_of(str(device), 0)
    threads = max(1, torch.get_num_threads() // workers.size)
    path = str(store_folder() / uuid.uuid4().hex)
    workers.broadcast(Join(workers.size, str(device), path, threads))
    joining = 0
    # Only here can the wait for a rank end with its process; inside the library it cannot.
    while joining < workers.size - 1:
        joining += len(workers.collect_replies())
        workers.check()
    ranks = Ranks(0, workers.size, device, open_store(path, workers.size))
    workers.on_loss, workers.on_end = ranks.abort, ranks.leave
    return ranks


def leave(
    workers: WorkerGroup, ranks: Ranks, release: Callable[[], None] = lambda: None
) -> None:
    """Destroy the process group `ranks`; its worker processes go on for the next engine, unless one is lost.

    release: called first; destroys the CUDA graphs that hold sums over these ranks.
    """
    with workers.awaited():
        release()
        if not workers.reason:
            workers.broadcast(Closed())
            ranks.close()
    worker_group.give_back(workers)


def together(
    size: int, function: Callable[..., Any], *given: Any, device: str = "cpu"
) -> list[Any]:
    """Run `function(ranks, *given)` on `size` ranks. Returns a list of what it returned on each, by rank.

    device: rank 0's; rank `r` takes the `r`-th GPU after it, or the CPU. A function of a notebook or a
        program is sent as its source, so it must import by itself what it needs.

    Raises:
        WorkerLostError: a rank has ended.
    """
    local = function.__module__ == "__main__"
    source = textwrap.dedent(inspect.getsource(function)) if local else ""
    with borrowed_workers(size) as workers:
        ranks = rendezvous(workers, torch.device(device))
        workers.broadcast(RunFunction(function.__module__, function.__name__, source, given))
        results = {0: function(ranks, *given)}
        while len(results) < size:
            results |= dict(workers.collect_replies())
            workers.check()
    leave(workers, ranks)
    return [results[rank] for rank in range(size)]

"""Rank 0's side of a start: processes that meet, and a function or an engine that runs in all of them."""

from __future__ import annotations

import inspect
import os
import textwrap
import uuid
from collections.abc import Callable
from typing import Any

import torch

from parallel import crew as crews
from parallel.crew import Crew, RanksLost
from parallel.messages import Closed, Here, Join, RunFunction
from parallel.ranks import ENVIRONMENT, Ranks, device_of, meeting


def meet(crew: Crew, device: torch.device) -> Ranks:
    """Rank 0 among all ranks of a crew, the others on the devices behind its own.

    Raises:
        RanksLost: a rank does not come.
    """
    os.environ.update(ENVIRONMENT)
    device = device_of(str(device), 0)
    threads = max(1, torch.get_num_threads() // crew.size)
    prefix = uuid.uuid4().hex
    port, store = meeting(0, prefix, first=True)
    crew.tell(Join(crew.size, str(device), port, prefix, threads))
    here: set[int] = set()
    while len(here) < crew.size - 1:  # inside the library a wait for a rank cannot hear that it has ended
        here |= {rank for rank, message in crew.answers(wait=0.05) if isinstance(message, Here)}
        crew.check()
    ranks = Ranks(0, crew.size, device, store)
    crew.on_loss, crew.on_end = ranks.abort, ranks.leave
    return ranks


def part(crew: Crew, ranks: Ranks, let_go: Callable[[], None] = lambda: None) -> None:
    """The end: the ranks leave each other, and the processes wait for the next engine.

    let_go: destroys the graphs in which they add up.
    """
    with crew.awaited():
        let_go()
        if not crew.reason:
            crew.tell(Closed())
            ranks.close()
    crews.give_back(crew)


def together(size: int, function: Callable[..., Any], *given: Any, device: str = "cpu") -> list[Any]:
    """Run `function(ranks, *given)` on every rank; what each of them returns, by rank.

    A function of a notebook or a program is sent as its text, so it imports what it needs itself.

    Raises:
        RanksLost: a rank has ended.
    """
    local = function.__module__ == "__main__"
    source = textwrap.dedent(inspect.getsource(function)) if local else ""
    crew = crews.take(size)
    try:
        with crew.awaited():
            ranks = meet(crew, torch.device(device))
            crew.tell(RunFunction(function.__module__, function.__name__, source, given))
            results = {0: function(ranks, *given)}
        while len(results) < size:
            results |= dict(crew.answers(wait=0.05))
            crew.check()
    except BaseException as error:
        if not isinstance(error, RanksLost):
            crew.check(patient=isinstance(error, RuntimeError))
        crew.kill()
        raise
    part(crew, ranks)
    return [results[rank] for rank in range(size)]

"""Two ways to ask: users who wait for an answer before they ask again, and a rate that waits for none.

The closed loop says how much a server can do. It never overloads one: a slow server is asked more slowly. The
open loop is how people come, and the only one that shows a queue.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any

import uvloop

from benchmarks.loadtest.user import Outcome, Target, ask

Bodies = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class LoadPlan:
    """What to send.

    bodies: the requests, in order; a closed loop starts over when they are used up.
    users: so many at a time (closed); or
    arrivals: seconds after the start of each request (open).
    requests: how many in all.
    """

    bodies: Bodies
    requests: int
    users: int = 0
    arrivals: Sequence[float] = ()
    timeout: float = 600.0


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Arrival times of `count` requests at `rate` a second, as independent people come."""
    rng = random.Random(seed)
    clock = 0.0
    times = []
    for _ in range(count):
        times.append(clock)
        clock += rng.expovariate(rate)
    return times


def run(
    target: Target,
    plan: LoadPlan,
    processes: int = 4,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Carry out a plan from several processes, so that reading is not the bottleneck.

    Raises:
        RuntimeError: a process has died.
    """
    users = max(1, plan.users)
    processes = max(1, min(processes, users if plan.users else plan.requests))
    # The server of forks imports what all need once; to spawn each would import PyTorch as often.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    queue: Any = context.Queue()
    barrier = context.Barrier(processes)
    children = [
        context.Process(
            target=_process,
            args=(target, _share(plan, at, processes), barrier, queue),
            daemon=True,
        )
        for at in range(processes)
    ]
    for child in children:
        child.start()
    outcomes: list[Outcome] = []
    try:
        while len(outcomes) < plan.requests:
            try:
                found = queue.get(timeout=1.0)
            except Empty:
                if not any(child.is_alive() for child in children) and queue.empty():
                    raise RuntimeError("the client processes have died") from None
                continue
            outcomes.append(found)
            progress(found)
        for child in children:
            child.join(10)
    finally:
        for child in children:
            child.kill()
    return outcomes


def _share(plan: LoadPlan, at: int, processes: int) -> LoadPlan:
    """What process number `at` does."""
    mine = range(at, plan.requests, processes)
    bodies = [plan.bodies[number % len(plan.bodies)] for number in mine]
    users = len(range(at, plan.users, processes)) if plan.users else 0
    arrivals = [plan.arrivals[number] for number in mine] if plan.arrivals else []
    return LoadPlan(bodies, len(mine), users, arrivals, plan.timeout)


def _process(target: Target, plan: LoadPlan, barrier: Any, queue: Any) -> None:
    barrier.wait(120)
    uvloop.run(_open(target, plan, queue) if plan.arrivals else _closed(target, plan, queue))


async def _closed(target: Target, plan: LoadPlan, queue: Any) -> None:
    line = iter(plan.bodies)

    async def user() -> None:
        for body in line:
            queue.put(await ask(target, body, plan.timeout))

    await asyncio.gather(*(user() for _ in range(plan.users)))


async def _open(target: Target, plan: LoadPlan, queue: Any) -> None:
    start = time.perf_counter()

    async def one(body: dict[str, Any], arrival: float) -> None:
        await asyncio.sleep(start + arrival - time.perf_counter())
        outcome = await ask(target, body, plan.timeout)
        outcome.started = start + arrival  # a request that is sent late has waited, too
        queue.put(outcome)

    await asyncio.gather(
        *(one(*pair) for pair in zip(plan.bodies, plan.arrivals, strict=True))
    )

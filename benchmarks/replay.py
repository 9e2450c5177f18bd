"""Replaying arrivals: a request is sent to a running engine when its time comes, not all at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from benchmarks.measure import Sample, request_metrics
from benchmarks.workloads import Workload
from common.device import synchronize
from common.events import Completion, TokenEvent
from continuous.engine import Engine

Due = Callable[[int], bool]
"""Whether the request with this number is to be sent now."""


def replay(engine: Engine, work: Workload, due: Due | None = None) -> list[Completion]:
    """Serve a workload as its arrival times say, in real time; completions in the workload's order.

    A request that arrives during a step waits for the step's end, and that wait counts: latencies are counted
    from when it was due. Requests of a sequential workload are sent one by one, each when the engine is idle.

    Args:
        engine: idle.
        work: whose arrivals grow from request to request.
        due: replaces the arrival times, for requests that wait for something else than the clock. It is asked
            about the next request before every step; if nothing else is left to do, the request is sent.

    Raises:
        RuntimeError: a step failed, so there is nothing to measure.
    """
    start = time.perf_counter()
    arrivals, params = work.arrivals, work.params
    completions = [
        Completion(number, 0, prompt, start + arrivals[number])
        for number, prompt in enumerate(work.prompts)
    ]
    todo = deque(completions)

    def is_due(number: int) -> bool:
        if due is not None:
            return engine.idle or due(number)
        return (
            engine.idle if work.sequential else time.perf_counter() - start >= arrivals[number]
        )

    while todo or not engine.idle:
        while todo and is_due(todo[0].index):
            sent = todo.popleft()
            if due is not None or work.sequential:
                sent.arrival = time.perf_counter()
            engine.add(sent.prompt_ids, params[sent.index], index=sent.index)
        if engine.idle:
            time.sleep(max(0.0, start + arrivals[todo[0].index] - time.perf_counter()))
            continue
        for request, token, reason, now, logprob, _ in engine.step():
            if reason == "error":
                raise RuntimeError("a step failed during a replay") from request.error
            completions[request.index].add(
                TokenEvent(request.index, token, reason, now, logprob)
            )
    return completions


def time_replay(
    engine: Engine, work: Workload, device: torch.device | str = "cpu", due: Due | None = None
) -> tuple[Sample, list[Completion]]:
    """Metrics of a replay, from its start to its last token, and its completions."""
    start = time.perf_counter()
    completions = replay(engine, work, due)
    synchronize(torch.device(device))
    return request_metrics(completions, time.perf_counter() - start), completions

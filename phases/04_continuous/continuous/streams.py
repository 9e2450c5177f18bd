"""Streams of tokens: each caller gets those of its own requests, and runs the steps while it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.events import TokenEvent
from common.request import Request
from continuous.messages import Add, Output

if TYPE_CHECKING:
    from continuous.engine import Engine


def stream(engine: Engine, groups: list[list[Request]]) -> Iterator[TokenEvent]:
    """Put requests in line, run steps, and yield the requests' tokens; see `Engine.stream`."""
    mine: deque[Output] = deque()
    requests = [request for group in groups for request in group]
    left, gone = set(requests), set(requests)
    try:
        engine.sinks.update((request, mine) for request in requests)
        engine.inbox.extend(Add(group) for group in groups)
        while left:
            if not mine:
                outputs = engine.step()
                # What belongs to no stream is for the next caller of `step`.
                engine.outputs = [o for o in outputs if o.request not in engine.sinks]
            while mine:
                request, token, reason, now, logprob, text = mine.popleft()
                if reason is not None:
                    left.discard(request)
                yield TokenEvent(request.index, token, reason, now, logprob, request.sample, text)
    finally:
        for request in requests:
            engine.sinks.pop(request, None)
            if request.finish_reason is None:
                engine.abort(request)
        engine.take_in()  # this thread runs the steps: what is left can end at once
        engine.outputs = [o for o in engine.outputs if o.request not in gone]  # these have no reader any more

"""Streams: the tokens of several prompts as they come, for a caller that only waits for them.

A server runs the engine's steps in a loop of its own, for requests that come at any time. A stream runs a
step when its consumer asks for the next token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from common.events import Params, TokenEvent, params_per_prompt
from common.request import Request
from continuous.work import Output

if TYPE_CHECKING:
    from continuous.engine import Engine


def stream(engine: Engine, prompts: list[list[int]], params: Params) -> Iterator[TokenEvent]:
    """Generate for all prompts at once, and yield a `TokenEvent` with its prompt's index for each token.

    The consumer runs the engine's steps by asking for the next token. If it leaves early, the requests that
    have not ended are aborted. Several streams of one engine may be read in turn, also by several threads.
    prompts: lists of token ids. params: one for all prompts, or one for each.

    Raises:
        UserError: a prompt or its parameters cannot be served; before anything is computed.
    """
    each = params_per_prompt(prompts, params)
    pairs = enumerate(zip(prompts, each, strict=True))
    groups = [engine.prepare(*pair, index) for index, pair in pairs]
    for settings in each:
        if settings.grammar is not None:
            engine.grammar_manager.wait_until_compiled(settings.grammar)
    return _events(engine, groups)


def _events(engine: Engine, groups: list[list[Request]]) -> Iterator[TokenEvent]:
    """Add the requests to the engine, run steps until all have ended, and yield `TokenEvent`s.

    groups: for each prompt its requests, one for each sample.
    """
    mine: deque[Output] = deque()
    requests = [request for group in groups for request in group]
    left = len(requests)
    try:
        engine.sinks.update((request, mine) for request in requests)
        engine.inbox.extend(partial(engine.enqueue, group) for group in groups)
        while left:
            with engine.step_lock:
                if not mine:
                    others = engine.step()
                    engine.outputs.extend(others)  # for the next caller of `step`
            while mine:
                request, token, reason, now, logprob, text = mine.popleft()
                left -= reason is not None
                yield TokenEvent(
                    request.index, token, reason, now, logprob, request.sample, text
                )
    finally:
        with engine.step_lock:  # no step runs: what is left can end at once
            for request in requests:
                if request.finish_reason is None:
                    engine.abort(request)
            engine.process_inbox()
            others = engine.take_outputs()
            engine.outputs.extend(others)
            for request in requests:
                engine.sinks.pop(request, None)

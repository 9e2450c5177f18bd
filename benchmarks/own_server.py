"""Phase 13's server by itself, without the appendix's routes and request fields.

It serves phase 13's engine or, one request after the other, each to its end, phase 02's: what every request
would wait for if there were no continuous batching. Phase 13's bench starts both:
`python -m benchmarks.own_server PHASE MODEL OPTIONS`, where OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.engines import engine_of
from common.errors import UserError
from common.events import Streams, TokenEvent
from common.http.limits import Limits
from common.models.hub import RANDOM, model_folder
from common.request import Request
from common.rules import NO_GRAMMARS, check_prompt, output_limit
from common.sampling.params import SamplingParams
from common.sockets import listen
from common.text.made_up import write_tokenizer
from common.text.tokenizer import Tokenizer
from continuous.work import Output
from forward.shapes import SHAPES
from kv_cache import load
from phases.appendix.connections.server import HttpServer
from serving.app import App
from serving.endpoints import ServedModel
from serving.liveness import EngineProcess


class OneAtATime:
    """Serves requests one after the other with the engine of phase 02.

    It has the methods that the server's worker calls on an engine of phase 04 or later, and no blocks.
    """

    cache = None

    def __init__(self, engine: Any) -> None:
        self.engine: Streams = engine
        self.config, self.max_len = engine.model.config, engine.model.max_len
        self._line: deque[Request] = deque()
        self._events: Iterator[TokenEvent] = iter(())
        self._now: Request | None = None
        self._ended: list[Output] = []

    @property
    def idle(self) -> bool:
        """Return True if no request is served and none waits."""
        return self._now is None and not self._line and not self._ended

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int,
        priority: int,
        salt: str,
    ) -> list[Request]:
        """Add a prompt to the waiting queue, for one sample; return its request.

        prompt: token ids. index: number of the request. priority, salt: not used.

        Raises:
            UserError: the prompt cannot be served, for example because it is too long.
        """
        check_prompt(prompt, self.config.vocab_size, self.max_len, params)
        if params.grammar is not None:
            raise UserError(NO_GRAMMARS)
        if params.n > 1:
            raise UserError(f"n is {params.n}, but phase 02 makes 1 sample of a prompt")
        limit = len(prompt) + output_limit(len(prompt), params, self.max_len)
        alone = replace(params, stop=())
        request = Request(index, list(prompt), len(prompt), limit, alone, index=index)
        self._line.append(request)
        return [request]

    def abort(self, request: Request) -> None:
        """End a request: remove it from the waiting queue, or stop generating it."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request is self._now:
            self._events, self._now = iter(()), None
        else:
            self._line.remove(request)
        self._ended.append(Output(request, None, "abort", time.perf_counter()))

    def step(self) -> list[Output]:
        """Generate one token of the first request; return the new outputs, with those of aborted
        requests.
        """
        outputs, self._ended = self._ended, []
        if self._now is None and self._line:
            self._now = self._line.popleft()
            self._events = self.engine.stream([self._now.tokens], self._now.params)
        request = self._now
        if request is None:
            return outputs
        event = next(self._events)
        if event.finish_reason is not None:
            request.finish_reason, self._now = event.finish_reason, None
            self._events = iter(())
        outputs.append(
            Output(request, event.token_id, event.finish_reason, event.time, event.logprob)
        )
        return outputs


def make(phase: str, model: str, options: Mapping[str, Any]) -> Any:
    """Return the engine of a phase, in its process."""
    if phase == "02":
        return OneAtATime(load(model, **options))
    return engine_of(phase, model, **options)


def main(phase: str, model: str, options: str) -> None:
    """Serve at a free port until a signal, and print `Ready: URL` first."""
    listening = listen("127.0.0.1", 0)
    engine = EngineProcess(partial(make, phase, model, json.loads(options)))
    with TemporaryDirectory() as made_up:
        if model.startswith(RANDOM):
            shape, folder = SHAPES[model.removeprefix(RANDOM)], Path(made_up)
            write_tokenizer(folder, shape.vocab_size, shape.eos_token_ids)
        else:
            folder = model_folder(model)
        app = App(engine, ServedModel(model, Tokenizer(folder), Limits(), {}))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = HttpServer(app, on_ready=partial(print, f"Ready: {url}", flush=True))
    uvloop.run(server.serve([listening]))


if __name__ == "__main__":
    main(*sys.argv[1:])

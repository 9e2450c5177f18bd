"""Prefill and decode apart: two engine processes that look like one to the server.

The first computes prompts, and saves their blocks to a folder, which is best in shared memory. The second
finds them there, and decodes. So no decode ever waits for a prompt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from common.events import Logprob
from common.sampling.params import SamplingParams
from moving_blocks.handover import HANDOVER
from serving.client import EngineClient, Sink
from serving.liveness import EngineProcess
from serving.messages import AddRequest

LEAST = 128
"""Tokens of a prompt below which it is computed where it is decoded: that takes a step or two."""
SEED_BITS = 62


class SplitCompletion(Sink):
    """One completion: its first token comes from the engine that prefills, the others from the one that
    decodes.

    engine: has both. sink: receives the tokens. command: adds the completion to the engine that decodes.
    complete: whether the first token is also the last one.
    """

    def __init__(
        self, engine: SplitEngine, sink: Sink, command: AddRequest, complete: bool
    ) -> None:
        self.engine = engine
        self.sink = sink
        self.command = command
        self.complete = complete
        self.decoding = False

    def note(self, kind: str, values: list[Any]) -> None:
        """See `Sink.note`: what the engine that decodes has found cached is this completion's own prompt."""
        if not self.decoding:
            self.sink.note(kind, values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """See `Sink.token`: after its first token, the completion goes to the engine that decodes."""
        if not self.decoding:
            self.engine.now = self.engine.prefill.now
            reason = None if reason == "length" and not self.complete else reason
            if reason is None:
                self.engine.hand_over(self, [f"{HANDOVER}{token}"])
            else:
                del self.engine.prefilling[self.command.first]
        self.sink.token(token, reason, logprob)

    def end(self, reason: str, message: str) -> None:
        """See `Sink.end`: if the first engine fails, the other one computes the prompt as well."""
        if self.decoding:
            self.sink.end(reason, message)
        else:
            self.engine.hand_over(self, [])


class SplitEngine(EngineProcess):
    """An `EngineProcess` that decodes, and beside it another one, `prefill`, that computes the prompts.

    Both have the same model and the same folder. A prompt that is short, or wants more than tokens, comes
    here at once; so does every prompt while `prefill` is not ready. The state and all statistics are those of
    the engine that decodes.

    make, observer: of the engine that decodes, in its process; the observer is a `HandoverObserver`.
    least: tokens of the shortest prompt that `prefill` gets.
    prefilling: completions that `prefill` has: number here -> number there.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        prefill: EngineClient,
        observer: Callable[..., Any],
        least: int = LEAST,
    ) -> None:
        super().__init__(make, observer=observer)
        self.prefill = prefill
        self.least = least
        self.prefilling: dict[int, int] = {}

    async def run(self) -> None:
        """See `EngineProcess.run`: start `prefill`, and then the engine that decodes."""
        prefill = self.prefill.start()
        while self.prefill.state == "starting" and not prefill.done():
            await asyncio.sleep(0.05)
        await asyncio.gather(prefill, super().run())

    async def stop(self) -> None:
        """End both engines for good."""
        await self.prefill.stop()
        await super().stop()

    @property
    def in_flight(self) -> int:
        """Return how many completions have not ended, in both engines."""
        return len(self._sinks) + len(self.prefilling)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        sinks: Sequence[Sink],
        *,
        priority: int = 0,
        salt: str = "",
        wanted: Sequence[str] = (),
    ) -> range:
        """See `EngineClient.submit`. The completions get a seed, so that both engines draw alike."""
        away = params.max_tokens and len(prompt) >= self.least and not wanted
        if not away or self.prefill.state != "ready" or self.ready is None:
            return super().submit(
                prompt, params, sinks, priority=priority, salt=salt, wanted=wanted
            )
        numbers = range(self._next, self._next + params.n)
        self._next += params.n
        if params.seed is None:
            params = replace(params, seed=random.getrandbits(SEED_BITS))
        complete = params.max_tokens == 1 or len(prompt) + 1 >= self.ready.max_len
        completions = [
            SplitCompletion(
                self,
                sink,
                AddRequest(
                    number,
                    prompt,
                    replace(params, n=1, seed=params.seed_of(sample)),
                    priority,
                    salt,
                ),
                complete,
            )
            for sample, (number, sink) in enumerate(zip(numbers, sinks, strict=True))
        ]
        first = replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens))
        there = self.prefill.submit(prompt, first, completions, priority=priority, salt=salt)
        self.prefilling.update(zip(numbers, there, strict=True))
        return numbers

    def hand_over(self, completion: SplitCompletion, wanted: list[str]) -> None:
        """Send a completion to the engine that decodes.

        wanted: says with which token it goes on; empty: it begins anew.
        """
        command = completion.command
        del self.prefilling[command.first]
        completion.decoding, command.wanted = True, wanted
        if not self._sinks:
            self._heard = time.monotonic()
        self._sinks[command.first] = completion
        self.tell(command)

    def abort(self, numbers: Iterable[int]) -> None:
        """See `EngineClient.abort`: in whichever engine the completions are."""
        mine = [*numbers]
        there = [self.prefilling.pop(each) for each in mine if each in self.prefilling]
        self.prefill.abort(there)
        super().abort(mine)

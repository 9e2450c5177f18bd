"""Prefill and decode apart: one engine process computes prompts, another one decodes.

Both have one folder of blocks, best in shared memory. A request goes to the first engine for one token, and
then to the second. There it is like one that was preempted: it has its prompt, a token and its seed, but no
blocks. An engine knows how to go on with those. Only its blocks are not computed again: they come as files.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common.events import Logprob
from common.request import Request
from moving_blocks.names import BlockName, chain
from moving_blocks.tiers import TieredConnector
from paged_cache import PagedEngine
from serving.client import EngineClient, Sink
from serving.liveness import EngineProcess
from serving.messages import AddRequest, Command
from serving.worker import Observer

HANDOVER = "handover"
"""What a command wants that hands a completion over; its first token follows, if it has one."""
LEAST = 128
"""Tokens of a prompt below which it is computed where it is decoded: that takes a step or two."""

# In the process of the engine that decodes.


@dataclass(eq=False)
class HandoverConnector(TieredConnector):
    """A `TieredConnector` by which a request can wait for files that another process is about to write.

    expected: of each request that waits, its last full block, and when it stops waiting.
    """

    expected: dict[Request, tuple[BlockName, float]] = field(default_factory=dict)

    def expect(self, request: Request) -> None:
        """Let a request wait until its last full block is in a file, if loading is faster than computing.

        It waits no longer than computing takes. Call this before the engine's next step takes the request up.
        """
        names = [*chain(self.cache.namespace, request.salt, self.cache.keys_of(request))]
        size, found, end = (
            self.cache.block_size,
            self._num_cached(request),
            len(request.tokens),
        )
        missing, start = len(names) - found, found * size
        if self.rule.should_load(start, len(names) * size, end, missing, missing):
            deadline = self.clock() + self.rule.compute_seconds(start, end)
            self.expected[request] = names[-1], deadline

    def ready(self, request: Request) -> bool:
        """See `ConnectorScheduler.ready`; the time to compute a prompt covers both waits, for files and for
        their blocks.
        """
        if request in self.expected:
            name, deadline = self.expected[request]
            if self.clock() < deadline and not self._is_on_disk(name):
                return False
            del self.expected[request]
            wait = self._begin(request)
            wait.deadline = min(wait.deadline, deadline)
        return super().ready(request)

    def poll(self) -> None:
        """See `ConnectorScheduler.poll`; it also forgets what was expected for aborted requests."""
        super().poll()
        for request in [each for each in self.expected if each.finish_reason is not None]:
            del self.expected[request]


class HandoverObserver(Observer):
    """Lets the requests that another engine hands over go on after their first token.

    engine: the one that decodes; its connector is a `HandoverConnector`.
    """

    def __init__(self, engine: PagedEngine) -> None:
        self.engine = engine

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer.hear`: give a request that was handed over its first token, and let it wait for its
        blocks.
        """
        super().hear(command, requests)
        wanted = command.wanted if isinstance(command, AddRequest) else []
        if HANDOVER in wanted and wanted[1:]:
            requests[0].tokens.append(int(wanted[1]))
            connector = self.engine.cache.connector
            assert isinstance(connector, HandoverConnector)
            connector.expect(requests[0])


# In the API process.


@dataclass
class SplitCompletion(Sink):
    """One completion: its first token comes from the engine that prefills, the others from the one that
    decodes.

    engine: has both. sink: receives the tokens. command: adds the completion to the engine that decodes.
    decoding: whether that has been sent.
    """

    engine: SplitEngine
    sink: Sink
    command: AddRequest
    decoding: bool = False

    def note(self, kind: str, values: list[Any]) -> None:
        """See `Sink.note`; what the engine that decodes found cached is what the other one computed."""
        if not self.decoding:
            self.sink.note(kind, values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """See `Sink.token`: after its first token, the completion goes to the engine that decodes."""
        if not self.decoding:
            self.engine.now = self.engine.prefill.now
            if reason == "length" and self.command.params.max_tokens > 1:
                reason = None
                self.engine.hand_over(self, str(token))
            else:
                del self.engine.prefilling[self.command.first]
        self.sink.token(token, reason, logprob)

    def end(self, reason: str, message: str) -> None:
        """See `Sink.end`: if the first engine fails, the other one computes the prompt as well."""
        if self.decoding:
            self.sink.end(reason, message)
        else:
            self.engine.hand_over(self)


class SplitEngine(EngineProcess):
    """An `EngineProcess` that decodes, and beside it another one, `prefill`, that computes the prompts.

    Both have the same model and the same folder. Short prompts come here at once, those of several
    completions, and those that want more than tokens; and all while `prefill` is not ready. The state and all
    statistics are those of the engine that decodes.

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

    def tell(self, command: Command) -> None:
        """See `EngineClient.tell`: a new completion with a long prompt goes to `prefill` instead.

        It gets a seed, so that both engines draw the same random numbers.
        """
        if not isinstance(command, AddRequest) or not self._is_split(command):
            super().tell(command)
            return
        params = command.params
        if params.seed is None:
            command.params = params = replace(params, seed=random.getrandbits(62))
        completion = SplitCompletion(self, self._sinks.pop(command.first), command)
        numbers = self.prefill.submit(
            command.prompt,
            replace(params, max_tokens=1, min_tokens=min(1, params.min_tokens)),
            [completion],
            priority=command.priority,
            salt=command.salt,
        )
        self.prefilling[command.first] = numbers.start

    def _is_split(self, command: AddRequest) -> bool:
        params, tokens = command.params, len(command.prompt)
        room = self.ready is not None and tokens + 1 < self.ready.max_len
        plain = params.n == 1 and params.max_tokens > 0 and not command.wanted
        return room and plain and tokens >= self.least and self.prefill.state == "ready"

    def hand_over(self, completion: SplitCompletion, *tokens: str) -> None:
        """Send a completion to the engine that decodes, to go on after `tokens`: one, or none if the other
        engine has failed.
        """
        command = completion.command
        del self.prefilling[command.first]
        completion.decoding = True
        if not self._sinks:
            self._heard = time.monotonic()  # it had no reason to speak before
        self._sinks[command.first] = completion
        command.wanted = [HANDOVER, *tokens]
        self.tell(command)

    def abort(self, numbers: Iterable[int]) -> None:
        """See `EngineClient.abort`: in whichever engine the completions are."""
        mine = [*numbers]
        self.prefill.abort(
            [self.prefilling.pop(each) for each in mine if each in self.prefilling]
        )
        super().abort(mine)

"""Prefill and decode apart: two engine processes that look like one to the server.

`ladder serve --prefill-device` starts them. The first computes prompts, and saves their blocks to a folder.
The second finds them there, and decodes. So no decode waits for a long prompt.

For the second engine, such a request is like a preempted one: it has its prompt, a token and its seed, but no
blocks. An engine can resume those. Only the blocks are not computed again: they are loaded (phase 19).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.errors import UserError
from common.events import Logprob
from common.request import Request
from moving_blocks.tiers import TieredConnector
from paged_cache import PagedEngine
from phases.appendix.embeddings.prompt_states import PromptObserver
from serving.client import EngineClient
from serving.liveness import EngineProcess
from serving.messages import AddRequest, Command
from serving.seams import Sink

HANDOVER = "handover"
"""What a command wants that hands a completion over; its first token follows, if it has one."""
LEAST = 128
"""Tokens of a prompt below which it is computed where it is decoded: that takes a step or two."""


@dataclass
class SplitCompletion(Sink):
    """A completion whose first token is of the engine that prefills, the others of the one that decodes.

    client: has both engines. sink: receives the tokens.
    command: adds the completion to the engine that decodes. decoding: True once that command has been sent.
    """

    client: SplitEngine
    sink: Sink
    command: AddRequest
    decoding: bool = False

    def note(self, kind: str, values: list[Any]) -> None:
        """Pass extra data of the prefill engine to the sink; drop the decode engine's.

        The decode engine finds the whole prompt cached, since the prefill engine has computed it.

        kind: what the data is, such as "cached" tokens. values: a list, of a type that the kind decides.
        """
        if not self.decoding:
            self.sink.note(kind, values)

    def token(self, token: int, reason: str | None, logprob: Logprob | None) -> None:
        """Pass a new token to the sink; after the first, hand the completion to the decode engine.

        reason: why the token is the last one ("stop" or "length"); None: it is not. logprob: its
            log-probability and those of alternatives; None unless they were asked for.
        """
        if not self.decoding:
            self.client.now = self.client.prefill.now
            if reason == "length" and self.command.params.max_tokens > 1:
                reason = None
                self.client.hand_over(self, str(token))
            else:
                del self.client.prefilling[self.command.first]
        self.sink.token(token, reason, logprob)

    def end(self, reason: str, message: str) -> None:
        """End the completion; if the prefill engine failed, let the decode engine compute the prompt.

        reason: such as "stop", "abort" or "error". message: a sentence about it.
        """
        if self.decoding:
            self.sink.end(reason, message)
        else:
            self.client.hand_over(self)


class SplitEngine(EngineProcess):
    """An `EngineProcess` that decodes, and beside it another one, `prefill`, that computes the prompts.

    Both have the same model and the same folder. The engine that decodes also computes short prompts, prompts
    of several completions, those that ask for extra data, and all prompts while `prefill` is not ready.
    The state and all statistics are those of the engine that decodes.

    make, observer: of the engine that decodes, called in its process; the observer is a `DecodeObserver`.
    least: tokens of the shortest prompt that `prefill` gets; may be set.
    prefilling: completions that `prefill` computes: their number in this client -> that in `prefill`.
    """

    least: int = LEAST

    def __init__(
        self, make: Callable[[], Any], prefill: EngineClient, observer: Callable[..., Any]
    ) -> None:
        super().__init__(make, observer=observer)
        self.prefill = prefill
        self.prefilling: dict[int, int] = {}

    async def run(self) -> None:
        """Start both engines side by side, and run them (see `EngineProcess.run`)."""
        await asyncio.gather(self.prefill.run(), super().run())

    async def stop(self) -> None:
        """End both engine processes; they cannot be started again."""
        await self.prefill.stop()
        await super().stop()

    @property
    def in_flight(self) -> int:
        """Return how many completions have not ended, in both engines together."""
        return len(self._sinks) + len(self.prefilling)

    def tell(self, command: Command) -> None:
        """Send a command to the decode engine; a new completion with a long prompt goes to `prefill` instead.

        Such a completion gets a seed, so that both engines draw the same random numbers.
        """
        if not isinstance(command, AddRequest) or not self._is_split(command):
            super().tell(command)
            return
        if command.params.seed is None:
            command.params = replace(command.params, seed=random.getrandbits(62))
        params = replace(
            command.params, max_tokens=1, min_tokens=min(1, command.params.min_tokens)
        )
        completion = SplitCompletion(self, self._sinks.pop(command.first), command)
        self.prefilling[command.first] = self.prefill.submit(
            command.prompt,
            params,
            [completion],
            priority=command.priority,
            salt=command.salt,
        ).start

    def _is_split(self, command: AddRequest) -> bool:
        params, ready = command.params, self.prefill.ready
        if ready is None or self.prefill.state != "ready" or command.wanted or params.n > 1:
            return False
        return self.least <= len(command.prompt) < ready.max_len - 1 and params.max_tokens > 0

    def hand_over(self, completion: SplitCompletion, *tokens: str) -> None:
        """Send a completion to the engine that decodes.

        tokens: the token id that `prefill` has sampled, as text; none if `prefill` has failed.
        """
        command = completion.command
        del self.prefilling[command.first]
        completion.decoding = True
        self._sinks[command.first] = completion
        command.wanted = [HANDOVER, *tokens]
        self.tell(command)

    def abort(self, numbers: Iterable[int]) -> None:
        """Abort the completions with these numbers, in whichever engine they run."""
        mine = [*numbers]
        self.prefill.abort(
            [self.prefilling.pop(each) for each in mine if each in self.prefilling]
        )
        super().abort(mine)


class DecodeObserver(PromptObserver):
    """The decode engine's observer: a `PromptObserver` that also prepares requests of the prefill engine."""

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Read a command to the engine; if it hands a request over, give the request its first token.

        Then the request waits for its blocks, which the prefill engine writes to files.

        requests: those that the command has added to the engine.
        """
        super().hear(command, requests)
        wanted = command.wanted if isinstance(command, AddRequest) else []
        if HANDOVER in wanted and wanted[1:]:
            requests[0].tokens.append(int(wanted[1]))
            assert isinstance(self.engine, PagedEngine)
            connector = self.engine.cache.connector
            assert isinstance(connector, TieredConnector)
            connector.expect(requests[0])


def split_engine(
    make: Callable[..., Any], made: tuple[Any, ...], prefill_device: str
) -> SplitEngine:
    """Return the processes of two engines of one model, which are not started yet.

    make: makes one engine, given `made`: phase, engine options, device and dtype.
    prefill_device: of the engine that computes prompts; the other is on the device in `made`.

    Raises:
        UserError: the options have no `disk_folder`, through which blocks go from one engine to the other.
    """
    phase, options, _, dtype = made
    if options.get("disk_folder") is None:
        raise UserError(
            "prefill_device needs a disk_folder, through which blocks go from one engine to the other; in "
            "shared memory: --disk-folder /dev/shm/blocks"
        )
    prefill = EngineProcess(partial(make, phase, options, prefill_device, dtype))
    return SplitEngine(partial(make, *made), prefill, DecodeObserver)

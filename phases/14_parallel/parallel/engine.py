"""An engine in ranks: every rank has one, with the same requests, and all schedule the same steps.

Nothing in an engine depends on anything but the order of commands and the tokens that come. So rank 0 alone
speaks to the world, and before each step it tells the others what has come in. What depends on time (when a
grammar is ready, whether guessing pays) it decides, and they are told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common.request import Request
from continuous.engine import Engine
from continuous.messages import Output
from continuous.runner import Forwarded, Pending, RequestError, Token
from continuous.seams import Landed
from continuous.work import Work
from parallel import crew as crews
from parallel.crew import Crew, RanksLost
from parallel.member import Line
from parallel.messages import Enter, Entry, Leave, Rehearsed, Sum, Turn
from parallel.ranks import Ranks
from parallel.sampler import RanksPrompts
from parallel.told import FirstMasks, Teller, Told

KEPT = 1000
"""Checksums that rank 0 keeps for those who are behind."""


class InRanks(Engine):
    """Put before another engine's class.

    turn: the number of the last step.
    checksum: of all steps up to it: works and tokens.
    """

    ranks: Ranks
    every = 100
    turn = 0
    checksum = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.prompts = RanksPrompts(self.ranks, self.config.vocab_size)

    def forward(self, works: list[Work]) -> Forwarded | None:
        """See `Engine.forward`."""
        self._add_up(*((w.request.id, w.row, w.start, w.count, w.drafts) for w in works))
        return super().forward(works)

    def _receive(self, request: Request, tokens: Sequence[Token], now: float) -> bool:
        self._add_up(request.id, *(token for token, _ in tokens))
        return super()._receive(request, tokens, now)

    def _add_up(self, *what: Any) -> None:
        self.checksum = hash((self.checksum, *what))  # of whole numbers alone, so all processes agree

    def fail(self, works: Sequence[Work], error: BaseException) -> None:
        """See `Engine.fail`. What is wrong with one request is so on every rank; else this rank is lost."""
        super().fail(works, error)
        if not isinstance(sys.exc_info()[1], RequestError):
            self.broken(error)

    def broken(self, error: BaseException) -> None:
        """This rank cannot go on."""
        raise NotImplementedError


class Leader(InRanks):
    """Rank 0's engine.

    closed: whether the ranks have been let go.
    """

    crew: Crew
    closed = False
    release: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._commands: list[Enter | Leave] = []
        self._sums: dict[int, int] = {}
        self._failing: dict[Request, Exception] = {}
        self.compared = 0

    # What comes in.

    def take_in(self) -> None:
        """See `Engine.take_in`; requests whose grammar has failed leave here, on all ranks alike."""
        failing, self._failing = self._failing, {}
        for request, error in failing.items():
            if request.finish_reason is None:
                request.error = error
                self._end(request, "error", time.perf_counter())
                self._commands.append(Leave(request.id, error=True))
        super().take_in()

    def _enter(self, requests: list[Request]) -> None:
        super()._enter(requests)
        held = bool(self._held) and self._held[-1] is requests
        if requests and requests[0].finish_reason is None and not held:
            self._commands.append(Enter([Entry.of(request) for request in requests]))

    def _abort(self, request: Request) -> None:
        if request.finish_reason is None:
            self._commands.append(Leave(request.id))
        super()._abort(request)

    # Steps.

    @property
    def idle(self) -> bool:
        """See `Engine.idle`. One that is broken has something to tell."""
        return super().idle and not self.crew.reason

    def step(self) -> list[Output]:
        """See `Engine.step`.

        Raises:
            RanksLost: a rank has ended; nothing can be computed any more.
        """
        try:
            self.crew.check()
            if self.closed:  # its crew may be another engine's by now, and this would be a step of that one
                raise RanksLost("the engine is closed, and its ranks are gone")
            with self.crew.awaited():
                outputs = super().step()
            self.crew.check()
        except RanksLost:
            self.release()
            raise
        return outputs

    def advance(self) -> None:
        """See `Engine.advance`; the others are told before, and checksums compared now and then."""
        self.turn += 1
        commands, self._commands = self._commands, []
        self.crew.tell(Turn(self.turn, commands, self.scheduler.drafter.waits))
        super().advance()
        if self.turn % self.every == 0:
            self._sums[self.turn] = self.checksum
            self._compare()

    def schedule(self) -> list[Work]:
        """See `Engine.schedule`; what was drafted the others are told at once, for they wait for it."""
        works = super().schedule()
        if isinstance(self.scheduler.drafter, Teller):
            self.crew.tell(self.scheduler.drafter.said())
        return works

    def sample(self, step: Forwarded | None) -> Pending | None:
        """See `Engine.sample`."""
        pending = super().sample(step)
        if isinstance(self.masks, FirstMasks):
            failed, self.masks.failed = self.masks.failed, []
            self._failing |= dict(failed)
        return pending

    def collect(self, pending: Pending, first: Callable[[Landed], None] | None = None) -> None:
        """See `Engine.collect`; a token that was chosen after its request's grammar had failed is none."""
        super().collect(pending, first)
        if self._failing:
            self._outputs = [
                output
                for output in self._outputs
                if output.finish_reason is not None or output.request not in self._failing
            ]

    def broken(self, error: BaseException) -> None:
        """A step has failed: perhaps since another rank has ended."""
        end = time.monotonic() + crews.NOTICE
        while not self.crew.reason and time.monotonic() < end:
            time.sleep(0.01)
        self.crew.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")

    def _compare(self, *, wait: float = 0.0) -> None:
        for rank, message in self.crew.answers(wait=wait):
            if isinstance(message, Sum):
                if self._sums.get(message.number) != message.value:
                    self.crew.lose(f"rank {rank} does not agree with rank 0 on step {message.number}")
                self.compared += 1
        oldest = self.turn - KEPT * self.every
        while self._sums and next(iter(self._sums)) < oldest:
            del self._sums[next(iter(self._sums))]

    def agree(self, seconds: float = 10.0) -> None:
        """Wait until all ranks' checksums of all steps so far have been compared.

        Raises:
            RanksLost: they differ, or do not come.
        """
        end = time.monotonic() + seconds
        while self.compared < self.turn // self.every * (self.crew.size - 1):
            self.crew.check()
            if time.monotonic() > end:
                self.crew.lose(f"checksums have not come for {seconds:.0f} s")
            self._compare(wait=0.05)
        self.crew.check()

    def close(self) -> None:
        """Let the other ranks go, who otherwise stay as long as this engine does."""
        self.closed = True
        self.release()


class Follower(InRanks):
    """Any other rank's engine: it does what it is told, and what comes out is for nobody."""

    line: Line

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._known: dict[int, Request] = {}

    def follow(self, turn: Turn) -> None:
        """One step."""
        self.turn = turn.number
        for command in turn.commands:
            if isinstance(command, Enter):
                requests = [entry.request(self.tokenizer) for entry in command.entries]
                self._known.update((request.id, request) for request in requests)
                self.prompts.watch(requests[0])
                self.scheduler.add(requests)
            else:
                self._leave(command)
        if isinstance(self.scheduler.drafter, Told):
            self.scheduler.drafter.now = turn.waits
        self.advance()
        for output in self.drain():
            if output.finish_reason is not None:
                self._known.pop(output.request.id, None)
        if turn.number % self.every == 0:
            self.line.send(Sum(turn.number, self.checksum))

    def _leave(self, command: Leave) -> None:
        request = self._known.get(command.id)
        if request is None or request.finish_reason is not None:
            return
        if command.error:
            self._end(request, "error", time.perf_counter())
        else:
            self._abort(request)

    def broken(self, error: BaseException) -> None:
        """Nobody can follow any more: end, so that rank 0 notices."""
        raise error


def rehearse(engine: Any) -> float:
    """A follower's part in a rehearsal: whatever rank 0 plays."""
    begun = time.perf_counter()
    while not isinstance(message := engine.line.receive(), Rehearsed):
        engine.follow(message)
    engine.stats = type(engine.stats)()
    engine.cache.forget()
    return time.perf_counter() - begun

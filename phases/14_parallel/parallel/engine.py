"""An engine in ranks: every rank has one, with the same requests, and all schedule the same steps.

Nothing in an engine depends on anything but the order of commands and the tokens that come. So rank 0 alone
speaks to the world, and before each step it tells the others what has come in. What depends on time (when a
grammar is ready, whether guessing pays) it decides, and they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.request import Request
from continuous.engine import Engine
from continuous.messages import Abort, Add
from continuous.runner import Results
from continuous.seams import Journal, Loop
from continuous.work import Work
from parallel.crew import Crew, RanksLost
from parallel.messages import Enter, Leave, Line, Sum, Turn
from parallel.told import Teller, Told

KEPT = 1000
"""Checksums that rank 0 keeps for ranks that are behind."""


class InRanks(Journal):
    """Hears what a rank's engine does, and adds it up.

    turn: the number of the last step.
    checksum: of all steps up to it: works and tokens.
    """

    inner: Loop
    turn = 0
    checksum = 0

    @property
    def idle(self) -> bool:
        """True if nothing is under way."""
        return self.inner.idle

    def land(self, engine: Engine) -> None:
        """Collect what is under way."""
        self.inner.land(engine)

    def scheduled(self, works: Sequence[Work]) -> None:
        """Add up a step's works."""
        self._add_up(*((w.request.id, w.row, w.start, w.count, w.drafts) for w in works))

    def landed(self, works: Sequence[Work], results: Results) -> None:
        """Add up a step's tokens."""
        self._add_up(*(tuple(token for token, _ in tokens) for tokens in results))

    def _add_up(self, *what: Any) -> None:
        self.checksum = hash((self.checksum, *what))  # of whole numbers alone, so all processes agree

    def failed(self, error: BaseException) -> None:
        """End: this rank cannot go on, and rank 0 notices."""
        raise error


class Leader(InRanks):
    """Rank 0's `Loop` around another one, and its journal: the others are told before each step.

    Args:
        inner: the loop that every rank has.
        every: steps from one comparison of checksums to the next.
        drafter: the engine's, if there is one.

    closed: whether the ranks have been let go. compared: checksums. release: lets the ranks go.
    """

    def __init__(self, inner: Loop, crew: Crew, every: int, drafter: Teller | None) -> None:
        self.inner, self.crew, self.every, self.drafter = inner, crew, every, drafter
        self.release: Callable[[], Any] = lambda: None
        self.closed = False
        self._commands: list[Enter | Leave] = []
        self._sums: dict[int, int] = {}
        self.compared = 0

    # What comes in.

    def entered(self, requests: Sequence[Request]) -> None:
        """Note that the others are to put the requests in line."""
        self._commands.append(Enter.of(requests))

    def left(self, request: Request) -> None:
        """Note that the others are to abort the request."""
        self._commands.append(Leave(request.id))

    # Steps.

    @property
    def idle(self) -> bool:
        """True if nothing is under way. One that is broken has something to tell."""
        return super().idle and not self.crew.reason

    def advance(self, engine: Engine) -> None:
        """Advance on all ranks.

        Raises:
            RanksLost: a rank has ended; nothing can be computed any more.
        """
        try:
            self.crew.check()
            if self.closed:  # its crew may be another engine's by now, and this would be a step of that one
                raise RanksLost("the engine is closed, and its ranks are gone")
            with self.crew.awaited():
                self._lead(engine)
            self.crew.check()
        except RanksLost:
            self.release()
            raise

    def _lead(self, engine: Engine) -> None:
        """Tell the others what has come in, advance, and compare checksums now and then."""
        self.turn += 1
        commands, self._commands = self._commands, []
        waits = self.drafter is not None and self.drafter.waits
        self.crew.tell(Turn(self.turn, commands, waits))
        self.inner.advance(engine)
        if self.turn % self.every == 0:
            self._sums[self.turn] = self.checksum
            self.compare()

    def scheduled(self, works: Sequence[Work]) -> None:
        """Also tell the others what was drafted, for they wait for it."""
        super().scheduled(works)
        if self.drafter is not None:
            self.crew.tell(self.drafter.said())

    def failed(self, error: BaseException) -> None:
        """A step has failed: perhaps since another rank has ended."""
        self.crew.notice()
        self.crew.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")

    def compare(self, *, wait: float = 0.0) -> None:
        """Compare the checksums that have come; wait for one so many seconds a rank."""
        for rank, message in self.crew.answers(wait=wait):
            if isinstance(message, Sum):
                if self._sums.get(message.number) != message.value:
                    self.crew.lose(f"rank {rank} does not agree with rank 0 on step {message.number}")
                self.compared += 1
        oldest = self.turn - KEPT * self.every
        while self._sums and next(iter(self._sums)) < oldest:
            del self._sums[next(iter(self._sums))]

    def close(self) -> None:
        """Let the other ranks go, which otherwise stay as long as this engine does."""
        self.closed = True
        self.release()


class Follower(InRanks):
    """Any other rank's `Loop` around another one, and its journal: it does what it is told.

    What comes out of its engine is read by no caller.
    """

    def __init__(self, inner: Loop, line: Line, every: int) -> None:
        self.inner, self.line, self.every = inner, line, every
        self._known: dict[int, Request] = {}

    def advance(self, engine: Engine) -> None:
        """Advance as rank 0 does."""
        self.inner.advance(engine)

    def follow(self, engine: Engine, turn: Turn) -> None:
        """One step."""
        self.turn = turn.number
        for command in turn.commands:
            if isinstance(command, Enter):
                requests = command.taken(engine.tokenizer)
                self._known.update((request.id, request) for request in requests)
                engine.inbox.append(Add(requests))
            elif command.id in self._known:
                engine.inbox.append(Abort(self._known[command.id]))
        if isinstance(engine.scheduler.drafter, Told):
            engine.scheduler.drafter.waits = turn.waits
        for output in engine.step():
            if output.finish_reason is not None:
                self._known.pop(output.request.id, None)
        if turn.number % self.every == 0:
            self.line.send(Sum(turn.number, self.checksum))

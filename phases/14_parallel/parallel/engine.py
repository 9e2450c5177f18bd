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
from continuous.seams import EngineObserver, Loop
from continuous.work import Work
from parallel.messages import BroadcastChannel, Enter, Leave, StepMessage, Sum
from parallel.replicated import BroadcastProposer, ReplicatedProposer
from parallel.worker_group import WorkerGroup, WorkerLostError

KEPT = 1000
"""Checksums that rank 0 keeps for ranks that are behind."""


class ReplicatedLoop(EngineObserver):
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

    def finish_steps(self, engine: Engine) -> None:
        """Collect what is under way."""
        self.inner.finish_steps(engine)

    def on_step_scheduled(self, works: Sequence[Work]) -> None:
        """Add up a step's works."""
        self._add_up(*((w.request.id, w.row, w.start, w.count, w.drafts) for w in works))

    def on_step_finished(self, works: Sequence[Work], results: Results) -> None:
        """Add up a step's tokens."""
        self._add_up(*(tuple(token for token, _ in tokens) for tokens in results))

    def _add_up(self, *what: Any) -> None:
        self.checksum = hash(
            (self.checksum, *what)
        )  # of whole numbers alone, so all processes agree

    def on_step_failed(self, error: BaseException) -> None:
        """End: this rank cannot go on, and rank 0 notices."""
        raise error


class RankZeroLoop(ReplicatedLoop):
    """Rank 0's `Loop` around another one, and its journal: the others are told before each step.

    Args:
        inner: the loop that every rank has.
        every: steps from one comparison of checksums to the next.
        drafter: the engine's, if there is one.

    closed: whether the ranks have been let go. compared: checksums. release: lets the ranks go.
    """

    def __init__(
        self, inner: Loop, workers: WorkerGroup, every: int, drafter: BroadcastProposer | None
    ) -> None:
        self.inner = inner
        self.workers = workers
        self.every = every
        self.drafter = drafter
        self.release: Callable[[], Any] = lambda: None
        self.closed = False
        self._commands: list[Enter | Leave] = []
        self._sums: dict[int, int] = {}
        self.compared = 0

    # What comes in.

    def on_requests_added(self, requests: Sequence[Request]) -> None:
        """Note that the others are to put the requests in line."""
        self._commands.append(Enter.of(requests))

    def on_request_aborted(self, request: Request) -> None:
        """Note that the others are to abort the request."""
        self._commands.append(Leave(request.id))

    # Steps.

    @property
    def idle(self) -> bool:
        """True if nothing is under way. One that is broken has something to tell."""
        return super().idle and not self.workers.reason

    def advance(self, engine: Engine) -> None:
        """Advance on all ranks.

        Raises:
            WorkerLostError: a rank has ended; nothing can be computed any more.
        """
        try:
            self.workers.check()
            if (
                self.closed
            ):  # its crew may be another engine's by now, and this would be a step of that one
                raise WorkerLostError("the engine is closed, and its ranks are gone")
            with self.workers.awaited():
                self._lead(engine)
            self.workers.check()
        except WorkerLostError:
            self.release()
            raise

    def _lead(self, engine: Engine) -> None:
        """Tell the others what has come in, advance, and compare checksums now and then."""
        self.turn += 1
        commands, self._commands = self._commands, []
        waits = self.drafter is not None and self.drafter.needs_finished_step
        self.workers.tell(StepMessage(self.turn, commands, waits))
        self.inner.advance(engine)
        if self.turn % self.every == 0:
            self._sums[self.turn] = self.checksum
            self.compare()

    def on_step_scheduled(self, works: Sequence[Work]) -> None:
        """Also tell the others what was drafted, for they wait for it."""
        super().on_step_scheduled(works)
        if self.drafter is not None:
            self.workers.tell(self.drafter.said())

    def on_step_failed(self, error: BaseException) -> None:
        """A step has failed: perhaps since another rank has ended."""
        self.workers.notice()
        self.workers.lose(f"a step failed on rank 0 ({type(error).__name__}: {error})")

    def compare(self, *, wait: float = 0.0) -> None:
        """Compare the checksums that have come; wait for one so many seconds a rank."""
        for rank, message in self.workers.collect_replies(wait=wait):
            if isinstance(message, Sum):
                if self._sums.get(message.number) != message.value:
                    self.workers.lose(
                        f"rank {rank} does not agree with rank 0 on step {message.number}"
                    )
                self.compared += 1
        oldest = self.turn - KEPT * self.every
        while self._sums and next(iter(self._sums)) < oldest:
            del self._sums[next(iter(self._sums))]

    def close(self) -> None:
        """Let the other ranks go, which otherwise stay as long as this engine does."""
        self.closed = True
        self.release()


class WorkerLoop(ReplicatedLoop):
    """Any other rank's `Loop` around another one, and its journal: it does what it is told.

    What comes out of its engine is read by no caller.
    """

    def __init__(self, inner: Loop, line: BroadcastChannel, every: int) -> None:
        self.inner = inner
        self.line = line
        self.every = every
        self._known: dict[int, Request] = {}

    def advance(self, engine: Engine) -> None:
        """Advance as rank 0 does."""
        self.inner.advance(engine)

    def follow(self, engine: Engine, turn: StepMessage) -> None:
        """One step."""
        self.turn = turn.number
        for command in turn.commands:
            if isinstance(command, Enter):
                requests = command.taken(engine.tokenizer)
                self._known.update((request.id, request) for request in requests)
                engine.inbox.append(Add(requests))
            elif command.id in self._known:
                engine.inbox.append(Abort(self._known[command.id]))
        if isinstance(engine.scheduler.drafter, ReplicatedProposer):
            engine.scheduler.drafter.needs_finished_step = turn.waits
        for output in engine.step():
            if output.finish_reason is not None:
                self._known.pop(output.request.id, None)
        if turn.number % self.every == 0:
            self.line.send(Sum(turn.number, self.checksum))

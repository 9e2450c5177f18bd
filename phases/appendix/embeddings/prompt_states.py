"""Readers of the hidden states of prompts: their means, and the log-probabilities of their tokens.

A request that asks is an ordinary completion: the scheduler puts its prompt into steps beside all others, in
chunks if it is long, and its blocks are freed like all others'. It shares no blocks, whose states are not
kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from common.request import Request
from common.sampling.ops import raw_logprobs
from continuous.engine import Engine
from continuous.runner import Forwarded, Runner
from continuous.work import Work
from paged_cache import PagedRunner
from phases.appendix.embeddings.note_kinds import MEAN, PROMPT_LOGPROBS
from phases.appendix.observability.observer import StepPictures
from serving.messages import AddRequest, Command, StepReport

ROWS = 256
"""Logits that are made at a time: each has a number for every token of the vocabulary."""


class Mean:
    """The mean of a prompt's hidden states, as a sum that grows."""

    def __init__(self, runner: Runner, request: Request) -> None:
        self.total = torch.zeros((), device=runner.model.device)

    def add(self, hidden: Tensor, start: int) -> None:
        """Add the hidden states `[T, D]` of the prompt's tokens from `start` on."""
        self.total = self.total + hidden.float().sum(0)

    def notes(self) -> list[Any]:
        """Return the mean as a list of numbers, for a note to the API process."""
        return [normalize(self.total, dim=0).cpu().numpy().tobytes()]


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, as the model has them: before temperature and the like."""

    def __init__(self, runner: Runner, request: Request) -> None:
        self.model = runner.model
        self.prompt = request.tokens[: request.prompt_len]
        self.top = request.params.logprobs or 0
        self.values = list[Any]()

    def add(self, hidden: Tensor, start: int) -> None:
        """Add the hidden states `[T, D]` of the prompt's tokens from `start` on, as log-probabilities."""
        following = self.prompt[start + 1 : start + 1 + len(hidden)]
        for at in range(0, len(following), ROWS):
            tokens = torch.tensor(following[at : at + ROWS], device=hidden.device)
            logits = self.model.logits(hidden[at : at + len(tokens)])
            chosen, ids, values = raw_logprobs(logits.float(), tokens, self.top)
            rows = zip(chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
            self.values += [(one, list(zip(*top, strict=True))) for one, *top in rows]

    def notes(self) -> list[Any]:
        """Return the log-probabilities, for a note to the API process."""
        return self.values


READERS: dict[str, type[Mean | PromptLogprobs]] = {MEAN: Mean, PROMPT_LOGPROBS: PromptLogprobs}


class PromptExecutor:
    """The first executor of steps: it lets the others run them, and reads the hidden states of prompts."""

    order: ClassVar[int] = 0

    def __init__(self, runner: PagedRunner) -> None:
        self.runner = runner
        self.others = runner.executors
        self._asked: dict[Request, tuple[str, Mean | PromptLogprobs]] = {}
        self._counts: dict[Request, int] = {}  # how many tokens are read

    def ask(self, request: Request, kind: str) -> None:
        """Read the hidden states of a request's prompt. kind: what to compute of them, a kind of notes."""
        request.salt = secrets.token_hex(8)
        self._asked[request] = kind, READERS[kind](self.runner, request)
        self._counts[request] = 0

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return `masked` for a step that computes a part of such a prompt."""
        if not self._counts:
            return None
        return masked if any(work.request in self._counts for work in works) else None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Run the first half by an executor that supports it. A preempted request is read on where it was."""
        asked = ((other, other.supports(works, ticket)) for other in self.others)
        found = next((pair for pair in asked if pair[1] is not None), None)
        step = self.runner.eager(works) if found is None else found[0].run(works, found[1])
        after = 0
        for work in step.works:
            at, after = after, after + work.count
            request = work.request
            if request not in self._counts:
                continue
            first = max(self._counts[request], work.start)
            end = min(work.start + work.count, request.prompt_len)
            if first < end:
                rows = step.hidden[at + first - work.start : at + end - work.start]
                self._asked[request][1].add(rows, first)
                self._counts[request] = end
            if self._counts[request] == request.prompt_len:
                del self._counts[request]
        return step

    @property
    def reading(self) -> bool:
        """True while a prompt is asked for whose notes have not been taken."""
        return bool(self._asked)

    def finished(self) -> list[tuple[int, str, list[Any]]]:
        """Return notes of prompts that are read; those of requests that have ended before are forgotten."""
        found = []
        for request, (kind, reader) in [*self._asked.items()]:
            if request not in self._counts:
                found.append((request.index, kind, reader.notes()))
            elif request.finish_reason is None:
                continue
            del self._asked[request]
            self._counts.pop(request, None)
        return found


class PromptObserver(StepPictures):
    """Reports what was asked for, beside all else. Engines before phase 05 have none of it.

    executor: reads prompts; there is none until the first one is asked for.
    """

    executor: PromptExecutor | None = None

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        super().hear(command, requests)
        kinds = READERS.keys() & set(command.wanted if isinstance(command, AddRequest) else ())
        runner = self.engine.runner if isinstance(self.engine, Engine) else None
        if kinds and self.executor is None and isinstance(runner, PagedRunner):
            self.executor = PromptExecutor(runner)
            runner.ask_first(self.executor)
        if self.executor is not None:
            for kind in kinds:
                self.executor.ask(requests[0], kind)

    def write(self, step: StepReport) -> None:
        """See `Observer`."""
        super().write(step)
        if self.executor is not None:
            step.notes += self.executor.finished()
            self.due = self.executor.reading

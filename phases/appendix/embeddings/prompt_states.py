"""Readers of prompts' hidden states, which compute means or log-probabilities of the prompts' tokens.

A request that asks for these is an ordinary completion: the scheduler puts its prompt into steps with other
requests, in chunks if it is long, and frees its blocks as for other requests. It reuses no cached blocks,
since their hidden states were not stored.
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
from paged_cache.runner import run_by_first
from phases.appendix.embeddings.note_kinds import MEAN, PROMPT_LOGPROBS
from phases.appendix.observability.observer import StepPictures
from serving.messages import AddRequest, Command, StepReport

ROWS = 256
"""Logits that are made at a time: each has a number for every token of the vocabulary."""


class Mean:
    """Computes the mean of a prompt's hidden states, chunk by chunk as the engine computes the prompt."""

    def __init__(self, runner: Runner, request: Request) -> None:
        self.total = torch.zeros((), device=runner.model.device)

    def add(self, hidden: Tensor, start: int) -> None:
        """Add the hidden states `[T, D]` of the next T tokens of the prompt.

        start: index in the prompt of the first of these tokens.
        """
        self.total = self.total + hidden.float().sum(0)

    def notes(self) -> list[Any]:
        """Return `[bytes]` for the API process: the mean, scaled to length 1, as float32 bytes."""
        return [normalize(self.total, dim=0).cpu().numpy().tobytes()]


class PromptLogprobs:
    """Computes log-probabilities of a prompt's tokens from the model's logits, chunk by chunk.

    Temperature and other sampling settings do not change them.
    """

    def __init__(self, runner: Runner, request: Request) -> None:
        self.model = runner.model
        self.prompt = request.tokens[: request.prompt_len]
        self.top = request.params.logprobs or 0
        self.values = list[Any]()

    def add(self, hidden: Tensor, start: int) -> None:
        """Compute log-probabilities of prompt tokens `start + 1` to `start + T`, and store them.

        hidden: `[T, D]`, the hidden states of tokens `start` to `start + T - 1`, which predict them.
        """
        following = self.prompt[start + 1 : start + 1 + len(hidden)]
        for at in range(0, len(following), ROWS):
            tokens = torch.tensor(following[at : at + ROWS], device=hidden.device)
            logits = self.model.logits(hidden[at : at + len(tokens)])
            chosen, ids, values = raw_logprobs(logits.float(), tokens, self.top)
            rows = zip(chosen.tolist(), ids.tolist(), values.tolist(), strict=True)
            self.values += [(one, list(zip(*top, strict=True))) for one, *top in rows]

    def notes(self) -> list[Any]:
        """Return an entry for each prompt token but the first; the list goes to the API process.

        An entry: (log-probability, [(token id, log-probability) of the likeliest tokens]).
        """
        return self.values


READERS: dict[str, type[Mean | PromptLogprobs]] = {MEAN: Mean, PROMPT_LOGPROBS: PromptLogprobs}


class PromptExecutor:
    """An executor of steps that reads prompts' hidden states while another executor runs the step.

    An executor runs the forward pass of the steps that it supports; the engine's runner tries this one first.
    It computes means or log-probabilities of the prompts for which `ask` was called.
    """

    order: ClassVar[int] = 0

    def __init__(self, runner: PagedRunner) -> None:
        self.runner = runner
        self.others = runner.executors
        self._asked: dict[Request, tuple[str, Mean | PromptLogprobs]] = {}
        self._counts: dict[Request, int] = {}  # how many tokens are read

    def ask(self, request: Request, kind: str) -> None:
        """Read the hidden states of a request's prompt in the steps that follow.

        The request gets a random salt, so that the prefix cache skips none of its tokens.

        kind: what to compute of the hidden states: a key of `READERS` (mean or log-probabilities).
        """
        request.salt = secrets.token_hex(8)
        self._asked[request] = kind, READERS[kind](self.runner, request)
        self._counts[request] = 0

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return `masked` if a step has a request whose prompt is read; None: others run the step.

        works: the step's requests with the tokens that each computes. masked: whether a grammar masks logits.
            `run` gets the result as its `ticket`.
        """
        if not self._counts:
            return None
        return masked if any(work.request in self._counts for work in works) else None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Run a step's forward pass by another executor, and read the hidden states of its prompts.

        works: the step's requests with the tokens that each computes. ticket: what `supports` returned.
            Returns the result of the first other executor that supports the step.
        Tokens that were read before their request was preempted are not read again when they are computed
        again.
        """
        step = run_by_first(self.others, works, ticket, self.runner.eager)
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
        """Return True while `finished` has not returned the result of each prompt given to `ask`."""
        return bool(self._asked)

    def finished(self) -> list[tuple[int, str, list[Any]]]:
        """Return (request index, kind, entries) for each prompt that is read completely, once each.

        entries: what the reader's `notes` returned. Prompts of requests that ended before are dropped.
        """
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
    """Adds results about prompts, such as means, and pictures (JSON) of the engine's state to step reports.

    A step report is the message that the engine's process sends to the API process after a step.

    executor: reads the prompts; None until the first is asked for, and always in engines before phase 05.
    """

    executor: PromptExecutor | None = None

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """Receive a command to the engine; start to read a prompt if it wants a result about one.

        requests: those that the command has added to the engine.
        """
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
        """Add the embeddings of prompts that are computed whole to the report `step`, in place."""
        super().write(step)
        if self.executor is not None:
            step.notes += self.executor.finished()
            self.due = self.executor.reading

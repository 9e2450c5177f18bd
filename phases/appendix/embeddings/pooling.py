"""Means of prompts' hidden states, read off the steps that compute them anyway.

A request that asks is a completion of one token: the scheduler puts its prompt into steps beside all others,
in chunks if it is long, and its blocks are freed like all others'.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Forwarded, Runner
from continuous.work import Work
from paged_cache import PagedRunner
from phases.appendix.observability.observer import StepPictures
from serving.messages import AddPrompt, Command, StepReport

MEAN = "mean"
"""The kind of a note: the mean of a prompt's hidden states, of length 1, as the bytes of float32."""


class PoolingPlan:
    """A `StepExecutor` before all others: it lets them run the step, and adds up the hidden states of
    prompts.

    means: of prompts that are computed whole, on the device.
    """

    order: ClassVar[int] = 0

    def __init__(self, runner: Runner) -> None:
        self.runner, self.others = runner, runner.executors
        self.means: dict[Request, Tensor] = {}
        self._sums: dict[
            Request, tuple[int, Tensor]
        ] = {}  # how many tokens are added up, and their sum

    def ask(self, request: Request) -> None:
        """Note that a request's mean is wanted; it shares no blocks, whose hidden states are not kept."""
        request.salt = secrets.token_hex(8)
        self._sums[request] = 0, torch.zeros((), device=self.runner.model.device)

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return `masked` for a step that computes a part of such a prompt."""
        if not self._sums:
            return None
        self._sums = {
            one: known for one, known in self._sums.items() if one.finish_reason is None
        }
        return masked if any(work.request in self._sums for work in works) else None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Run the first half by the plan that takes it; a request that was preempted goes on where it was."""
        asked = ((plan, plan.supports(works, ticket)) for plan in self.others)
        found = next(((plan, own) for plan, own in asked if own is not None), None)
        step = found[0].run(works, found[1]) if found is not None else self.runner.eager(works)
        after = 0
        for work in step.works:
            at = after
            after = after + work.count
            request = work.request
            if request not in self._sums:
                continue
            count, total = self._sums[request]
            first, end = (
                max(count, work.start),
                min(work.start + work.count, request.prompt_len),
            )
            if first < end:
                some = step.hidden[at + first - work.start : at + end - work.start]
                count, total = end, total + some.float().sum(0)
            self._sums[request] = count, total
            if count == request.prompt_len:
                del self._sums[request]
                self.means[request] = normalize(total, dim=0)
        return step

    def ended(self) -> list[tuple[int, str, list[bytes]]]:
        """Return notes of the means of requests that have ended, whose steps are done."""
        ended = [request for request in self.means if request.finish_reason is not None]
        means = [(request.index, self.means.pop(request).cpu()) for request in ended]
        return [(number, MEAN, [mean.numpy().tobytes()]) for number, mean in means]


class PoolingObserver(StepPictures):
    """Reports the means that were asked for, beside all else. Engines before phase 05 have none."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.plan: PoolingPlan | None = None
        if isinstance(engine, Engine) and isinstance(engine.runner, PagedRunner):
            self.plan = PoolingPlan(engine.runner)
            engine.runner.ask_first(self.plan)

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        super().hear(command, requests)
        if isinstance(command, AddPrompt) and MEAN in command.wanted and self.plan is not None:
            self.plan.ask(requests[0])

    def write(self, step: StepReport, now: float) -> None:
        """See `Observer`."""
        super().write(step, now)
        if self.plan is not None:
            step.notes += self.plan.ended()

"""Means of prompts' hidden states, read off the steps that compute them anyway.

A request that asks is a completion of one token: the scheduler puts its prompt into steps beside all others,
in chunks if it is long, and its blocks are freed like all others'.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from common.request import Request
from common.sampling.sampler import Allowed, pinned_copy
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending, Results, Runner
from continuous.work import Work
from phases.appendix.observability.observer import EngineObserver
from serving.messages import AddPrompt, Command, StepReport

MEAN = "mean"
"""The kind of a note: the mean of a prompt's hidden states, of length 1, as the bytes of float32."""


class PromptMean:
    """One prompt's mean on its way to the host."""

    def __init__(self, request: Request, mean: Tensor) -> None:
        self.request, self._mean = request, pinned_copy(mean) if mean.is_cuda else mean
        self._arrived = torch.cuda.current_stream(mean.device).record_event() if mean.is_cuda else None

    def told(self) -> tuple[int, bytes]:
        """Wait for it; return the number of its completion, and the bytes."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.request.index, self._mean.numpy().tobytes()


class WithMeans(Pending):
    """A step under way that also tells of prompts. means: where it does."""

    def __init__(self, inner: Pending, parts: Sequence[PromptMean], means: list[tuple[int, bytes]]) -> None:
        super().__init__(inner.works, None)
        self.inner, self.parts, self.means = inner, parts, means

    def get(self) -> Results:
        """See `Pending.get`."""
        results = self.inner.get()
        self.means += [part.told() for part in self.parts]
        return results


class PoolingPlan:
    """A `StepPlan` before all others: it lets them run the step, and adds up the hidden states of prompts.

    means: those that no report has told yet.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.others = runner, runner.plans
        self.means: list[tuple[int, bytes]] = []
        self._sums: dict[Request, tuple[int, Tensor]] = {}  # how many tokens are added up, and their sum

    def ask(self, request: Request) -> None:
        """Note that a request's mean is wanted; it shares no blocks, whose hidden states are not kept."""
        request.salt = secrets.token_hex(8)
        self._sums[request] = 0, torch.zeros((), device=self.runner.model.device)

    def takes(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return `masked` for a step that computes a part of such a prompt."""
        if not self._sums:
            return None
        self._sums = {one: known for one, known in self._sums.items() if one.finish_reason is None}
        return masked if any(work.request in self._sums for work in works) else None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Run the first half by the plan that takes it."""
        for plan in self.others:
            if (own := plan.takes(works, ticket)) is not None:
                step = plan.run(works, own)
                break
        else:
            step = self.runner.eager(works)
        return replace(step, rest=partial(self.sample, step))

    def sample(self, step: Forwarded, allowed: Tensor | Allowed | None) -> Pending:
        """Sample, and read means off the hidden states."""
        return WithMeans(self.runner.sample(step, allowed), list(self.read(step)), self.means)

    @torch.inference_mode()
    def read(self, step: Forwarded) -> Iterator[PromptMean]:
        """Add up the hidden states of a step's prompts; a request that was preempted goes on where it was."""
        after = 0
        for work in step.works:
            at, after, request = after, after + work.count, work.request
            if request not in self._sums:
                continue
            count, total = self._sums[request]
            first, end = max(count, work.start), min(work.start + work.count, request.prompt_len)
            if first < end:
                some = step.hidden[at + first - work.start : at + end - work.start]
                count, total = end, total + some.float().sum(0)
            self._sums[request] = count, total
            if count == request.prompt_len:
                del self._sums[request]
                yield PromptMean(request, normalize(total, dim=0))


class PoolingObserver(EngineObserver):
    """Reports the means that were asked for, beside all else. Engines before phase 04 have none."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.plan: PoolingPlan | None = None
        if isinstance(engine, Engine):
            self.plan = PoolingPlan(engine.runner)
            engine.runner.plans = [self.plan, *self.plan.others]

    def hear(self, command: Command, requests: Sequence[Request]) -> None:
        """See `Observer`."""
        super().hear(command, requests)
        if isinstance(command, AddPrompt) and MEAN in command.wanted and self.plan is not None:
            self.plan.ask(requests[0])

    def write(self, step: StepReport, now: float) -> None:
        """See `Observer`."""
        super().write(step, now)
        if self.plan is not None and self.plan.means:
            step.notes += [(number, MEAN, [mean]) for number, mean in self.plan.means]
            self.plan.means.clear()

"""Means of prompts' hidden states, read off the steps that compute them anyway.

A request that asks is a completion of no token: the scheduler puts its prompt into steps beside all others,
in chunks if it is long, and what frees its blocks is what frees everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.nn.functional import normalize

from common.request import Request
from continuous.engine import Engine
from continuous.runner import Forwarded, Runner
from continuous.work import Work
from phases.appendix.api.prompt_logprobs import PromptPart, PromptPlan
from phases.appendix.observability.observer import EngineObserver
from serving.messages import AddPrompt, Command, StepReport

MEAN = "mean"
"""The kind of a note: the mean of a prompt's hidden states, of length 1, as the bytes of float32."""


class PooledPart(PromptPart):
    """One prompt's mean on its way to the host, from where it goes to `means`."""

    def __init__(self, request: Request, mean: Tensor, means: list[tuple[int, bytes]]) -> None:
        super().__init__(request, 0, [mean])
        self.means = means

    def land(self) -> None:
        """See `PromptPart`."""
        (mean,) = self.arrived()
        self.means.append((self.request.index, mean.numpy().tobytes()))


class PoolingPlan(PromptPlan):
    """A `PromptPlan` that also adds up the hidden states of prompts whose mean is asked for.

    means: those that no report has told yet.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.others = [plan for plan in runner.plans if not isinstance(plan, PromptPlan)]
        self.means: list[tuple[int, bytes]] = []
        self._sums: dict[Request, Tensor | None] = {}

    def ask(self, request: Request) -> None:
        """Note that a request's mean is wanted."""
        self._sums[request] = None

    def takes(self, works: Sequence[Work], masked: bool) -> bool | None:
        """See `PromptPlan`. A request that was preempted begins again."""
        if not self._sums:
            return super().takes(works, masked)
        fresh = set(self.runner.rows.fresh.values())
        ticket = super().takes(works, masked)
        running = {one: total for one, total in self._sums.items() if one.finish_reason is None}
        self._sums = {one: None if one in fresh else total for one, total in running.items()}
        self.open -= self._sums.keys()
        return masked if any(work.request in self._sums for work in works) else ticket

    def read(self, step: Forwarded) -> Iterator[PromptPart]:
        """See `PromptPlan`."""
        yield from super().read(step)
        after = 0
        for work in step.works:
            at, after, request = after, after + work.count, work.request
            if request not in self._sums:
                continue
            end = min(work.start + work.count, request.prompt_len)
            known, total = self._sums[request], step.hidden[at : at + end - work.start].float().sum(0)
            total = total if known is None else known + total
            if end < request.prompt_len:
                self._sums[request] = total
            else:
                del self._sums[request]
                yield PooledPart(request, normalize(total, dim=0), self.means)


class PoolingObserver(EngineObserver):
    """Reports the means that were asked for, beside all else. Engines before phase 04 have none."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.plan: PoolingPlan | None = None
        if isinstance(engine, Engine):
            self.plan = PoolingPlan(engine.runner)
            engine.runner.plans, engine.reads_prompts = [self.plan, *self.plan.others], True

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

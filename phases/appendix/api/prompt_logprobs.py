"""Log-probabilities of a prompt's tokens, for the requests that ask for them.

A step needs the logits of a prompt's last token only, and computes no others. A request that asks has those
of its whole prompt computed from the same hidden states, as many rows at a time as a step may sample. A step
without such a request pays for looking into an empty set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from common.events import PromptLogprob
from common.request import Request
from common.sampling import ops
from common.sampling.sampler import Allowed, Needs, Plan, pinned_copy
from continuous.engine import Engine
from continuous.runner import Forwarded, Pending, Results, Runner, StepPlan
from continuous.work import Work
from paged_cache import Feature, Parts

PLAIN = Plan(Needs(0), (), None)
"""Sampling that changes no logits."""


class PromptPart:
    """Some tokens of one prompt, from `first` on, on their way to the host.

    found: chosen, ranks `[C]`, ids, values `[C, top]`.
    """

    def __init__(self, request: Request, first: int, found: Sequence[Tensor]) -> None:
        self.request, self.first = request, first
        self._arrived: torch.Event | None = None
        if found[0].is_cuda:
            self._found = [pinned_copy(tensor) for tensor in found]
            self._arrived = torch.cuda.current_stream(found[0].device).record_event()
        else:
            self._found = list(found)

    def arrived(self) -> Sequence[Tensor]:
        """Wait for the copies, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._found

    def land(self) -> None:
        """Wait for the copies and write them down."""
        kept = self.request.prompt_logprobs
        assert kept is not None
        chosen, ranks, ids, values = (tensor.tolist() for tensor in self.arrived())
        for place, pairs in enumerate(zip(ids, values, strict=True)):
            top = tuple(zip(*pairs, strict=True))
            kept[self.first + place] = PromptLogprob(chosen[place], ranks[place], top)


class WithPrompts(Pending):
    """A step under way that also tells of prompts."""

    def __init__(self, inner: Pending, parts: Sequence[PromptPart]) -> None:
        super().__init__(inner.works, None)
        self.inner, self.parts = inner, parts

    def get(self) -> Results:
        """See `Pending.get`."""
        results = self.inner.get()
        for part in self.parts:
            part.land()
        return results


class PromptPlan:
    """A `StepPlan` before all others: it lets them run the step, and reads prompts between its halves.

    open: the requests that ask and have a row, and whose prompts are not read to the end.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.others = runner, runner.plans
        self.open: set[Request] = set()

    def takes(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return `masked` for a step that computes a part of such a prompt.

        Of several samples the one that computes the prompt will be told of it.
        """
        for request in self.runner.rows.fresh.values():
            if request.params.prompt_logprobs is not None:
                if request.prompt_logprobs is None:
                    request.prompt_logprobs = [None] * request.prompt_len
                if request.prompt_len > 1 and request.prompt_logprobs[-1] is None:
                    self.open.add(request)
        if not self.open:
            return None
        self.open = {request for request in self.open if request.finish_reason is None}
        return masked if any(work.request in self.open for work in works) else None

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
        """Sample, and read prompts off the hidden states."""
        return WithPrompts(self.runner.sample(step, allowed), list(self.read(step)))

    @torch.inference_mode()
    def read(self, step: Forwarded) -> Iterator[PromptPart]:
        """Begin to compute what a step's hidden states tell of prompts."""
        after, most = 0, self.runner.rows.count
        for work in step.works:
            at, after = after, after + work.count
            request = work.request
            if request not in self.open:
                continue
            end = min(work.start + work.count, request.prompt_len - 1)  # what follows that is no prompt
            for first in range(work.start, end, most):
                last = min(first + most, end)
                place = at + first - work.start
                yield self._part(request, first + 1, step.hidden[place : place + last - first])
            if end == request.prompt_len - 1:
                self.open.discard(request)

    def _part(self, request: Request, first: int, hidden: Tensor) -> PromptPart:
        """Return what is known of the tokens from `first` on, by `hidden [C, hidden]` before each."""
        sampler = self.runner.sampler
        logits = self.runner.model.logits(hidden)
        logits = sampler.chooser.whole(sampler, logits, PLAIN, masked=True)  # [C, V], over ranks gathered
        ids = torch.tensor(request.tokens[first : first + len(logits)], device=logits.device)  # [C]
        chosen, top_ids, top = ops.raw_logprobs(logits, ids, request.params.prompt_logprobs or 0)
        ranks = 1 + (logits > logits.gather(1, ids.unsqueeze(1))).sum(1)
        none = logits.new_empty(len(logits), 0)
        found = (chosen, ranks, none if top_ids is None else top_ids, none if top is None else top)
        return PromptPart(request, first, found)


def read_prompts(engine: Engine) -> None:
    """Let an engine's requests ask for the log-probabilities of their prompts."""
    plan: StepPlan = PromptPlan(engine.runner)
    engine.runner.plans = [plan, *engine.runner.plans]
    engine.reads_prompts = True


@dataclass(frozen=True)
class PromptLogprobs(Feature):
    """Requests may ask for the log-probabilities of their prompts."""

    name: ClassVar[str] = "prompt_logprobs"
    phase: ClassVar[int] = 13

    def install(self, parts: Parts) -> None:
        """Add a plan to the runner."""
        parts.stages["connect"].append(lambda whole: read_prompts(whole.engine))

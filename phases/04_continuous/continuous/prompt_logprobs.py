"""Log-probabilities of a prompt's tokens, for the requests that ask for them.

A step needs the logits of a prompt's last token only, and computes no others. A request that asks has those
of its whole prompt computed from the same hidden states, as many rows at a time as a step may sample. A step
without such a request pays for looking into an empty set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.events import PromptLogprob
from common.request import Request
from common.sampling import ops
from common.sampling.sampler import pinned_copy
from continuous.work import Work

Logits = Callable[[Tensor], Tensor]


class PromptPart:
    """Some tokens of one prompt, from `first` on, on their way to the host.

    chosen, ranks `[C]`, ids, values `[C, top]`.
    """

    def __init__(self, request: Request, first: int, found: Sequence[Tensor]) -> None:
        self.request, self.first = request, first
        self._arrived: torch.Event | None = None
        if found[0].is_cuda:
            self._found = [pinned_copy(tensor) for tensor in found]
            self._arrived = torch.cuda.current_stream(found[0].device).record_event()
        else:
            self._found = list(found)

    def land(self) -> None:
        """Wait for the copies and write them down."""
        if self._arrived is not None:
            self._arrived.synchronize()
        kept = self.request.prompt_logprobs
        assert kept is not None
        chosen, ranks, ids, values = (tensor.tolist() for tensor in self._found)
        for place, pairs in enumerate(zip(ids, values, strict=True)):
            top = tuple(zip(*pairs, strict=True))
            kept[self.first + place] = PromptLogprob(chosen[place], ranks[place], top)


class PromptReader:
    """Knows which requests ask, and reads their prompts off the steps that compute them."""

    def __init__(self) -> None:
        self._open: set[Request] = set()

    def watch(self, request: Request) -> None:
        """A request gets a row. Of several samples the one that computes the prompt will be told of it."""
        if request.params.prompt_logprobs is None:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * request.prompt_len
        if request.prompt_len > 1 and request.prompt_logprobs[-1] is None:
            self._open.add(request)

    def read(self, works: Sequence[Work], hidden: Tensor, logits: Logits, most: int) -> list[PromptPart]:
        """Begin to compute what a step's `hidden [T, hidden]` tells; `most` rows of logits at a time."""
        if not self._open:
            return []
        self._open = {request for request in self._open if request.finish_reason is None}
        return list(self._parts(works, hidden, logits, most))

    @torch.inference_mode()
    def _parts(
        self, works: Sequence[Work], hidden: Tensor, logits: Logits, most: int
    ) -> Iterator[PromptPart]:
        after = 0
        for work in works:
            at, after = after, after + work.count
            request = work.request
            if request not in self._open:
                continue
            end = min(work.start + work.count, request.prompt_len - 1)  # what follows that is no prompt
            for first in range(work.start, end, most):
                last = min(first + most, end)
                place = at + first - work.start
                yield self._part(request, first + 1, logits(hidden[place : place + last - first]))
            if end == request.prompt_len - 1:
                self._open.discard(request)

    def _part(self, request: Request, first: int, logits: Tensor) -> PromptPart:
        """Of the tokens from `first` on, by `logits [C, V]`."""
        ids = torch.tensor(request.tokens[first : first + len(logits)], device=logits.device)  # [C]
        chosen, top_ids, top = ops.raw_logprobs(logits, ids, request.params.prompt_logprobs or 0)
        ranks = 1 + (logits > logits.gather(1, ids.unsqueeze(1))).sum(1)
        none = logits.new_empty(len(logits), 0)
        found = (chosen, ranks, none if top_ids is None else top_ids, none if top is None else top)
        return PromptPart(request, first, found)

"""A runner whose masked decode steps are two graphs, for phase 12."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.sampling.sampler import Allowed, Feature, Sampled
from continuous.batch import Ints
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, captured
from cuda_graphs.masked_graph import LogitsGraph, MaskedGraph, MaskInputs
from cuda_graphs.runner import GraphRunner
from paged_cache.runner import PagedRunner


@dataclass(kw_only=True)
class Half(Forwarded):
    """A step, of the requests in `rows`, whose second half has a graph, too."""

    rest: MaskedGraph
    rows: Ints


class MaskedRunner(GraphRunner):
    """A `GraphRunner` with a second graph for the sampling of a decode step.

    While the masks of a step are being made, the host has time: it then sends what the next step reads.
    """

    _staged: tuple[Sequence[Work], Ints] | None = None

    def _count_more(self) -> int:
        return len(self._sizes) * (1 + len(CAPTURED))

    def _capture_more(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        masks = MaskInputs(self._sizes[-1], self.model)
        self.masked_graphs: dict[tuple[int, Feature], MaskedGraph] = {}
        for size in reversed(self._sizes):
            part(f"{size} requests, logits")
            first = LogitsGraph(self.decode_graphs[size, None], masks, capturer)
            for kind in CAPTURED:
                part(f"{size} requests, masked")
                self.masked_graphs[size, kind] = MaskedGraph(first, kind, capturer)

    @torch.inference_mode()
    def stage(self, works: Sequence[Work]) -> None:
        """Send what the next step reads, before the second half of this one.

        Not if anybody is new: the row may have had an owner whose last token is yet to be written.
        """
        single = all(work.count == 1 and len(work.takers) == 1 for work in works)
        size = smallest(self._sizes, len(works)) if single else None
        if size is not None and isinstance(self.last, Half) and not self.rows.fresh:
            self._staged = works, self._stage(works, size)

    def _decode(self, works: Sequence[Work], size: int, masked: bool) -> Forwarded:
        staged, self._staged = self._staged, None
        if not masked:
            return super()._decode(works, size, masked)
        if staged is not None and staged[0] is works:
            rows = staged[1]
        else:
            self.refresh(works)
            rows = self._stage(works, size)
        plan = self.sampler.plan(rows.tolist())
        graph = self.decode_graphs[size, None]
        self.replays += 1
        graph.replay()
        rest = self.masked_graphs.get((size, plan.features)) if captured(plan) else None
        if rest is None:
            return Forwarded(works, graph.sampled(rows), graph.hidden)
        rest.first.replay()
        return Half(works, graph.batch, graph.hidden, rest=rest, rows=rows)

    def sample(self, step: Forwarded, allowed: Tensor | Allowed | None = None) -> Pending:
        """See `continuous.Runner.sample`."""
        if isinstance(step, Half):
            if not isinstance(allowed, Tensor):
                step.rest.run(allowed)
                return Pending(step.works, Sampled(step.rest.for_host[: len(step.works)]), self.agree)
            first = step.rest.first
            step.batch = first.half.sampled(step.rows, first.inputs)
        return super().sample(step, allowed)


def remade(runner: Callable[..., PagedRunner], kind: type[GraphRunner]) -> Callable[..., PagedRunner]:
    """What makes a graph runner, so that it makes one of another kind."""
    assert isinstance(runner, partial), "graphs bring their options"
    given: dict[str, Any] = runner.keywords
    return partial(kind, *runner.args, **given)

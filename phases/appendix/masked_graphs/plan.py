"""Masked decode steps as two graphs: one before the masks are known, one behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.sampling.sampler import Allowed, Needs, Sampled
from continuous.batch import Ints
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, captured, logits_dtype
from cuda_graphs.plans import DecodePlan, decodes
from cuda_graphs.runner import GraphRunner
from forward.model import Model
from phases.appendix.masked_graphs.graph import LogitsGraph, MaskedGraph, MaskInputs


@dataclass(frozen=True)
class Half:
    """The second half of a step, of the requests in `rows`, that has a graph; see `Forwarded.rest`."""

    runner: GraphRunner
    works: Sequence[Work]
    rows: Ints
    graph: MaskedGraph
    hidden: Tensor

    def __call__(self, allowed: Tensor | Allowed | None) -> Pending:
        """Sample under these masks."""
        if not isinstance(allowed, Tensor):
            self.graph.run(allowed)
            return Pending(self.works, Sampled(self.graph.for_host[: len(self.works)]), self.runner.extra)
        first = self.graph.first
        batch = first.half.sampled(self.rows, first.inputs)
        return self.runner.sample(Forwarded(self.works, batch, self.hidden), allowed)


class MaskedPlan:
    """Decode steps whose samples are masked: phase 09's graph to the hidden states, then two more.

    While the masks of a step are being made, the host has time: it then sends what the next step reads.

    graphs: by size and kind of sampling.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self.runner, self.decodes = runner, runner.plan(DecodePlan)
        self.graphs: dict[tuple[int, Needs], MaskedGraph] = {}
        self.count = len(self.decodes.sizes) * (1 + len(CAPTURED))
        self._staged: tuple[Sequence[Work], Ints] | None = None

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """See `GraphPlan`."""
        masks = MaskInputs(self.decodes.sizes[-1], self.runner.model)
        for size in reversed(self.decodes.sizes):
            part(f"{size} requests, logits")
            first = LogitsGraph(self.decodes.graphs[size, None], masks, capturer)
            for kind in CAPTURED:
                part(f"{size} requests, masked")
                self.graphs[size, kind] = MaskedGraph(first, kind, capturer)

    @torch.inference_mode()
    def stage(self, works: Sequence[Work]) -> None:
        """Send what the next step reads, before the second half of this one.

        Not if a request is new: the row may have had an owner whose last token is yet to be written.
        """
        size = smallest(self.decodes.sizes, len(works)) if decodes(works) else None
        last = self.runner.last
        half_done = last is not None and isinstance(last.rest, Half)
        if size is not None and half_done and not self.runner.rows.fresh:
            self._staged = works, self.decodes.stage(works, size)

    def takes(self, works: Sequence[Work], masked: bool) -> int | None:
        """The size of the graphs."""
        if not masked:
            return None
        return smallest(self.decodes.sizes, len(works)) if decodes(works) else None

    def run(self, works: Sequence[Work], ticket: int) -> Forwarded:
        """The first half of a step."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] is works:
            rows = staged[1]
        else:
            self.runner.refresh(works)
            rows = self.decodes.stage(works, ticket)
        plan = self.runner.sampler.plan(rows.tolist())
        graph = self.decodes.graphs[ticket, None]
        self.runner.replays += 1
        graph.replay()
        rest = self.graphs.get((ticket, plan.features)) if captured(plan) else None
        if rest is None:
            return Forwarded(works, graph.sampled(rows), graph.hidden)
        rest.first.replay()
        half = Half(self.runner, works, rows, rest, graph.hidden)
        return Forwarded(works, graph.batch, graph.hidden, rest=half)


PER_HALF = 1 << 20
"""Bytes of a graph of a few nodes."""


def masked_bytes(model: Model, rows: int) -> int:
    """Estimate from above what second halves of up to `rows` requests take, with their inputs."""
    vocab_size = model.config.vocab_size
    row = 4 * -(-vocab_size // 32) + vocab_size * logits_dtype(model).itemsize + 8 + 3 * 8
    return rows * row + len(decode_sizes(rows)) * (1 + len(CAPTURED)) * PER_HALF

"""Several decode steps in one graph: what a draft model does while nobody looks at its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from common.sampling.sampler import Feature, HostSampled, Sampled
from continuous.work import Work
from cuda_graphs.buckets import smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, DecodeGraph, Machine, captured
from cuda_graphs.plans import FEW, DecodePlan, decode_inputs, stage_decodes
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import Staging

Feed = Callable[[Tensor], None]
"""Takes the hidden states of a step, for a model that reads them in the next one."""


class ChainGraph(DecodeGraph):
    """`count` steps of `size` requests, each on the tokens of the one before.

    feed: given the hidden states of each step, for a model that reads them beside the tokens.

    chained: `[size, count]` int64; good until the next replay.
    """

    chained: Tensor

    def __init__(
        self,
        machine: Machine,
        size: int,
        count: int,
        inputs: Tensor,
        features: Feature,
        capturer: Capturer,
        feed: Feed | None = None,
    ) -> None:
        self.count, self.feed = count, feed
        super().__init__(machine, size, inputs, features, capturer)

    def compute(self) -> None:
        """The steps; what is captured."""
        tokens = []
        for _ in range(self.count):
            super().compute()
            tokens.append(self.tokens)
            if self.feed is not None:
                self.feed(self.hidden)
            self.at.copy_(torch.where(self.at < 0, self.at, self.at + 1))  # padding stays padding
            self.steps.add_(1)
        self.chained = torch.stack(tokens, dim=1)


class Chains:
    """Chain graphs of up to `most` steps, beside the graphs of a runner.

    graphs: by requests, steps and kind of sampling.
    """

    def __init__(self, runner: GraphRunner, most: int, feed: Feed | None = None) -> None:
        self.runner, self.most = runner, most
        self._sizes = [size for size in runner.plan(DecodePlan).sizes if size <= FEW]
        self._staging = Staging(3 * self._sizes[-1], runner.model.device)
        self.graphs: dict[tuple[int, int, Feature], ChainGraph] = {}
        with torch.inference_mode():
            for size, steps, kind in product(reversed(self._sizes), range(most, 0, -1), CAPTURED):
                given = decode_inputs(self._staging, size)
                self.graphs[size, steps, kind] = ChainGraph(
                    runner.machine, size, steps, given, kind, runner.capturer, feed
                )

    @torch.inference_mode()
    def run(self, works: Sequence[Work], steps: int) -> HostSampled | None:
        """Several decode steps at once, of requests that have room for all of them.

        Returns `[len(works) * steps]` tokens, request by request, or None where there is no such graph.
        """
        size = smallest(self._sizes, len(works))
        if size is None or steps > self.most:
            return None
        self.runner.refresh(works)
        plan = self.runner.sampler.plan([work.row for work in works])
        if not captured(plan):
            return None
        graph = self.graphs[size, steps, plan.features]
        self.runner.replays += 1
        stage_decodes(self.runner, self._staging, works, size, steps)
        graph.replay()
        return Sampled(graph.chained[: len(works)].flatten()).to_host()

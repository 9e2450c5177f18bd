"""A step that verifies drafts as a graph, down to the tokens sampled at every position.

Some tokens each of a small batch are a small mixed step. What differs from `ChunkGraph`: every position is
sampled, and inside the graph, since the host is waiting for the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import ClassVar

import numpy as np
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from continuous.batch import HostBatch, Ints
from continuous.runner import Forwarded
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.chunk_graph import ChunkGraph, Layout, most_tiles
from cuda_graphs.decode_graph import CAPTURED, GraphContext, captured, narrow_logits
from cuda_graphs.executors import replay_chunk
from cuda_graphs.memory import PER_GRAPH
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import Staging
from cuda_graphs.step_kernels import scatter_tokens
from forward.model import Model
from paged_cache.memory import activation_bytes


class VerifyGraph(ChunkGraph):
    """A CUDA graph of a step with several tokens per request, which samples at all of its tokens.

    features: how it samples, greedily or with a temperature.

    for_host: `[tokens]` int64, the sampled tokens in the order of the samples; `NAN_TOKEN` where logits
        were NaN. Valid until the next replay.
    """

    for_host: Tensor

    def __init__(
        self,
        machine: GraphContext,
        layout: Layout,
        inputs: Tensor,
        features: SamplingFlags,
        capturer: Capturer,
    ) -> None:
        self.plan = SamplingMetadata(features, (), None).for_any_rows()
        super().__init__(machine, layout, inputs, capturer)

    def compute(self) -> None:
        """Run the step from the fixed inputs, and store its results; `Capturer` captures this method."""
        super().compute()
        on, given = self.machine, self.inputs
        hidden = self.hidden[given["sample_at"]]  # [tokens, hidden]
        logits = narrow_logits(on.model, hidden)
        rows, steps = given["sample_rows"], given["sample_steps"]
        sampled = on.sampler.sample(logits, rows, steps, self.plan)
        self.for_host = sampled.for_host
        # A padded sample's position is 0, so that it would be written behind position -1: nowhere.
        scatter_tokens(rows, given["sample_positions"] - 1, sampled.tokens, on.rows.tokens)


def drafts_of(works: Sequence[Work], host: HostBatch) -> Ints:
    """Return for each token of a step its id if it is a draft, else -1: `[T]` int64.

    works: for each request of the step, its tokens, of which drafts are the last. host: the batch's layout.
    """
    drafts: Ints = np.full(len(host.positions), -1)
    for work, end in zip(works, host.query_starts[1:].tolist(), strict=True):
        if work.drafts:
            drafts[end - len(work.drafts) : end] = work.drafts
    return drafts


class VerifyGraphExecutor:
    """Runs steps of several tokens per request, each by the smallest `VerifyGraph` that holds it.

    most_rows: requests in the largest decode graph; most_drafts: drafts of a request in the largest graph.

    graphs: by numbers of tokens and requests, and kind of sampling.
    """

    order: ClassVar[int] = 30

    def __init__(self, runner: GraphRunner, *, most_rows: int, most_drafts: int) -> None:
        self.runner = runner
        self._sizes = verify_sizes(
            decode_sizes(min(most_rows, runner.rows.count))[-1], most_drafts
        )
        self._requests = list(self._sizes)
        self._layouts: dict[tuple[int, int], Layout] = {}
        for requests, counts in self._sizes.items():
            for tokens in counts:
                tiles = most_tiles(runner.attention, tokens, requests)
                self._layouts[tokens, requests] = Layout(tokens, requests, tiles, tokens)
        self.graphs: dict[tuple[int, int, SamplingFlags], VerifyGraph] = {}
        self.count = len(self._layouts) * len(CAPTURED)
        self._staging = Staging(
            max(layout.size for layout in self._layouts.values()), runner.model.device
        )

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture all graphs that verify drafts by `capturer`, largest first.

        part: a progress callback, called with each graph's name before its capture.
        """
        for ((tokens, requests), layout), kind in product(
            sorted(self._layouts.items(), reverse=True), CAPTURED
        ):
            part(f"{tokens} tokens of {requests} requests, all sampled")
            given = self._staging.device[: layout.size]
            graph = VerifyGraph(self.runner.machine, layout, given, kind, capturer)
            self.graphs[tokens, requests, kind] = graph

    def supports(self, works: Sequence[Work], masked: bool) -> VerifyGraph | None:
        """Return the smallest graph that holds a step and samples as its requests want, or None.

        works: for each request of the step, its tokens and drafts. masked: True if grammars restrict its
            samples (None is returned then).
        """
        requests = None if masked else smallest(self._requests, len(works))
        if requests is None:
            return None
        tokens = smallest(self._sizes[requests], sum(work.count for work in works))
        if tokens is None or any(len(work.sampled_requests) > 1 for work in works):
            return None
        self.runner.refresh(
            ()
        )  # or the plan would not know the newest settings; drafts go with the rest
        plan = self.runner.sampler.plan([work.row for work in works])
        return self.graphs[tokens, requests, plan.features] if captured(plan) else None

    def run(self, works: Sequence[Work], ticket: VerifyGraph) -> Forwarded:
        """Run a step's forward pass and its sampling by a graph; return its hidden states and sampled tokens.

        works: for each request of the step, its tokens and drafts. ticket: the graph that `supports`
            returned.
        """
        works, host = replay_chunk(self.runner, self._staging, works, ticket, drafts_of)
        tokens = ticket.for_host[: len(host.sample_at)]
        return self.runner.replayed(works, ticket.batch, ticket.hidden, tokens)


def verify_sizes(most_rows: int, most_drafts: int) -> dict[int, list[int]]:
    """Return the token counts for which graphs are captured, by the number of requests they hold.

    The numbers of requests are powers of two up to `most_rows`, at most 256. Each has counts of 2, 4, 8 and
    16 tokens per request, as far as these are at most `most_drafts`, and of `most_drafts + 1`.

    most_rows: the most requests. most_drafts: drafts of a request. Counts above 512 (`MOST_VERIFIED`) are
        left out: such a step takes so long that sampling outside a graph costs little.
    """
    lengths = [length for length in (2, 4, 8, 16) if length <= most_drafts] + [most_drafts + 1]
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most_rows]
    found = {
        size: [size * length for length in lengths if size * length <= MOST_VERIFIED]
        for size in rows
    }
    return {size: tokens for size, tokens in found.items() if tokens}


MOST_VERIFIED = 512


def verify_bytes(model: Model, rows: int, drafts: int) -> int:
    """Return an upper estimate of the device memory, in bytes, of all graphs that verify drafts.

    rows: most requests of a step. drafts: most drafts of a request.
    """
    count = sum(len(tokens) for tokens in verify_sizes(rows, drafts).values()) * len(CAPTURED)
    return activation_bytes(model, MOST_VERIFIED, MOST_VERIFIED) + count * PER_GRAPH

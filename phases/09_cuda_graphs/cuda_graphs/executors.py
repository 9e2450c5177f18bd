"""Which steps are replayed: decodes down to the sampled tokens, other small steps to their hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from operator import attrgetter
from typing import ClassVar

import numpy as np

from common.sampling.metadata import SamplingFlags
from continuous.batch import HostBatch, Ints
from continuous.runner import Forwarded
from continuous.work import Work
from cuda_graphs.buckets import chunk_sizes, decode_sizes, fills, full_step, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.chunk_graph import ChunkGraph, Layout, most_tiles
from cuda_graphs.decode_graph import KINDS, DecodeGraph, captured
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import Staging
from triton_paged_attention.tables import LONG

SMALL_BATCH = 16
"""Requests for which each size of chunk has a second graph. For a small batch the decode kernel splits
contexts over programs, and the number of splits is fixed at capture."""
_by_row = attrgetter("row")
_PADDING = np.array([[0], [-1], [0]])  # row 0, no position, no step


class DecodeGraphExecutor:
    """Runs decode steps (one token per request), each by the smallest decode graph that holds its requests.

    runner: the engine's runner of steps. most_rows: requests in the largest graph.
    graphs: by number of requests and kind of sampling (None: the graph does not sample).
    """

    order: ClassVar[int] = 20

    def __init__(self, runner: GraphRunner, *, most_rows: int) -> None:
        self.runner = runner
        self.sizes = decode_sizes(min(most_rows, runner.rows.count))
        self.graphs: dict[tuple[int, SamplingFlags | None], DecodeGraph] = {}
        self.count = len(self.sizes) * len(KINDS)
        self._staging = Staging(3 * self.sizes[-1], runner.model.device)

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture all decode graphs by `capturer`, largest first.

        part: a progress callback, called with each graph's name before its capture.
        """
        for size, features in product(reversed(self.sizes), KINDS):
            part(f"{size} requests")
            given = self._staging.device[: 3 * size].view(3, size)
            self.graphs[size, features] = DecodeGraph(
                self.runner.machine, size, given, features, capturer
            )

    def supports(self, works: Sequence[Work], masked: bool) -> tuple[int, bool] | None:
        """Return the `ticket` for `run`; None if a request is no decode or no graph is large enough.

        works: for each request of the step, the tokens to compute. masked: True if grammars restrict its
            samples.

        Returns:
            The number of requests of the smallest graph that holds the step, and `masked`.
        """
        size = smallest(self.sizes, len(works)) if decodes(works) else None
        return None if size is None else (size, masked)

    def run(self, works: Sequence[Work], ticket: tuple[int, bool]) -> Forwarded:
        """Run a decode step's forward pass by a graph; return a `Forwarded`, a step for the caller to sample.

        If no sample needs more than a temperature (so no mask, top-k or log-probabilities), the graph samples
        too, and the `Forwarded` only returns its tokens.

        works: for each request of the step, the tokens to compute. ticket: the graph's size in requests,
            and whether grammars restrict the step's samples (masks are made later, so the caller samples).
        """
        size, masked = ticket
        self.runner.replays += 1
        self.runner.refresh(works)
        count, rows = len(works), self.stage(works, size)
        plan = self.runner.sampler.plan(rows.tolist())
        inside = captured(plan) and not masked
        graph = self.graphs[size, plan.features if inside else None]
        graph.replay()
        if inside:
            return self.runner.replayed(
                works, graph.batch, graph.hidden, graph.for_host[:count]
            )
        return Forwarded(works, graph.sampled(rows), graph.hidden)

    def stage(self, works: Sequence[Work], size: int) -> Ints:
        """Send a decode graph its inputs: the requests' rows, positions and block tables.

        works: for each request of the step, its token to compute. size: requests of the graph; the rest is
            padded.

        Returns:
            `[len(works)]` int64 on the host, the row of each request in the token table.
        """
        runner = self.runner
        count = len(works)
        starts = [work.start for work in works]
        rows: Ints = np.array([work.row for work in works], np.int64)
        runner.tables.update(rows, max(starts) // runner.cache.block_size + 1)
        with self._staging.fill(3 * size) as flat:
            inputs = flat.reshape(3, size)
            inputs[:, count:] = _PADDING
            inputs[0, :count], inputs[1, :count] = rows, starts
            inputs[2, :count] = inputs[1, :count] + 1 - runner.rows.prompt_lens[rows]
        return rows


def decodes(works: Sequence[Work]) -> bool:
    """Return True if each request of a step computes one token, from which its next one is sampled.

    works: for each request, its tokens in the step.
    """
    return all(work.count == 1 and len(work.sampled_requests) == 1 for work in works)


class ChunkGraphExecutor:
    """Runs steps with several tokens per request, each by the smallest `ChunkGraph` that holds its tokens.

    most_tokens: tokens of the largest graph for steps that are not full; 0: there are no graphs.
    step_tokens: most tokens that the scheduler puts into a step. Such full steps may have one more graph.
    """

    order: ClassVar[int] = 40

    def __init__(self, runner: GraphRunner, *, most_tokens: int, step_tokens: int) -> None:
        self.runner, count = runner, runner.rows.count
        self._full = full_step(runner.model, step_tokens, most_tokens)
        self._sizes = chunk_sizes(most_tokens) if most_tokens else []
        self._sizes += [self._full] * bool(self._full)
        self._requests = sorted({min(SMALL_BATCH, count), count})
        self._layouts = {
            (tokens, requests): Layout(
                tokens, requests, most_tiles(runner.attention, tokens, requests)
            )
            for tokens in self._sizes
            for requests in self._requests
        }
        self._graphs: dict[tuple[int, int], ChunkGraph] = {}
        self.count = len(self._layouts)
        largest = max((layout.size for layout in self._layouts.values()), default=0)
        self._staging = Staging(largest, runner.model.device)

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture the CUDA graphs of all sizes by `capturer`, largest first.

        part: a progress callback, called with each graph's name before its capture.
        """
        for (tokens, requests), layout in reversed(self._layouts.items()):
            part(f"{tokens} tokens of {requests} requests")
            given = self._staging.device[: layout.size]
            self._graphs[tokens, requests] = ChunkGraph(
                self.runner.machine, layout, given, capturer
            )

    def supports(self, works: Sequence[Work], masked: bool) -> ChunkGraph | None:
        """Return the smallest graph that holds a step, or None if there is none.

        The graph for full steps (of as many tokens as the scheduler puts into a step) is returned only if the
        step has 0.9 of its tokens, and no prompt that reaches 8,192 tokens (`LONG`).

        works: for each request of the step, the tokens to compute. masked: not read.
        """
        count = sum(work.count for work in works)
        samples = sum(max(1, len(work.sampled_requests)) + len(work.drafts) for work in works)
        tokens, requests = smallest(self._sizes, count), smallest(self._requests, samples)
        if (
            tokens is None
            or requests is None
            or (tokens == self._full and not fills(tokens, works, LONG))
        ):
            return None
        return self._graphs[tokens, requests]

    def run(self, works: Sequence[Work], ticket: ChunkGraph) -> Forwarded:
        """Run a step's forward pass by a graph, and return its hidden states and batch; the caller samples.

        works: for each request of the step, the tokens to compute. ticket: the graph that `supports`
            returned.
        """
        self.runner.refresh(works)
        works, host = replay_chunk(self.runner, self._staging, works, ticket)
        return Forwarded(works, ticket.sampled(host), ticket.hidden)


DraftsOf = Callable[[Sequence[Work], HostBatch], Ints]


def replay_chunk(
    runner: GraphRunner,
    staging: Staging,
    works: Sequence[Work],
    graph: ChunkGraph,
    drafts_of: DraftsOf | None = None,
) -> tuple[Sequence[Work], HostBatch]:
    """Send a step's inputs to the device and replay `graph`, which holds the step.

    runner: sends changed block tables, and counts the replay. staging: copies the other inputs.
    works: for each request of the step, the tokens to compute.
    drafts_of: returns `[T]` for the sorted works and their layout: the draft's id for each token that is a
        draft, else -1; None: the graph has no input of drafts.

    Returns:
        The works in the order of the batch (by row), and the batch's layout on the host.
    """
    runner.replays += 1
    works = sorted(works, key=_by_row)
    host = HostBatch.of(works, runner.rows.prompt_lens)
    runner.tables.update(host.rows, runner.cache.blocks_for(int(host.context_lens.max())))
    drafts = None if drafts_of is None else drafts_of(works, host)
    layout = graph.layout
    with staging.fill(layout.size) as flat:
        sorted_ = runner.attention.sort(host, layout.sizes["positions"])
        layout.fill(flat, host, *sorted_, drafts)
    graph.replay()
    return works, host

"""The runner that replays graphs where it can and runs the step eagerly where it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.progress import bar
from common.sampling.sampler import Allowed, Feature, HostSampled, Plan, Sampled
from continuous.batch import HostBatch, Ints
from continuous.rows import Rows
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import chunk_sizes, decode_sizes, fills, full_step, smallest, verify_sizes
from cuda_graphs.capture import Capturer
from cuda_graphs.chain_graph import ChainGraph
from cuda_graphs.chunk_graph import ChunkGraph, Layout
from cuda_graphs.decode_graph import CAPTURED, KINDS, DecodeGraph, Machine, captured, narrow_logits
from cuda_graphs.memory import Startup, free_bytes
from cuda_graphs.staging import Staging
from cuda_graphs.tables import DeviceTables
from cuda_graphs.verify_graph import VerifyGraph, drafts_of
from forward.model import Model
from paged_cache.cache import PagedCache
from paged_cache.runner import PagedRunner
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.tuning.tables import LONG

FEW = 16
"""Requests for which each size of chunk has a second graph. With few requests the decode kernel splits
contexts over programs, and how often is fixed at capture."""
_by_row = attrgetter("row")
_PADDING = np.array([[0], [-1], [0]])  # row 0, no position, no step


@dataclass
class Replayed(Forwarded):
    """A step whose graph goes on to the sampled tokens."""

    sampled: Sampled | None = None


class GraphRunner(PagedRunner):
    """Replays steps of one token a request from `DecodeGraph`s, those that verify drafts from `VerifyGraph`s,
    and other small steps from `ChunkGraph`s.

    Args:
        model, attention, rows, cache, options: see `paged_cache.PagedRunner`.
        most_rows: requests in the largest decode graph.
        most_tokens: tokens in the largest chunk graph; 0: none.
        step_tokens: says how many tokens a step has at most: such steps may have a graph, see `full_step`.
        most_drafts: drafts of a request in the largest verify graph; 0: none.
        most_chained: decode steps in the longest chain; 0: there are no chains.

    startup: what capturing took.
    let_go: destroys the graphs, after the last step.
    replays: steps that were replayed.
    decode_graphs: by size and kind of sampling.
    """

    attention: TritonPagedAttention

    def __init__(
        self,
        model: Model,
        attention: TritonPagedAttention,
        rows: Rows,
        cache: PagedCache,
        *,
        most_rows: int,
        most_tokens: int,
        step_tokens: Callable[[], int],
        most_drafts: int = 0,
        most_chained: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model, attention, rows, cache, **options)
        self.replays = 0
        self.tables = DeviceTables(cache.tables, model.device)
        self._sizes = decode_sizes(min(most_rows, rows.count))
        self._chunks = chunk_sizes(most_tokens) if most_tokens else []
        self._requests = sorted({min(FEW, rows.count), rows.count})
        self._full = full_step(model, step_tokens(), most_tokens)
        self._chunks += [self._full] * bool(self._full)
        self._layouts = {
            (tokens, requests): Layout(tokens, requests, attention.most_tiles(tokens, requests))
            for tokens in self._chunks
            for requests in self._requests
        }
        self._verify_sizes = verify_sizes(self._sizes[-1], most_drafts) if most_drafts else {}
        self._verify_layouts = {
            (tokens, requests): Layout(tokens, requests, attention.most_tiles(tokens, requests), tokens)
            for requests, counts in self._verify_sizes.items()
            for tokens in counts
        }
        self._chained = [size for size in self._sizes if size <= FEW]
        self._most_chained = most_chained
        layouts = (*self._layouts.values(), *self._verify_layouts.values())
        largest = max([3 * self._sizes[-1], *(layout.size for layout in layouts)])
        self._staging = Staging(largest, model.device)
        self.startup = self._capture()

    @torch.inference_mode()
    def _capture(self) -> Startup:
        """Capture every graph, the largest first."""
        device, started = self.model.device, time.perf_counter()
        before = free_bytes(device)
        capturer, inputs = Capturer(device), self._staging.device
        self.let_go = capturer.let_go
        machine = Machine(
            self.model, self.attention, self.sampler, self.rows, self.tables, self.cache.block_size
        )
        self._chunk_graphs: dict[tuple[int, int], ChunkGraph] = {}
        self._verify_graphs: dict[tuple[int, int, Feature], VerifyGraph] = {}
        self.decode_graphs: dict[tuple[int, Feature | None], DecodeGraph] = {}
        count = len(self._layouts) + len(self._verify_layouts) * len(CAPTURED) + len(self._sizes) * len(KINDS)
        count += self._count_more()
        with bar("capturing graphs", count) as part:
            for (tokens, requests), layout in reversed(self._layouts.items()):
                part(f"{tokens} tokens of {requests} requests")
                graph = ChunkGraph(machine, tokens, requests, layout, inputs[: layout.size], capturer)
                self._chunk_graphs[tokens, requests] = graph
            verified = sorted(self._verify_layouts.items(), reverse=True)
            for ((tokens, requests), layout), kind in product(verified, CAPTURED):
                part(f"{tokens} tokens of {requests} requests, all sampled")
                given = inputs[: layout.size]
                made = VerifyGraph(machine, tokens, requests, layout, given, kind, capturer)
                self._verify_graphs[tokens, requests, kind] = made
            self._chains: dict[tuple[int, int, Feature], ChainGraph] = {}
            for size, steps, kind in product(
                reversed(self._chained), range(self._most_chained, 0, -1), CAPTURED
            ):
                given = inputs[: 3 * size].view(3, size)
                self._chains[size, steps, kind] = ChainGraph(machine, size, steps, given, kind, capturer)
            for size, features in product(reversed(self._sizes), KINDS):
                part(f"{size} requests")
                given = inputs[: 3 * size].view(3, size)
                self.decode_graphs[size, features] = DecodeGraph(machine, size, given, features, capturer)
            self._capture_more(capturer, part)
        return Startup(capturer.count, time.perf_counter() - started, before - free_bytes(device))

    def _count_more(self) -> int:
        """How many graphs `_capture_more` captures."""
        return 0

    def _capture_more(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Graphs of a later phase."""

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """The first half of a step; from a graph also the second, unless its samples are to be masked."""
        self.last = self._forward(works, masked)
        return self.last

    def _forward(self, works: Sequence[Work], masked: bool) -> Forwarded:
        single = all(work.count == 1 and len(work.takers) == 1 for work in works)
        if single and (size := smallest(self._sizes, len(works))) is not None:
            return self._decode(works, size, masked)
        if (verifying := self._verify_graph(works, masked)) is not None:
            return self._verify(works, verifying)
        if (mixed := self._chunk_graph(works)) is not None:
            return self._chunk(works, mixed)
        return super().forward(works, masked=masked)

    def sample(self, step: Forwarded, allowed: Tensor | Allowed | None = None) -> Pending:
        """See `continuous.Runner.sample`; a graph may have done it already."""
        if isinstance(step, Replayed):
            return Pending(step.works, step.sampled, self.agree)
        return super().sample(step, allowed)

    def logits(self, hidden: Tensor, plan: Plan) -> Tensor:
        """In the model's own precision where graphs have them so, and nobody wants log-probabilities."""
        return narrow_logits(self.model, hidden) if captured(plan) else super().logits(hidden, plan)

    @torch.inference_mode()
    def chain(self, works: Sequence[Work], steps: int) -> HostSampled | None:
        """Several decode steps at once, of requests that have room for all of them.

        Returns `[len(works) * steps]` tokens, request by request, or None where there is no such graph.
        """
        size = smallest(self._chained, len(works))
        if size is None or steps > self._most_chained:
            return None
        self.refresh(works)
        plan = self.sampler.plan([work.row for work in works])
        if not captured(plan):
            return None
        graph = self._chains[size, steps, plan.features]
        self.replays += 1
        self._stage(works, size, steps)
        graph.replay()
        return Sampled(graph.chained[: len(works)].flatten()).to_host()

    def _stage(self, works: Sequence[Work], size: int, steps: int = 1) -> Ints:
        """Send what a decode graph reads, for so many steps; returns the rows."""
        count, starts = len(works), [work.start for work in works]
        rows: Ints = np.array([work.row for work in works], np.int64)
        self.tables.update(rows, (max(starts) + steps - 1) // self.cache.block_size + 1)
        with self._staging.fill(3 * size) as flat:
            inputs = flat.reshape(3, size)
            inputs[:, count:] = _PADDING
            inputs[0, :count], inputs[1, :count] = rows, starts
            inputs[2, :count] = inputs[1, :count] + 1 - self.rows.prompt_lens[rows]
        return rows

    def _decode(self, works: Sequence[Work], size: int, masked: bool) -> Forwarded:
        self.replays += 1
        self.refresh(works)
        count, rows = len(works), self._stage(works, size)
        plan = self.sampler.plan(rows.tolist())
        inside = captured(plan) and not masked
        graph = self.decode_graphs[size, plan.features if inside else None]
        graph.replay()
        if inside:
            return Replayed(works, graph.batch, graph.hidden, sampled=Sampled(graph.for_host[:count]))
        return Forwarded(works, graph.sampled(rows), graph.hidden)

    def _verify_graph(self, works: Sequence[Work], masked: bool) -> VerifyGraph | None:
        """The graph for a small step, if there is one that samples as these requests want it."""
        if masked or not self._verify_sizes:
            return None
        requests = smallest(list(self._verify_sizes), len(works))
        if requests is None:
            return None
        tokens = smallest(self._verify_sizes[requests], sum(work.count for work in works))
        if tokens is None or any(len(work.takers) > 1 for work in works):
            return None
        self.refresh(())  # or the plan would not know the newest settings; drafts go along with the rest
        plan = self.sampler.plan([work.row for work in works])
        if not captured(plan):
            return None
        return self._verify_graphs[tokens, requests, plan.features]

    def _verify(self, works: Sequence[Work], graph: VerifyGraph) -> Forwarded:
        works, host = self._replay(works, graph)
        sampled = Sampled(graph.for_host[: len(host.sample_at)])
        return Replayed(works, graph.batch, graph.hidden, sampled=sampled)

    def _chunk_graph(self, works: Sequence[Work]) -> ChunkGraph | None:
        """The smallest graph that holds a step; that of full steps only for one that nearly is."""
        count = sum(work.count for work in works)
        samples = sum(max(1, len(work.takers)) + len(work.drafts) for work in works)
        tokens, requests = smallest(self._chunks, count), smallest(self._requests, samples)
        if tokens is None or requests is None or (tokens == self._full and not fills(tokens, works, LONG)):
            return None
        return self._chunk_graphs[tokens, requests]

    def _chunk(self, works: Sequence[Work], graph: ChunkGraph) -> Forwarded:
        self.refresh(works)
        works, host = self._replay(works, graph)
        return Forwarded(works, graph.sampled(host), graph.hidden)

    def _replay(self, works: Sequence[Work], graph: ChunkGraph) -> tuple[Sequence[Work], HostBatch]:
        self.replays += 1
        works = sorted(works, key=_by_row)
        host = HostBatch.of(works, self.rows.prompt_lens)
        self.tables.update(host.rows, self.cache.blocks_for(int(host.context_lens.max())))
        drafts = drafts_of(works, host) if "drafts" in graph.layout.sizes else None
        with self._staging.fill(graph.layout.size) as flat:
            graph.layout.fill(flat, host, *self.attention.sort(host), drafts)
        graph.replay()
        return works, host

"""The runner that replays graphs where it can and runs the step eagerly where it cannot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.progress import bar
from common.sampling.sampler import Allowed, Feature, Sampled
from continuous.batch import HostBatch, Ints
from continuous.rows import Rows
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import chunk_sizes, decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.chunk_graph import ChunkGraph, Layout
from cuda_graphs.decode_graph import CAPTURED, KINDS, DecodeGraph, Machine
from cuda_graphs.staging import Staging
from cuda_graphs.tables import DeviceTables
from forward.model import Model
from paged_cache.cache import PagedCache
from paged_cache.runner import PagedRunner
from triton_paged_attention.attention import TritonPagedAttention

FEW = 16
"""Requests for which each size of chunk has a second graph. With few requests the decode kernel splits
contexts over programs, and how often is fixed at capture."""
_by_row = attrgetter("row")
_PADDING = np.array([[0], [-1], [0]])  # row 0, no position, no step


@dataclass(frozen=True)
class Startup:
    """What capturing took: graphs, seconds (compiling kernels included), and bytes of device memory."""

    graphs: int
    seconds: float
    bytes: int


@dataclass
class Replayed(Forwarded):
    """A step whose graph goes on to the sampled tokens."""

    sampled: Sampled | None = None


class GraphRunner(PagedRunner):
    """Replays steps of one token a request from `DecodeGraph`s, and small mixed steps from `ChunkGraph`s.

    Args:
        model, attention, rows, cache, options: see `paged_cache.PagedRunner`.
        most_rows: requests in the largest decode graph.
        most_tokens: tokens in the largest chunk graph; 0: none.

    startup: what capturing took.
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
        **options: Any,
    ) -> None:
        super().__init__(model, attention, rows, cache, **options)
        self.replays = 0
        self.tables = DeviceTables(cache.tables, model.device)
        self._sizes = decode_sizes(min(most_rows, rows.count))
        self._chunks = chunk_sizes(most_tokens) if most_tokens else []
        self._requests = sorted({min(FEW, rows.count), rows.count})
        self._layouts = {
            (tokens, requests): Layout(tokens, requests, attention.most_tiles(tokens))
            for tokens in self._chunks
            for requests in self._requests
        }
        largest = max([3 * self._sizes[-1], *(layout.size for layout in self._layouts.values())])
        self._staging = Staging(largest, model.device)
        self.startup = self._capture()

    @torch.inference_mode()
    def _capture(self) -> Startup:
        """Capture every graph, the largest first."""
        device, started = self.model.device, time.perf_counter()
        before = _free_bytes(device)
        capturer, inputs = Capturer(device), self._staging.device
        machine = Machine(
            self.model, self.attention, self.sampler, self.rows, self.tables, self.cache.block_size
        )
        self._chunk_graphs: dict[tuple[int, int], ChunkGraph] = {}
        self.decode_graphs: dict[tuple[int, Feature | None], DecodeGraph] = {}
        with bar("capturing graphs", len(self._layouts) + len(self._sizes) * len(KINDS)) as part:
            for (tokens, requests), layout in reversed(self._layouts.items()):
                part(f"{tokens} tokens of {requests} requests")
                graph = ChunkGraph(machine, tokens, requests, layout, inputs[: layout.size], capturer)
                self._chunk_graphs[tokens, requests] = graph
            for size, features in product(reversed(self._sizes), KINDS):
                part(f"{size} requests")
                given = inputs[: 3 * size].view(3, size)
                self.decode_graphs[size, features] = DecodeGraph(machine, size, given, features, capturer)
        return Startup(capturer.count, time.perf_counter() - started, before - _free_bytes(device))

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """The first half of a step; from a graph also the second, unless its samples are to be masked."""
        single = all(work.count == 1 and len(work.takers) == 1 for work in works)
        if single and (size := smallest(self._sizes, len(works))) is not None:
            return self._decode(works, size, masked)
        tokens = smallest(self._chunks, sum(work.count for work in works))
        samples = sum(max(1, len(work.takers)) + len(work.drafts) for work in works)
        requests = smallest(self._requests, samples)
        if tokens is not None and requests is not None:
            return self._chunk(works, self._chunk_graphs[tokens, requests])
        return super().forward(works, masked=masked)

    def sample(self, step: Forwarded, allowed: Tensor | Allowed | None = None) -> Pending:
        """See `continuous.Runner.sample`; a graph may have done it already."""
        if isinstance(step, Replayed):
            return Pending(step.works, step.sampled)
        return super().sample(step, allowed)

    def _decode(self, works: Sequence[Work], size: int, masked: bool) -> Forwarded:
        self.replays += 1
        self.refresh(works)
        count = len(works)
        rows: Ints = np.fromiter((work.row for work in works), np.int64, count)
        at: Ints = np.fromiter((work.start for work in works), np.int64, count)
        self.tables.update(rows, int(at.max()) // self.cache.block_size + 1)
        with self._staging.fill(3 * size) as flat:
            inputs = flat.reshape(3, size)
            inputs[:, count:] = _PADDING
            inputs[:, :count] = rows, at, at + 1 - self.rows.prompt_lens[rows]
        plan = self.sampler.plan(rows.tolist())
        inside = plan.features in CAPTURED and plan.wanted is None and not masked
        graph = self.decode_graphs[size, plan.features if inside else None]
        graph.replay()
        if inside:
            return Replayed(works, graph.batch, graph.tokens, sampled=Sampled(graph.tokens[:count]))
        return Forwarded(works, graph.sampled(rows), graph.hidden)

    def _chunk(self, works: Sequence[Work], graph: ChunkGraph) -> Forwarded:
        self.replays += 1
        self.refresh(works)
        works = sorted(works, key=_by_row)
        host = HostBatch.of(works, self.rows.prompt_lens)
        self.tables.update(host.rows, self.cache.blocks_for(int(host.context_lens.max())))
        with self._staging.fill(graph.layout.size) as flat:
            graph.layout.fill(flat, host, *self.attention.sort(host))
        graph.replay()
        return Forwarded(works, graph.sampled(host), graph.hidden)


def _free_bytes(device: torch.device) -> int:
    """Free memory of the device; what the allocator merely keeps for later counts as free."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]

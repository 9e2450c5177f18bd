"""The runner that replays a graph where an executor has one for the step, and runs other steps eagerly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from common.progress import bar
from common.sampling.metadata import SamplingMetadata
from common.sampling.sampler import HostSampled, Sampled
from continuous.batch import Batch
from continuous.rows import RequestRows
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import GraphContext, captured, narrow_logits
from cuda_graphs.memory import Startup, free_bytes
from cuda_graphs.tables import DeviceTables
from forward.model import Model
from paged_cache.cache import PagedCache
from paged_cache.executor import StepExecutor
from paged_cache.runner import PagedRunner
from triton_paged_attention.attention import TritonPagedAttention


class GraphExecutor(StepExecutor, Protocol):
    """Interface of an executor that runs one kind of step by CUDA graphs.

    count: number of graphs that it captures.
    """

    count: int

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture all graphs of this executor by `capturer`, largest first.

        part: a progress callback, called with each graph's name before its capture.
        """
        ...


E = TypeVar("E")


class GraphRunner(PagedRunner):
    """A runner of steps that captures CUDA graphs at its start, and runs a step by a graph that holds it.

    Args:
        model, attention: compute hidden states. rows: the requests' tokens. cache: their block tables.
        executors: factories of executors (each has the graphs of one kind of step), in the order in which
            these are asked for a graph; they capture in the opposite order.
        options: those of `continuous.Runner`.

    machine: the memory and kernels that all graphs share.
    startup: the time and memory that capturing took.
    replays: number of steps that were replayed.
    """

    attention: TritonPagedAttention
    executors: Sequence[GraphExecutor]

    def __init__(
        self,
        model: Model,
        attention: TritonPagedAttention,
        rows: RequestRows,
        cache: PagedCache,
        *,
        executors: Sequence[Callable[..., GraphExecutor | None]],
        **options: Any,
    ) -> None:
        super().__init__(model, attention, rows, cache, **options)
        self.replays = 0
        self.tables = DeviceTables(cache.tables, model.device)
        self.machine = GraphContext(
            model, attention, self.sampler, rows, self.tables, cache.block_size
        )
        self.capturer = Capturer(model.device)
        self._make_executors(executors)
        self.startup = self._capture()

    @torch.inference_mode()
    def _capture(self) -> Startup:
        started, before = time.perf_counter(), free_bytes(self.model.device)
        with bar(
            "capturing graphs", sum(executor.count for executor in self.executors)
        ) as part:
            for executor in reversed(self.executors):
                executor.capture(self.capturer, part)
        used = before - free_bytes(self.model.device)
        return Startup(self.capturer.count, time.perf_counter() - started, used)

    def release(self) -> None:
        """Destroy the CUDA graphs; called after the last step."""
        self.capturer.release()

    def executor(self, kind: type[E]) -> E:
        """Return the runner's executor of the class `kind`; the runner must have one."""
        return next(one for one in self.executors if isinstance(one, kind))

    def replayed(
        self, works: Sequence[Work], batch: Batch, hidden: Tensor, tokens: Tensor
    ) -> Forwarded:
        """Return a step that a graph has computed and sampled as a `Forwarded` (a step before sampling).

        Its `rest`, which would sample, returns the tokens of the graph.

        works: the step's requests. batch: its inputs. hidden: `[T, hidden]`. tokens: `[S]`, what the graph
            sampled.
        """
        done = Sampled(tokens, tokens)
        return Forwarded(
            works,
            batch,
            hidden,
            rest=lambda allowed: Pending(works, HostSampled(done), self.verifier),
        )

    def logits(self, hidden: Tensor, plan: SamplingMetadata) -> Tensor:
        """Return the logits `[S, V]` of the hidden states `[S, hidden]` to sample.

        plan: how they are sampled. If greedily or with a temperature, and without log-probabilities, logits
            have the model's dtype (float32 if it soft-caps them); else float32.
        """
        return (
            narrow_logits(self.model, hidden)
            if captured(plan)
            else super().logits(hidden, plan)
        )

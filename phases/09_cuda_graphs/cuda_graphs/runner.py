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
    """Interface of an executor with CUDA graphs for one kind of step. A factory makes it, given the runner.

    count: graphs that it captures.
    """

    count: int

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture all graphs by `capturer`, largest first; `part` shows each one's name as progress."""
        ...


E = TypeVar("E")


class GraphRunner(PagedRunner):
    """A runner of steps whose executors have CUDA graphs, which it captures.

    Args:
        model, attention: compute hidden states. rows: the requests' tokens. cache: their block tables.
        executors: factories in the order of asking; graphs are captured in the opposite order.
        options: those of `continuous.Runner`.

    machine: the memory and kernels that all graphs share.
    startup: the time and memory that capturing took.
    replays: steps that were replayed.
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
        """Destroy the CUDA graphs, after the last step."""
        self.capturer.release()

    def executor(self, kind: type[E]) -> E:
        """Return the executor of the class `kind`, which must be there."""
        return next(one for one in self.executors if isinstance(one, kind))

    def replayed(
        self, works: Sequence[Work], batch: Batch, hidden: Tensor, tokens: Tensor
    ) -> Forwarded:
        """Return a step that a graph has computed up to its sampled tokens, in the form of a forward pass.

        works: the step's requests. batch: its inputs. hidden: `[T, hidden]`. tokens: what the graph sampled.
        """
        done = Sampled(tokens, tokens)
        return Forwarded(
            works,
            batch,
            hidden,
            rest=lambda allowed: Pending(works, HostSampled(done), self.verifier),
        )

    def logits(self, hidden: Tensor, plan: SamplingMetadata) -> Tensor:
        """Return logits `[S, V]` of hidden states `[S, hidden]` that are sampled.

        plan: how they are sampled. In the model's own precision if graphs compute them so and no request
        wants log-probabilities, else float32.
        """
        return (
            narrow_logits(self.model, hidden)
            if captured(plan)
            else super().logits(hidden, plan)
        )

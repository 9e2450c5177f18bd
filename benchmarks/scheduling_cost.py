"""What the host does between two steps of phase 05, in microseconds.

The model is a stub that computes nothing, so what is left is Python: scheduling, laying out the batch,
sampling the argmax of eight numbers, and dealing out tokens. On a GPU all of it is time in which the GPU
idles, unless a later phase hides it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from continuous.batch import Batch
from continuous.engine import Engine
from continuous.rows import RequestRows
from forward.attention import LayerSpec
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import PagedBatch, PagedCache, PagedRunner, PagedScheduler

BLOCK_SIZE = 16


class StubModel:
    """Looks like a model and costs nothing."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.config: ModelConfig = replace(SHAPES["tiny"], vocab_size=8, eos_token_ids=())

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: object) -> Tensor:
        """`[T]` -> `[T, 1]`."""
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[S, 1]` -> `[S, V]`."""
        return torch.zeros(len(hidden), self.config.vocab_size)


class StubAttention:
    """Keeps nothing."""

    def begin(self, batch: Batch) -> None:
        """A kernel needs no plan but the batch."""
        assert isinstance(batch, PagedBatch)

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Never called: the model has no layers."""
        return q


class TimedRunner(PagedRunner):
    """Notes how long `prepare` takes."""

    seconds = 0.0

    def refresh(self, works: Any) -> None:
        """Move no keys: there are none."""

    def prepare(self, works: Any) -> Batch:
        """See `PagedRunner.prepare`."""
        started = time.perf_counter()
        batch = super().prepare(works)
        self.seconds = time.perf_counter() - started
        return batch


@dataclass(frozen=True)
class Cost:
    """Medians in microseconds a step.

    schedule: choosing works. prepare: from works to tensors. update: dealing out tokens, finish rule, and
    what the cache keeps.
    """

    schedule: float
    prepare: float
    update: float

    @property
    def total(self) -> float:
        """Scheduling and batch preparation, the tokens' return included; the stub's sampling is not."""
        return self.schedule + self.prepare + self.update


def build(running: int, context: int) -> Engine:
    """An engine with `running` requests at about `context` tokens each, all decoding."""
    max_len = context + 1024
    rows = RequestRows(running, max_len)
    blocks = running * (max_len // BLOCK_SIZE + 1)
    cache = PagedCache(running, max_len, blocks, BLOCK_SIZE)
    scheduler = PagedScheduler(rows, cache, step_tokens=max(8192, max_len))
    runner = TimedRunner(cast(Model, StubModel()), cast(Any, StubAttention()), rows, cache)
    engine = Engine(scheduler, runner)
    engine.max_len = max_len
    for number in range(running):
        prompt = [number % 8] + [
            (number // 8**digit + at) % 8 for at in range(context // 4) for digit in range(4)
        ]
        engine.add(prompt[:context], SamplingParams(max_tokens=1000, ignore_eos=True))
    engine.process_inbox()
    while any(request.prefilling for request in scheduler.running) or scheduler.waiting:
        engine.step()
    return engine


def cost(engine: Engine, steps: int) -> Cost:
    """Measure decode steps."""
    samples: list[tuple[float, float, float]] = []
    runner = cast(TimedRunner, engine.runner)
    for _ in range(steps):
        t0 = time.perf_counter()
        works = engine.scheduler.schedule()
        t1 = time.perf_counter()
        pending = engine.launch(works)
        t2 = time.perf_counter()
        assert pending is not None
        engine.collect(pending)
        engine.take_outputs()
        t3 = time.perf_counter()
        samples.append((t1 - t0, runner.seconds, t3 - t2))
    return Cost(*(1e6 * median(column) for column in zip(*samples, strict=True)))

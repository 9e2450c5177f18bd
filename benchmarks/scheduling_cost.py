"""What the host does between two steps, in microseconds: `python -m benchmarks.scheduling_cost`.

The model is a stub that computes nothing, so what is left is Python: scheduling, laying out the batch,
sampling the argmax of eight numbers, and dealing out tokens. On a GPU all of it is time in which the GPU
idles, unless a later phase hides it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from chunked_prefill import ChunkedScheduler
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from continuous.batch import Batch
from continuous.engine import Engine
from continuous.rows import RequestRows
from forward.attention import LayerSpec
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import PagedBatch, PagedCache, PagedRunner, PagedScheduler
from prefix_cache import INDEXES, PrefixCache

BLOCK_SIZE = 16
PHASES = ("05_paged_cache", "07_chunked_prefill", "08_prefix_cache", "08_prefix_cache hash")


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

    schedule: choosing works. prepare: from works to tensors. rest: sampling a stub's logits, and the glue.
    update: dealing out tokens, finish rule, and what the cache keeps.
    """

    schedule: float
    prepare: float
    rest: float
    update: float

    @property
    def total(self) -> float:
        """Scheduling and batch preparation, the tokens' return included; the stub's sampling is not."""
        return self.schedule + self.prepare + self.update


def build(phase: str, running: int, context: int) -> Engine:
    """An engine of `phase` with `running` requests at about `context` tokens each, all decoding."""
    max_len = context + 1024
    rows = RequestRows(running, max_len)
    blocks = running * (max_len // BLOCK_SIZE + 1)
    if phase.startswith("08"):
        index = INDEXES["hash" if phase.endswith("hash") else "radix"]()
        cache: PagedCache = PrefixCache(running, max_len, blocks, BLOCK_SIZE, index)
    else:
        cache = PagedCache(running, max_len, blocks, BLOCK_SIZE)
    kind = PagedScheduler if phase.startswith("05") else ChunkedScheduler
    scheduler = kind(rows, cache, step_tokens=max(8192, max_len))
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
    samples: list[tuple[float, float, float, float]] = []
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
        samples.append((t1 - t0, runner.seconds, t2 - t1 - runner.seconds, t3 - t2))
    return Cost(*(1e6 * median(column) for column in zip(*samples, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--running", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, nargs="*", default=[500, 4000])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'phase':<22}{'running':>8}{'context':>8}{'schedule':>10}{'prepare':>9}{'update':>8}"
        f"{'total us':>10}{'rest':>8}"
    )
    for phase in PHASES:
        for context in arguments.context:
            for running in arguments.running:
                found = cost(build(phase, running, context), arguments.steps)
                print(
                    f"{phase:<22}{running:>8}{context:>8}{found.schedule:>10.0f}{found.prepare:>9.0f}"
                    f"{found.update:>8.0f}{found.total:>10.0f}{found.rest:>8.0f}"
                )


if __name__ == "__main__":
    main()

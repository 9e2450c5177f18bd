"""`--autotune`: search for better configurations than the defaults, for one model on the present GPU.

The search climbs: from the default it tries the neighbours, one field one value up or down, goes on from the
first that is better, and ends where none is. That takes 10 to 25 configurations a shape where all
combinations would be hundreds. A neighbour counts as better when it is at least 2 % faster, which is more
than a repeated measurement differs by.

Every configuration must give the default's result before it is timed. Timing replays a CUDA graph over data
that the L2 cache does not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from common.models.config import ModelConfig
from phases.appendix.tuning.shapes import Shape, shapes
from phases.appendix.tuning.winners import save_winner, trying

BETTER = 0.98
"""A configuration must take less than this share of the best time so far."""
SAME = 0.05
"""The largest relative error between results. Rounding alone is 0.02 in bfloat16 and a dozen layers."""
MOST = 32
"""Configurations per shape, at most."""
Space = Mapping[str, tuple[Any, ...]]
"""The values that a search tries, by field."""
SPACE: dict[str, Space] = {
    "decode": {
        "block_n": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
        "splits": (1, 2, 4, 8, 16, 32),
    },
    "prefill": {
        "block_m": (32, 64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
        "maxnreg": (None, 128, 168),
    },
}
"""Those of phase 06's kernels, by kind."""

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes."""


@dataclass(frozen=True)
class TimedConfig:
    """One configuration. compile_seconds: its first call. seconds: a later one, None if it does not run."""

    config: Any
    compile_seconds: float
    seconds: float | None
    why: str = ""


@dataclass(frozen=True)
class Found:
    """The end of one shape's search, and the file that it was written to."""

    shape: Shape
    default: TimedConfig
    best: TimedConfig
    trials: tuple[TimedConfig, ...]
    path: Path


Report = Callable[[Shape, TimedConfig], None]


def autotune(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batches: Sequence[int] = (2, 8, 32, 128),
    context: int = 2048,
    timer: Timer | None = None,
    report: Report = lambda shape, trial: None,
) -> Iterator[Found]:
    """Search for every shape of `model`; winners are saved as they are found, and used from then on.

    Args:
        model: its head counts and matrix sizes decide what is tuned.
        batches, context: decode attention is tuned at each of these batch sizes, with so many keys a request.
        timer: by default the replay of a CUDA graph.
        report: told of every trial.
    """
    yield from search(shapes(model, device, dtype, batches, context), SPACE, timer, report)


def search(
    given: Iterable[Shape], spaces: Mapping[str, Space], timer: Timer | None, report: Report
) -> Iterator[Found]:
    """Tune each shape in the space of its kind; winners are used from the search on."""
    for shape in given:
        shape.winners.use()
        yield tune(shape, spaces[shape.winners.kind], timer or graph_timer, report)


def tune(shape: Shape, space: Space, timer: Timer, report: Report = lambda shape, trial: None) -> Found:
    """Climb from the shape's default, and save the winner, also if it is the default itself."""
    tried: dict[Any, TimedConfig] = {}
    wanted: list[Tensor] = []

    def attempt(config: Any) -> TimedConfig:
        if config not in tried:
            tried[config] = _try(shape, config, timer, wanted)
            report(shape, tried[config])
        return tried[config]

    best = default = attempt(shape.default)
    if default.seconds is None:
        raise RuntimeError(f"the default configuration of {shape.title} does not run: {default.why}")
    improved = True
    while improved and len(tried) < MOST:
        improved = False
        for config in neighbours(space, best.config):
            if getattr(config, "splits", 1) > shape.most_splits:
                continue
            trial = attempt(config)
            if trial.seconds is not None and trial.seconds < BETTER * (best.seconds or 0.0):
                best, improved = trial, True
                break  # go on from there
            if len(tried) >= MOST:
                break
    facts = {
        "config": None if best is default else asdict(best.config),
        "seconds": best.seconds,
        "default_seconds": default.seconds,
        "shape": shape.title,
    }
    path = save_winner(shape.device, shape.winners.kind, shape.key._asdict(), facts)
    return Found(shape, default, best, tuple(tried.values()), path)


def neighbours(space: Space, config: Any) -> Iterator[Any]:
    """`config` with one field one value up or down."""
    for name, allowed in space.items():
        current = getattr(config, name)
        values = sorted({*allowed, current}, key=lambda value: float("inf") if value is None else value)
        at = values.index(current)
        for i in (at - 1, at + 1):
            if 0 <= i < len(values):
                yield replace(config, **{name: values[i]})


def _try(shape: Shape, config: Any, timer: Timer, wanted: list[Tensor]) -> TimedConfig:
    """Compile, compare with the first configuration's result, and time."""
    begun = time.perf_counter()
    try:
        with trying(shape.winners.table, shape.key, config):
            result = shape.call()
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            compiled = time.perf_counter() - begun
            if not wanted:
                wanted.append(result.float())
            error = (result.float() - wanted[0]).norm() / wanted[0].norm()
            if not float(error) < SAME:
                return TimedConfig(config, compiled, None, f"its result differs by {float(error):.1e}")
            return TimedConfig(config, compiled, timer(shape.call) / shape.copies)
    except (OutOfResources, CompilationError) as problem:
        return TimedConfig(config, time.perf_counter() - begun, None, str(problem).splitlines()[0])


def graph_timer(call: Callable[[], object]) -> float:
    """Seconds of a call: the median over replays of a CUDA graph."""
    return 1e-3 * float(triton.testing.do_bench_cudagraph(call, rep=10, return_mode="median"))

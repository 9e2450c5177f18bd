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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from common.config import ModelConfig

from .decode import Workspace, paged_decode
from .gemv import gemv
from .prefill import paged_prefill, query_tiles
from .tuning import decode_config, gemv_config, multiprocessors, prefill_config
from .winners import save_winner, using

CACHE_BYTES = 120e6
"""Data is repeated in memory until it is this large: more than twice the L2 cache of an H200."""
BETTER = 0.98
"""A configuration must take less than this share of the best time so far."""
MOST = 32
"""Configurations per shape, at most."""
BLOCK_SIZE = 64
"""That of the cache, as `load` chooses it on a GPU. The kernels' tiles need not divide it."""

SPACE: dict[str, dict[str, tuple[Any, ...]]] = {
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
    "gemv": {
        "rows": (1, 2, 4, 8, 16),
        "block_k": (256, 512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
        "late": (False, True),
    },
}
"""The values that a search tries, by kind and field."""

Timer = Callable[[Callable[[], object]], float]
"""Seconds that a call takes."""


@dataclass(frozen=True)
class Shape:
    """One thing to tune.

    kind: a key of `SPACE`. title: for people. at: the arguments of its table, which a winner is kept under.
    default: what the table says. call: run the kernel once over each copy of its data; its result is compared
    between configurations. copies: how many those are. most_splits: what the engine's workspace has room for.
    """

    kind: str
    title: str
    at: dict[str, Any]
    default: Any
    call: Callable[[], Tensor]
    copies: int
    most_splits: int = 1


@dataclass(frozen=True)
class Trial:
    """One configuration. compile_seconds: its first call. seconds: a later one, None if it does not run."""

    config: Any
    compile_seconds: float
    seconds: float | None
    why: str = ""


@dataclass(frozen=True)
class Found:
    """The end of one shape's search. `path` is the file that was written, None if the default stays."""

    shape: Shape
    default: Trial
    best: Trial
    trials: tuple[Trial, ...]
    path: Path | None = None


Report = Callable[[Shape, Trial], None]


def autotune(
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    batches: Sequence[int] = (1, 8, 32, 128),
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
    for shape in shapes(model, device, dtype, batches, context):
        yield tune(shape, device, timer or graph_timer, report)


def tune(shape: Shape, device: torch.device, timer: Timer, report: Report = lambda s, t: None) -> Found:
    """Climb from the shape's default; save the winner if it is not the default itself."""
    tried: dict[Any, Trial] = {}
    wanted: list[Tensor] = []

    def attempt(config: Any) -> Trial:
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
        for config in neighbours(shape.kind, best.config):
            if getattr(config, "splits", 1) > shape.most_splits:
                continue
            trial = attempt(config)
            if trial.seconds is not None and trial.seconds < BETTER * (best.seconds or 0.0):
                best, improved = trial, True
                break  # go on from there
            if len(tried) >= MOST:
                break
    path = None
    if best is not default:
        facts = {
            "config": asdict(best.config),
            "seconds": best.seconds,
            "default_seconds": default.seconds,
            "shape": shape.title,
        }
        path = save_winner(device, shape.kind, shape.at, facts)
    return Found(shape, default, best, tuple(tried.values()), path)


def neighbours(kind: str, config: Any) -> Iterator[Any]:
    """`config` with one field one value up or down."""
    for name, allowed in SPACE[kind].items():
        current = getattr(config, name)
        values = sorted({*allowed, current}, key=lambda value: float("inf") if value is None else value)
        at = values.index(current)
        for i in (at - 1, at + 1):
            if 0 <= i < len(values):
                yield replace(config, **{name: values[i]})


def _try(shape: Shape, config: Any, timer: Timer, wanted: list[Tensor]) -> Trial:
    """Compile, compare with the first configuration's result, and time."""
    begun = time.perf_counter()
    try:
        with using(shape.kind, config):
            result = shape.call()
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            compiled = time.perf_counter() - begun
            if not wanted:
                wanted.append(result.float())
            error = (result.float() - wanted[0]).norm() / wanted[0].norm()
            if not float(error) < 2e-2:
                return Trial(config, compiled, None, f"its result differs by {float(error):.1e}")
            return Trial(config, compiled, timer(shape.call) / shape.copies)
    except (OutOfResources, CompilationError) as problem:
        return Trial(config, time.perf_counter() - begun, None, str(problem).splitlines()[0])


def graph_timer(call: Callable[[], object]) -> float:
    """Seconds of a call: the median over replays of a CUDA graph."""
    return 1e-3 * float(triton.testing.do_bench_cudagraph(call, rep=10, return_mode="median"))


def shapes(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batches: Sequence[int], context: int
) -> Iterator[Shape]:
    """What a model of this configuration can be tuned for, with random data; memory is freed in between."""
    for batch in batches:
        yield decode_shape(model, device, dtype, batch, context)
    yield prefill_shape(model, device, dtype, context)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    done = set()
    for rows, size, gated in (
        (q + 2 * kv, hidden, False),
        (hidden, q, False),
        (inner, hidden, True),
        (hidden, inner, False),
        (model.vocab_size, hidden, False),
    ):
        if (rows, size, gated) not in done:
            done.add((rows, size, gated))
            yield gemv_shape(device, dtype, rows, size, gated)


def _cache(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int, context: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A pool, and block tables of as many disjoint batches as it takes to exceed the L2 cache."""
    per_request = -(-context // BLOCK_SIZE)
    one = 2 * batch * per_request * BLOCK_SIZE * model.num_kv_heads * model.head_dim * dtype.itemsize
    copies = _copies(one, device)
    blocks = batch * per_request
    size = (copies * blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
    k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    order = torch.randperm(copies * blocks, device=device).int()
    return k, v, list(order.view(copies, batch, per_request))


def _copies(size: int, device: torch.device) -> int:
    """How often data of `size` bytes is repeated; the interpreter has no cache to outgrow."""
    return min(24, int(CACHE_BYTES // size) + 1) if device.type == "cuda" else 1


def decode_shape(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batch: int, context: int
) -> Shape:
    """Decode attention of `batch` requests with `context` keys each."""
    k, v, tables = _cache(model, device, dtype, batch, context)
    q = torch.randn(batch, model.num_heads, model.head_dim, device=device, dtype=dtype)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    d_pad = max(16, triton.next_power_of_2(model.head_dim))
    pairs = batch * model.num_kv_heads
    default = decode_config.table(pairs, d_pad, dtype.itemsize, device)
    most = max(default.splits, 4 * multiprocessors(device) // pairs)
    workspace = Workspace(most * batch * model.num_heads, d_pad, device)

    def call() -> Tensor:
        out = torch.empty_like(q)
        for table in tables:
            paged_decode(
                q, k, v, table, lens, scale=model.attention_scale, out=out, workspace=workspace,
                config=decode_config(pairs, d_pad, dtype.itemsize, device),
            )  # fmt: skip
        return out

    at = {"pairs": pairs, "d_pad": d_pad, "itemsize": dtype.itemsize}
    return Shape("decode", f"decode attention, {batch} x {context:,}", at, default, call, len(tables), most)


def prefill_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int) -> Shape:
    """Prefill attention of two prompts of `context` tokens and eight of an eighth of it."""
    lens = [context] * 2 + [max(1, context // 8)] * 8
    k, v, tables = _cache(model, device, dtype, len(lens), context)
    q = torch.randn(sum(lens), model.num_heads, model.head_dim, device=device, dtype=dtype)
    d_pad = max(16, triton.next_power_of_2(model.head_dim))
    group = model.num_heads // model.num_kv_heads
    cut: dict[int, Tensor] = {}

    def call() -> Tensor:
        config = prefill_config(d_pad, dtype.itemsize, device)
        tokens = config.block_m // group
        if tokens not in cut:
            cut[tokens] = torch.from_numpy(query_tiles(lens, lens, tokens)).to(device)
        return paged_prefill(
            q, k, v, tables[0], cut[tokens], scale=model.attention_scale, out=torch.empty_like(q),
            config=config,
        )  # fmt: skip

    default = prefill_config.table(d_pad, dtype.itemsize, device)
    at = {"d_pad": d_pad, "itemsize": dtype.itemsize}
    return Shape("prefill", f"prefill attention, 2 x {lens[0]:,} and 8 x {lens[-1]:,}", at, default, call, 1)


def gemv_shape(device: torch.device, dtype: torch.dtype, rows: int, size: int, gated: bool) -> Shape:
    """A matrix-vector product as a step of one token has it."""
    height = rows * (2 if gated else 1)
    copies = _copies(height * size * dtype.itemsize, device)
    weights = [torch.randn(height, size, device=device, dtype=dtype) / size**0.5 for _ in range(copies)]
    x = torch.randn(1, size, device=device, dtype=dtype)

    def call() -> Tensor:
        return [gemv(x, weight, gate="silu" if gated else None) for weight in weights][-1]

    default = gemv_config.table(rows, size, gated)
    title = f"matrix-vector, {'2 x ' if gated else ''}{rows:,} x {size:,}"
    at = {"rows": rows, "size": size, "gated": gated}
    return Shape("gemv", title, at, default, call, copies)

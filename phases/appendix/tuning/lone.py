"""`--autotune` for the kernels of a step of one token, after those of phase 06."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from common.models.config import ModelConfig
from cuda_graphs.batch import fixed_batch
from forward.loading import random_model
from paged_cache import BlockPool
from phases.appendix.latency.attention import LatencyAttention
from phases.appendix.latency.gemv import gemv
from phases.appendix.latency.surgery import install
from phases.appendix.latency.tables import GEMV, LONE, GemvConfig, GemvKey, LoneConfig, LoneKey, heads_config
from phases.appendix.tuning import autotune as kernels
from phases.appendix.tuning.autotune import Found, Report, Space, Timer, search
from phases.appendix.tuning.shapes import BLOCK_SIZE, Shape, copies_of
from phases.appendix.tuning.winners import TunedWinners
from triton_paged_attention.layers import FusedBlock, optimize

GEMVS = TunedWinners("gemv", GEMV, GemvConfig)
LONES = TunedWinners("lone", LONE, LoneConfig)

SPACE: dict[str, Space] = {
    "lone": {
        "block_n": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "splits": (1, 2, 4, 8, 16, 32),
    },
    "gemv": {
        "rows": (1, 2, 4, 8, 16),
        "block_k": (256, 512, 1024, 2048, 4096),
        "num_warps": (1, 2, 4, 8),
        "late": (False, True),
    },
}
"""The values that a search tries, by kind and field."""


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
    """See `autotune.autotune`; a step of one token has half the keys."""
    given: dict[str, Any] = {"batches": batches, "context": context, "timer": timer, "report": report}
    yield from kernels.autotune(model, device=device, dtype=dtype, **given)
    yield from search(shapes(model, device, dtype, max(1, context // 2)), SPACE, timer, report)


def shapes(model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int) -> Iterator[Shape]:
    """Yield the shapes of a step of one token of such a model, with random data."""
    yield from step_shapes(model, device, dtype, context)
    yield head_shape(model, device, dtype)


def step_shapes(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int
) -> Iterator[Shape]:
    """Attention and the matrix-vector products of a step of one token, each timed within the whole step.

    The kernels of such a step overlap: the next one loads its weights while this one computes, if there is
    room beside it. What is fastest by itself may be slower there. Nothing for families whose layers have no
    such step.
    """
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    matrices = [GemvKey(q + 2 * kv, hidden, False), GemvKey(hidden, inner, False)]
    if not model.mlp_bias:  # or the gate is applied by a kernel of its own
        matrices.append(GemvKey(inner, hidden, True))
    if heads_config(hidden, q) is None:  # or the output projection has a kernel of its own
        matrices.append(GemvKey(hidden, q, False))
    weights = hidden * (2 * q + 2 * kv + 3 * inner)
    layers = min(model.num_layers, copies_of(weights * dtype.itemsize, device))
    some = replace(model, num_layers=layers, sliding_windows=model.sliding_windows[:layers], vocab_size=64)
    call = _step(some, device, dtype, context)
    if call is None:
        return
    key = LoneKey(model.num_kv_heads, max(16, triton.next_power_of_2(model.head_dim)), dtype.itemsize)
    title = f"a layer of one token: attention, {context:,} keys"
    yield Shape(LONES, key, device, title, call, layers, most_splits=32)
    for matrix in dict.fromkeys(matrices):
        yield Shape(GEMVS, matrix, device, f"a layer of one token: {_title(matrix)}", call, layers)


def _step(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int
) -> Callable[[], Tensor] | None:
    """One token through random layers, with so many keys in the cache; None: these take no direct way."""
    built = install(optimize(random_model(model, device=device, dtype=dtype)))
    if not any(isinstance(module, FusedBlock) and module.ways for module in built.modules()):
        return None
    blocks = -(-context // BLOCK_SIZE)
    pool = BlockPool(model, blocks, BLOCK_SIZE, device=device, dtype=dtype)
    pool.data.normal_()
    attention = LatencyAttention(pool, model.num_heads)
    batch = fixed_batch(1, blocks, device)
    batch.block_tables.copy_(torch.randperm(blocks)[None])
    batch.context_lens.fill_(context)
    batch.positions.fill_(context - 1)
    batch.slots.fill_(-1)  # the newest key is not stored

    @torch.inference_mode()
    def call() -> Tensor:
        attention.begin(batch)
        return built(batch.input_ids, batch.positions, attention)

    return call


def head_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Shape:
    """The output head's matrix-vector product, which is long enough to be timed by itself."""
    key = GemvKey(model.vocab_size, model.hidden_size, False)
    copies = copies_of(key.rows * key.size * dtype.itemsize, device)
    size = key.rows, key.size
    weights = [torch.randn(size, device=device, dtype=dtype) / key.size**0.5 for _ in range(copies)]
    x = torch.randn(1, key.size, device=device, dtype=dtype)

    def call() -> Tensor:
        return [gemv(x, weight, out_dtype=torch.float32) for weight in weights][-1]

    return Shape(GEMVS, key, device, f"output head: {_title(key)}", call, copies)


def _title(matrix: GemvKey) -> str:
    return f"matrix of {'2 x ' if matrix.gated else ''}{matrix.rows:,} x {matrix.size:,}"

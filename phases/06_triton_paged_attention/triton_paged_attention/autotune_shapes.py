"""What `--autotune` can tune for a model: kernels on random data of the model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from common.models.config import ModelConfig
from forward.loading import random_model
from paged_cache import BlockPool

from .attention import TritonPagedAttention
from .batch import fixed_batch
from .decode import Workspace, paged_decode
from .gemv import gemv
from .layers import FusedBlock
from .prefill import paged_prefill, query_tiles
from .surgery import optimize
from .tuning import (
    decode_config,
    gemv_config,
    heads_config,
    multiprocessors,
    prefill_config,
    single_config,
)

CACHE_BYTES = 120e6
"""Data is repeated in memory until it is this large: more than twice the L2 cache of an H200."""
BLOCK_SIZE = 64
"""That of the cache, as `load` chooses it on a GPU. The kernels' tiles need not divide it."""


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


def shapes(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, batches: Sequence[int], context: int
) -> Iterator[Shape]:
    """What a model of this configuration can be tuned for, with random data; memory is freed in between."""
    for batch in batches:
        yield decode_shape(model, device, dtype, batch, context)
    yield prefill_shape(model, device, dtype, context)
    yield from step_shapes(model, device, dtype, max(1, context // 2))
    yield head_shape(model, device, dtype)


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
    matrices = [(q + 2 * kv, hidden, False), (inner, hidden, True), (hidden, inner, False)]
    if heads_config(hidden, q) is None:  # or the output projection has a kernel of its own
        matrices.append((hidden, q, False))
    weights = hidden * (2 * q + 2 * kv + 3 * inner)
    layers = min(model.num_layers, _copies(weights * dtype.itemsize, device))
    some = replace(model, num_layers=layers, sliding_windows=model.sliding_windows[:layers], vocab_size=64)
    built = optimize(random_model(some, device=device, dtype=dtype))
    if not any(isinstance(module, FusedBlock) and module.single for module in built.modules()):
        return
    blocks = -(-context // BLOCK_SIZE)
    pool = BlockPool(some, blocks, BLOCK_SIZE, device=device, dtype=dtype)
    pool.data.normal_()
    attention = TritonPagedAttention(pool, model.num_heads)
    batch = fixed_batch(1, blocks, device)
    batch.block_tables.copy_(torch.randperm(blocks)[None])
    batch.context_lens.fill_(context)
    batch.positions.fill_(context - 1)
    batch.slots.fill_(-1)  # the newest key is not stored

    @torch.inference_mode()
    def call() -> Tensor:
        attention.begin(batch)
        return built(batch.input_ids, batch.positions, attention)

    d_pad = max(16, triton.next_power_of_2(model.head_dim))
    default = single_config.table(model.num_kv_heads, d_pad, dtype.itemsize, device)
    at = {"kv_heads": model.num_kv_heads, "d_pad": d_pad, "itemsize": dtype.itemsize}
    yield Shape("single", f"a layer of one token: attention, {context:,} keys", at, default, call, layers, 32)
    for rows, size, gated in dict.fromkeys(matrices):
        gemv_default = gemv_config.table(rows, size, gated)
        title = f"a layer of one token: {_matrix(rows, size, gated)}"
        gemv_at = {"rows": rows, "size": size, "gated": gated}
        yield Shape("gemv", title, gemv_at, gemv_default, call, layers)


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


def head_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Shape:
    """The output head's matrix-vector product, which is long enough to be timed by itself."""
    rows, size = model.vocab_size, model.hidden_size
    copies = _copies(rows * size * dtype.itemsize, device)
    weights = [torch.randn(rows, size, device=device, dtype=dtype) / size**0.5 for _ in range(copies)]
    x = torch.randn(1, size, device=device, dtype=dtype)

    def call() -> Tensor:
        return [gemv(x, weight, out_dtype=torch.float32) for weight in weights][-1]

    at = {"rows": rows, "size": size, "gated": False}
    default = gemv_config.table(rows, size, False)
    return Shape("gemv", f"output head: {_matrix(rows, size, False)}", at, default, call, copies)


def _matrix(rows: int, size: int, gated: bool) -> str:
    return f"matrix of {'2 x ' if gated else ''}{rows:,} x {size:,}"

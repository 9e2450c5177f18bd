"""What `--autotune` can tune for a model: kernels on random data of the model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from common.config import ModelConfig
from forward.attention import LayerSpec

from .decode import Workspace, paged_decode
from .gemv import gemv
from .prefill import paged_prefill, query_tiles
from .single import attend_single, project_heads
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
    yield single_shape(model, device, dtype, max(1, context // 2))
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


def single_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype, context: int) -> Shape:
    """Attention of a lone token and the output projection behind it, which combines the splits."""
    k, v, tables = _cache(model, device, dtype, 1, context)
    heads, kv_heads, d = model.num_heads, model.num_kv_heads, model.head_dim
    layer = LayerSpec(0, heads, kv_heads, d, model.attention_scale)
    qkv = torch.randn(1, (heads + 2 * kv_heads) * d, device=device, dtype=dtype)
    cos, sin = torch.randn(2, d, device=device)
    lens = torch.tensor([context], dtype=torch.int32, device=device)
    slots = torch.tensor([-1], device=device)  # the newest key is not stored
    weight = torch.randn(model.hidden_size, heads * d, device=device, dtype=dtype) / (heads * d) ** 0.5
    residual = torch.randn(1, model.hidden_size, device=device, dtype=dtype)
    d_pad = max(16, triton.next_power_of_2(d))
    most = 32
    workspace = Workspace(2 * most * heads, d_pad, device)
    projection = heads_config(*weight.shape)

    def call() -> Tensor:
        config = single_config(kv_heads, d_pad, dtype.itemsize, device)
        out = residual
        for table in tables:
            out = attend_single(
                qkv, (cos, sin), None, layer, (k, v), table, lens, slots,
                workspace=workspace, config=config, meet=projection is None,
            )  # fmt: skip
            if projection is not None:
                out = project_heads(
                    residual, weight, None, layer, lens,
                    workspace=workspace, config=config, shape=projection,
                )  # fmt: skip
        return out

    default = single_config.table(kv_heads, d_pad, dtype.itemsize, device)
    at = {"kv_heads": kv_heads, "d_pad": d_pad, "itemsize": dtype.itemsize}
    return Shape("single", f"a lone token, 1 x {context:,}", at, default, call, len(tables), most)


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

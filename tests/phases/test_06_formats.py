"""Caches in another format than the model's: other dtypes, and scales per head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from continuous.rows import RequestRows
from forward.attention import LayerSpec
from forward.shapes import SHAPES
from paged_cache import BlockPool, KVFormat, LayerBlocks, PagedCache, TorchPagedAttention
from paged_cache.attention import PagedAttention, encode
from paged_cache.reference import paged_attention
from tests.paged_batches import (
    DEVICE,
    FEATURES,
    Batch,
    assert_attention,
    assert_near,
    make,
    step_of,
)
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.decode import paged_decode
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import DecodeConfig, PrefillConfig

pytestmark = pytest.mark.usefixtures("poison")
HEADS = 4
KV_HEADS = 2
D = 16
SCALES = torch.tensor([[0.03, 0.05], [0.04, 0.07]])
"""Of keys and values, for each key/value head: what 127 times it can hold is a normal number's size."""
FORMATS = {
    "int8": (torch.int8, True),
    "float16, scaled": (torch.float16, True),
    "float16": (torch.float16, False),
}


def in_format(batch: Batch, name: str) -> Batch:
    """The same keys and values as they are stored in a format; what may not be read is as large as can be."""
    dtype, scaled = FORMATS[name]
    scales = SCALES.to(DEVICE).unbind() if scaled else (None, None)
    stored = (
        encode(x.nan_to_num(nan=1e4), scale, dtype)
        for x, scale in zip(batch.cache[:2], scales, strict=True)
    )
    return replace(batch, cache=LayerBlocks(*stored, *scales))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.slow
def test_decode_reads_every_format(name: str, feature: str, splits: int) -> None:
    batch = in_format(make([1, 17, 60], heads=(HEADS, KV_HEADS), d=D), name)
    config = DecodeConfig(block_n=16, splits=splits)
    got = paged_decode(batch.layer(**FEATURES[feature]), *batch.arguments, config=config)
    assert_attention(
        batch, got, 2e-6, f"decode, {name}, {feature}, {splits} splits", **FEATURES[feature]
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("feature", ["plain", "window"])
@pytest.mark.slow
def test_prefill_reads_every_format(name: str, feature: str, tma: bool) -> None:
    contexts, queries = [1, 37, 50], [1, 20, 50]
    batch = in_format(make(contexts, queries, heads=(HEADS, KV_HEADS), d=D), name)
    tiles = torch.from_numpy(query_tiles(queries, contexts, 16)).to(DEVICE)
    config = PrefillConfig(block_m=32, block_n=16, tma=tma)
    q, cache, tables, _ = batch.arguments
    layer, out = batch.layer(**FEATURES[feature]), torch.empty_like(q)
    got = paged_prefill(layer, q, cache, tables, tiles, config, out)
    assert_attention(
        batch, got, 2e-6, f"prefill, {name}, {feature}, TMA {tma}", **FEATURES[feature]
    )


@pytest.mark.parametrize("name", FORMATS)
def test_both_stores_write_the_same_numbers(name: str) -> None:
    """And padding, whose slot is negative, nothing; too large a number is the largest that there is."""
    dtype, scaled = FORMATS[name]
    k, v = torch.randn(2, 4, KV_HEADS, D, device=DEVICE)
    k[0, 0, 0], v[1, 1, 3] = 1e4, -1e4
    slots = torch.tensor([5, 0, -1, 23], device=DEVICE)
    scales = SCALES.to(DEVICE).unbind() if scaled else (None, None)
    cache = LayerBlocks(
        *torch.zeros(2, 6, 4, KV_HEADS, D, device=DEVICE, dtype=dtype), *scales
    )
    kv_store(k, v, cache, slots)
    for stored, new, scale in zip(cache[:2], (k, v), scales, strict=True):
        wanted = torch.zeros(24, KV_HEADS, D, device=DEVICE, dtype=dtype)
        wanted[[5, 0, 23]] = encode(new, scale, dtype)[[0, 1, 3]]
        slot = (stored.flatten(0, 1) != wanted).flatten(1).any(1).nonzero().flatten().tolist()
        assert not slot, (
            f"slots {slot} are not what was stored in slots 5, 0 and 23 in the format {name}"
        )


def step(attention: PagedAttention, lens: list[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths through an attention object, and what the oracle says of its cache."""
    rows, cache = (
        RequestRows(len(lens), 33, DEVICE),
        PagedCache(len(lens), 33, 2 * len(lens), 16),
    )
    batch, generator = (
        step_of(rows, cache, [(0, count) for count in lens]),
        torch.Generator().manual_seed(1),
    )
    q, k, v = (
        torch.randn(sum(lens), heads, D, generator=generator).to(DEVICE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attention.begin(batch)
    got = attention(LayerSpec(0, HEADS, KV_HEADS, D, 0.2), q, k, v)
    tables, starts = batch.block_tables, batch.query_starts
    stored = attention.pool.layers[0]
    return got, paged_attention(q, stored, tables, starts, batch.context_lens, scale=0.2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", [TorchPagedAttention, TritonPagedAttention])
def test_a_step_attends_to_what_it_has_stored(
    name: str, backend: type[PagedAttention]
) -> None:
    """Also prompts, whose keys torch has in hand: as they are stored, so that every phase says the same."""
    dtype, scaled = FORMATS[name]
    config = replace(
        SHAPES["tiny"], num_layers=1, sliding_windows=(None,), num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=D,
    )  # fmt: skip
    kv = KVFormat(dtype, SCALES[None] if scaled else None)
    pool = BlockPool(config, 6, 16, device=torch.device(DEVICE), dtype=torch.float32, kv=kv)
    attention = (
        backend(pool) if backend is TorchPagedAttention else TritonPagedAttention(pool, HEADS)
    )
    got, wanted = step(attention, [20, 1, 9])
    assert_near(
        got, wanted, 1e-5, f"attention [token, head, number] over what was stored as {name}"
    )
    assert not pool.exact

"""Values of e4m3 in pairs: attention reads them as it reads values one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forward.attention import LayerSpec
from paged_cache.pool import LayerBlocks
from phases.appendix.quant_kernels.pairs import PAIRS
from tests.quant_layers import DEVICE, DTYPE, assert_close
from triton_paged_attention.decode import paged_decode
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.kernels.rope import HeadNorms, ProductScales, norm_rope
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import DecodeConfig, PrefillConfig

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.slow,
]  # a minute in the interpreter


QUICK = {(16, 16), (40, 6), (40, 2)}
"""Sizes of heads and blocks that are tried every time: the interpreter takes its time."""


def caches(
    lens: list[int], size: int, kv_heads: int, d: int, rng: torch.Generator
) -> tuple[LayerBlocks, LayerBlocks, Tensor]:
    """The same keys and values one by one and in pairs, and the block tables that both have."""
    per = [-(-n // size) for n in lens]
    tables = torch.full((len(lens), max(per) + 1), 10**6, dtype=torch.int32)
    order, at = torch.randperm(sum(per)).to(torch.int32), 0
    for row, count in enumerate(per):
        tables[row, :count], at = order[at : at + count], at + count
    scales = torch.rand(2, kv_heads, device=DEVICE, generator=rng) / 50 + 0.01
    shape = (sum(per), size, kv_heads, d)
    made = []
    for paired in (False, True):
        data = torch.full((2, *shape), float("nan"), device=DEVICE).to(torch.float8_e4m3fn)
        if paired:  # the other half of a pair is multiplied by 0: it may be anything that `kv_store` stores
            data[1] = 448.0
        made.append(LayerBlocks(data[0], data[1], *scales, PAIRS if paired else None))
    for row, n in enumerate(lens):
        k, v = torch.randn(2, n, kv_heads, d, device=DEVICE, generator=rng).to(DTYPE)
        places = torch.arange(n)
        slots = (tables[row, places // size].long() * size + places % size).to(DEVICE)
        for cache in made:
            kv_store(k, v, cache, slots)
    return made[0], made[1], tables.to(DEVICE)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("d", "size", "block_n"),
    [
        pytest.param(d, size, block_n, marks=[] if (d, size) in QUICK else [pytest.mark.long])
        for d in (16, 40, 64)
        for size, block_n in ((16, 16), (32, 16), (6, 16), (2, 32))
    ],
)
def test_attention_reads_values_in_pairs(
    d: int, size: int, block_n: int, window: int | None, rng: torch.Generator
) -> None:
    lens = [1, 2, 33, 40, 7]
    queries = [1, 1, 1, 1, 1]
    heads = 6
    kv_heads = 2
    one, two, tables = caches(lens, size, kv_heads, d, rng)
    contexts = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(lens), heads, d, device=DEVICE, generator=rng).to(DTYPE)
    spec = LayerSpec(0, heads, kv_heads, d, d**-0.5, window)
    for splits in (1, 4):
        config = DecodeConfig(block_n, 2, 2, splits)
        found, wanted = (
            paged_decode(spec, q, cache, tables, contexts, config=config)
            for cache in (two, one)
        )
        assert_close(found, wanted, f"decode, {splits} splits")
    queries = [1, 2, 20, 5, 7]
    q = torch.randn(sum(queries), heads, d, device=DEVICE, generator=rng).to(DTYPE)
    tiles = torch.from_numpy(query_tiles(queries, lens, 16 // (heads // kv_heads))).to(DEVICE)
    config = PrefillConfig(16, block_n, 2, 2)
    found, wanted = (
        paged_prefill(spec, q, cache, tables, tiles, config, torch.empty_like(q))
        for cache in (two, one)
    )
    assert_close(found, wanted, "prefill")


@pytest.mark.parametrize("paired", [False, True])
def test_rope_stores_in_the_caches_format(paired: bool, rng: torch.Generator) -> None:
    """A pending projection, normalized, rotated and stored at once, as if each were done by itself."""
    tokens = 5
    heads = 4
    kv_heads = 2
    d = 24
    size = 4
    spec = LayerSpec(0, heads, kv_heads, d, d**-0.5)
    columns = (heads + 2 * kv_heads) * d
    values = torch.randn(tokens, columns, device=DEVICE, generator=rng).to(DTYPE)
    rows, each = (torch.rand(n, device=DEVICE, generator=rng) + 0.5 for n in (tokens, columns))
    angles = torch.randn(tokens, d // 2, device=DEVICE, generator=rng)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE, generator=rng).to(DTYPE), 1e-6)
    slots = torch.tensor([3, 0, 7, -1, 9], device=DEVICE)
    scales = torch.rand(2, kv_heads, device=DEVICE, generator=rng) / 50 + 0.01
    made = []
    for _ in range(2):
        data = torch.zeros(2, 3, size, kv_heads, d, device=DEVICE).to(torch.float8_e4m3fn)
        made.append(LayerBlocks(data[0], data[1], *scales, PAIRS if paired else None))
    pending = ProductScales(rows, each, DTYPE)
    q = norm_rope(spec, values, (cos, sin), made[0], slots, norms, pending)
    product = (values.float() * rows[:, None] * each).to(DTYPE)
    plain = LayerBlocks(*torch.zeros(2, 2, size, kv_heads, d, device=DEVICE, dtype=DTYPE))
    every = torch.arange(tokens, device=DEVICE)
    wanted = norm_rope(spec, product, (cos, sin), plain, every, norms)
    k, v = (part.flatten(0, 1)[:tokens] for part in plain[:2])
    kv_store(k, v, made[1], slots)
    assert_close(q, wanted, "queries")
    assert torch.equal(made[0].k.view(torch.uint8), made[1].k.view(torch.uint8)), "keys"
    assert torch.equal(made[0].v.view(torch.uint8), made[1].v.view(torch.uint8)), "values"

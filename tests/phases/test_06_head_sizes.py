"""Every kernel of phase 06 over all sizes of a head, in memory full of NaN.

A head is padded to a power of two. Who reads the padding, or what lies behind a row, is found out only where
there is padding: so here are all sizes that models have, in the interpreter or natively on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from forward.attention import LayerSpec
from paged_cache import LayerBlocks
from tests.head_sizes import HEADS, KV_HEADS, QUICK, angles, by_torch, each_size
from tests.paged_batches import (
    CUDA,
    DEVICE,
    FEATURES,
    TOLERANCE,
    assert_attention,
    assert_near,
    make,
    walled,
)
from triton_paged_attention.decode import paged_decode
from triton_paged_attention.decode_v1 import paged_decode_v1
from triton_paged_attention.decode_v2 import paged_decode_v2
from triton_paged_attention.decode_v3 import paged_decode_v3
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.kernels.rope import HeadNorms, norm_rope
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import DecodeConfig, PrefillConfig

pytestmark = pytest.mark.usefixtures("poison")

DECODES: dict[str, Callable[..., Tensor]] = {
    "v1": paged_decode_v1,
    "v2": partial(paged_decode_v2, block_n=16),
    "v3": partial(paged_decode_v3, block_n=16, splits=3),
    "v4, whole": partial(paged_decode, config=DecodeConfig(block_n=16)),
    "v4, split": partial(paged_decode, config=DecodeConfig(block_n=16, splits=3)),
}


@each_size
@pytest.mark.parametrize("version", DECODES)
@pytest.mark.slow
def test_decode(version: str, d: int, dtype: torch.dtype) -> None:
    if CUDA and version in ("v1", "v2", "v3") and d not in QUICK:
        pytest.skip("the first versions are for reading, and take a second each to compile")
    batch = make([1, 40], heads=(HEADS, KV_HEADS), d=d, block=4 if d % 16 else 64, dtype=dtype)
    out = DECODES[version](batch.layer(**FEATURES["window"]), *batch.arguments)
    assert_attention(
        batch, out, TOLERANCE[dtype], f"{version}, heads of {d}", **FEATURES["window"]
    )


@each_size
def test_prefill(d: int, dtype: torch.dtype) -> None:
    contexts, queries = [20, 40], [20, 7]
    batch = make(contexts, queries, heads=(HEADS, KV_HEADS), d=d, dtype=dtype)
    tiles = torch.from_numpy(query_tiles(queries, contexts, 32 // (HEADS // KV_HEADS))).to(
        DEVICE
    )
    out = torch.full_like(batch.q, float("nan"))
    config = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
    paged_prefill(batch.layer(), *batch.arguments[:3], tiles, config, out)
    assert_attention(batch, out, TOLERANCE[dtype], f"prefill, heads of {d}")


@each_size
def test_norm_rope_and_both_stores(d: int, dtype: torch.dtype) -> None:
    layer = LayerSpec(0, HEADS, KV_HEADS, d, 1.0)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * d, device=DEVICE, dtype=dtype)
    cos, sin = angles(3, d)
    # No norm, one, and one whose weights have more digits than its input.
    weights = torch.randn(2, d, device=DEVICE, dtype=torch.float32 if d % 16 == 0 else dtype)
    norms = None if d in (16, 128) else HeadNorms(*weights, 1e-6)
    wanted = by_torch(qkv, cos, sin, d, norms)
    inside = norms and HeadNorms(walled(weights[0]), walled(weights[1]), norms.eps)
    slots = torch.tensor([5, -1, 23], device=DEVICE)
    fused, apart = (
        LayerBlocks(*torch.full((2, 6, 4, KV_HEADS, d), 7.0, device=DEVICE, dtype=dtype))
        for _ in range(2)
    )
    around = walled(cos), walled(sin)
    got = norm_rope(layer, walled(qkv), around, fused, slots, inside)
    assert_near(got, wanted[0], TOLERANCE[dtype], f"heads of {d}: q [token, head, number]")
    kv_store(walled(wanted[1]), walled(wanted[2]), apart, slots)
    for stored, mine, theirs in zip("kv", fused, apart, strict=False):
        what = (
            f"heads of {d}: {stored} by norm_rope and by kv_store [block, token, head, number]"
        )
        assert_near(mine, theirs, TOLERANCE[dtype], what)
    others = [slot for slot in range(24) if slot not in (5, 23)]
    for part in fused[:2]:
        assert (part.flatten(0, 1)[others] == 7.0).all(), (
            f"heads of {d}: padding, slot -1, was stored"
        )
        assert (part.flatten(0, 1)[[5, 23]] != 7.0).any(-1).all(), (
            f"heads of {d}: a head was not stored"
        )

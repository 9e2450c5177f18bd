"""Kernels for one token over all sizes of a head, in memory full of NaN."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from forward.attention import LayerSpec
from paged_cache import LayerBlocks
from phases.appendix.latency.heads import project_heads
from phases.appendix.latency.lone import attend_lone
from phases.appendix.latency.tables import HeadsConfig, LoneConfig
from tests.head_sizes import HEADS, KV_HEADS, angles, by_torch, each_size
from tests.paged_batches import DEVICE, TOLERANCE, assert_near, expected, make, walled
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.rope import HeadNorms

pytestmark = pytest.mark.usefixtures("poison")


@each_size
@pytest.mark.parametrize("meet", [False, True], ids=["combined in the projection", "combined by the last"])
@pytest.mark.slow
def test_a_lone_token(meet: bool, d: int, dtype: torch.dtype) -> None:
    """From the QKV projection through attention to the residual, 40 keys in three of four splits."""
    context, size = 40, 24
    batch = make([context], heads=(HEADS, KV_HEADS), d=d, dtype=dtype)
    layer = LayerSpec(0, HEADS, KV_HEADS, d, 0.2)
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * d, device=DEVICE, dtype=dtype)
    cos, sin = angles(1, d)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE, dtype=dtype), 1e-6, True)
    weight = torch.randn(size, HEADS * d, device=DEVICE, dtype=dtype) / d
    bias, residual = torch.randn(2, 1, size, device=DEVICE, dtype=dtype)
    slots = batch.tables[0, [(context - 1) // 16]].long() * 16 + (context - 1) % 16

    workspace = Workspace(4 * HEADS * 2, max(16, 1 << (d - 1).bit_length()), DEVICE)
    cache = LayerBlocks(batch.cache.k.clone(), batch.cache.v.clone())
    inside = HeadNorms(walled(norms.q_weight), walled(norms.k_weight), norms.eps, norms.one_plus)
    parts = attend_lone(
        walled(qkv), (walled(cos), walled(sin)), inside, layer, cache,
        batch.tables, batch.context_lens, slots,
        workspace=workspace, config=LoneConfig(block_n=16, splits=4), meet=meet,
    )  # fmt: skip

    batch.q, k, v = by_torch(qkv, cos, sin, d, norms)
    for name, mine, stored, new in zip("kv", cache, batch.cache, (k, v), strict=False):
        at = batch.tables[0, (context - 1) // 16], (context - 1) % 16
        stored[at] = new[0]
        assert_near(mine[at], stored[at], TOLERANCE[dtype], f"heads of {d}: the newest {name} in the cache")
    attended = expected(batch)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    if meet:
        assert_near(
            parts.out.view_as(attended), attended, limit, f"heads of {d}: attention [token, head, number]"
        )
        return
    got = project_heads(
        walled(residual), walled(weight), walled(bias[0]), parts, shape=HeadsConfig(rows=8, chunk=2)
    )
    product = attended.to(dtype).float().flatten(1) @ weight.float().t() + bias.float() + residual.float()
    assert_near(got, product, limit, f"heads of {d}: projection [token, number]")

"""Every kernel of phases 06 and 09 over all sizes of a head, in memory full of NaN.

A head is padded to a power of two. Who reads the padding, or what lies behind a row, is found out only where
there is padding: so here are all sizes that models have, in the interpreter or natively on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from cuda_graphs.latency.few import few
from cuda_graphs.latency.gemv import gemv
from cuda_graphs.latency.heads import project_heads
from cuda_graphs.latency.lone import attend_lone
from cuda_graphs.latency.tables import GemvConfig, HeadsConfig, LoneConfig
from forward.attention import LayerSpec
from paged_cache import LayerCache
from tests.paged_batches import (
    CUDA,
    DEVICE,
    FEATURES,
    TOLERANCE,
    assert_attention,
    assert_near,
    expected,
    make,
    walled,
)
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.kernels.kv_store import kv_store
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms, norm_rope
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import DecodeConfig, PrefillConfig
from triton_paged_attention.versions.decode_v1 import paged_decode_v1
from triton_paged_attention.versions.decode_v2 import paged_decode_v2
from triton_paged_attention.versions.decode_v3 import paged_decode_v3

pytestmark = pytest.mark.usefixtures("poison")

SIZES = (8, 16, 24, 40, 48, 64, 80, 96, 100, 112, 128, 160, 192, 256)
QUICK = {8, 80, 100}
"""Sizes that are tried every time: padding by half and more, and a size that 8 does not divide."""


def dtypes(d: int) -> tuple[torch.dtype, ...]:
    """In the interpreter float32. Natively each is compiled by itself, so few sizes have two."""
    if not CUDA:
        return (torch.float32,)
    return (torch.bfloat16, torch.float32) if d in QUICK else (torch.bfloat16,)


each_size = pytest.mark.parametrize(
    ("d", "dtype"),
    [
        pytest.param(d, dtype, marks=() if d in QUICK else pytest.mark.slow, id=f"{d}-{str(dtype)[6:]}")
        for d in SIZES
        for dtype in dtypes(d)
    ],
)
HEADS, KV_HEADS = 6, 2  # a group of three, which is padded as well

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
    batch = make([1, 40], heads=(HEADS, KV_HEADS), d=d, dtype=dtype)
    out = DECODES[version](*batch.arguments, scale=0.2, **FEATURES["window"])
    assert_attention(batch, out, TOLERANCE[dtype], f"{version}, heads of {d}", **FEATURES["window"])


@each_size
def test_prefill(d: int, dtype: torch.dtype) -> None:
    contexts, queries = [20, 40], [20, 7]
    batch = make(contexts, queries, heads=(HEADS, KV_HEADS), d=d, dtype=dtype)
    tiles = torch.from_numpy(query_tiles(queries, contexts, 32 // (HEADS // KV_HEADS))).to(DEVICE)
    out = torch.full_like(batch.q, float("nan"))
    config = PrefillConfig(block_m=32, block_n=16, num_warps=4, num_stages=2)
    paged_prefill(*batch.arguments[:3], tiles, scale=0.2, out=out, config=config)
    assert_attention(batch, out, TOLERANCE[dtype], f"prefill, heads of {d}")


def angles(tokens: int, d: int) -> tuple[Tensor, Tensor]:
    """`[T, D]` cosines and sines, the first half of the sines negated."""
    angle = torch.randn(tokens, d // 2, device=DEVICE)
    return torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)


def by_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, d: int, norms: HeadNorms
) -> tuple[Tensor, Tensor, Tensor]:
    """What `norm_rope` gives, rounded where a norm and a rotation apart round."""
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split([HEADS * d, KV_HEADS * d, KV_HEADS * d], -1))

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        x = F.rms_norm(x.float(), (d,), weight.float() + norms.one_plus, norms.eps).to(x.dtype).float()
        return (x * cos[:, None] + x.roll(d // 2, -1) * sin[:, None]).to(qkv.dtype)

    return rotated(q, norms.q_weight), rotated(k, norms.k_weight), v


@each_size
def test_norm_rope_and_both_stores(d: int, dtype: torch.dtype) -> None:
    layer = LayerSpec(0, HEADS, KV_HEADS, d, 1.0)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * d, device=DEVICE, dtype=dtype)
    cos, sin = angles(3, d)
    norms = HeadNorms(*torch.randn(2, d, device=DEVICE, dtype=dtype), 1e-6, True)
    wanted = by_torch(qkv, cos, sin, d, norms)
    inside = HeadNorms(walled(norms.q_weight), walled(norms.k_weight), norms.eps, norms.one_plus)
    got = norm_rope(walled(qkv), walled(cos), walled(sin), layer, norms=inside)
    for name, mine, theirs in zip("qkv", got, wanted, strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype], f"heads of {d}: {name} [token, head, number]")
    slots = torch.tensor([5, -1, 23], device=DEVICE)
    fused, apart = (
        LayerCache(*torch.full((2, 6, 4, KV_HEADS, d), 7.0, device=DEVICE, dtype=dtype)) for _ in range(2)
    )
    norm_rope(walled(qkv), walled(cos), walled(sin), layer, norms=inside, cache=fused, slots=slots)
    kv_store(walled(got[1]), walled(got[2]), apart, slots)
    for stored, mine, theirs in zip("kv", fused, apart, strict=False):
        what = f"heads of {d}: {stored} by norm_rope and by kv_store [block, token, head, number]"
        assert_near(mine, theirs, TOLERANCE[dtype], what)
    others = [slot for slot in range(24) if slot not in (5, 23)]
    for part in fused[:2]:
        assert (part.flatten(0, 1)[others] == 7.0).all(), f"heads of {d}: padding, slot -1, was stored"
        assert (part.flatten(0, 1)[[5, 23]] != 7.0).any(-1).all(), f"heads of {d}: a head was not stored"


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
    cache = LayerCache(batch.cache.k.clone(), batch.cache.v.clone())
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


@each_size
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_projections_of_one_token_and_of_few(
    tokens: int, gate: str | None, d: int, dtype: torch.dtype
) -> None:
    """Matrices of as many columns as six heads have numbers; the kernel for few is for half precision."""
    if tokens > 1 and CUDA and dtype == torch.float32:
        pytest.skip("natively there are no tensor cores for float32")
    size, rows = HEADS * d, 20
    x, norm = torch.randn(tokens, size, device=DEVICE).to(dtype), torch.randn(size, device=DEVICE).to(dtype)
    weight = (torch.randn(2 * rows, size, device=DEVICE) / size**0.5).to(dtype)
    residual = torch.randn(tokens, 2 * rows, device=DEVICE).to(dtype)
    normed = F.rms_norm(x.float(), (size,), norm.float() + 1, 1e-5).to(dtype).float()
    wanted = normed @ weight.float().t()
    given = {"norm": NormWeights(walled(norm), 1e-5, True), "gate": gate}
    if gate is None:
        wanted, given["residual"] = wanted + residual, walled(residual)
    else:
        wanted = F.silu(wanted[:, :rows]) * wanted[:, rows:]
    # Few programs, since each takes the interpreter a millisecond; and more than one sweep where it can be.
    shape = GemvConfig(32, min(256, 1 << (size - 1).bit_length()))
    kernel = partial(gemv, config=shape) if tokens == 1 else few
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    what = f"{tokens} tokens of {size} inputs, {gate or 'no'} gate: output [token, number]"
    assert_near(kernel(walled(x), walled(weight), **given), wanted, limit, what)

"""What calls `attend.cu`: when it fits, and with what."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cuda_graphs.latency.lone import starts_early
from forward.attention import LayerSpec
from paged_cache.pool import LayerCache
from quant.cuda.gemv import MOST_WEIGHTS, WARPS, suits
from quant.cuda.launch import CudaKernel
from quant.weights import QuantizedWeight
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms
from triton_paged_attention.tiles import LOG2_E

PROGRAMS = 8
"""Of a cluster: more than eight not every GPU can run."""
KEYS = 16
"""That a warp takes at a time, and that lie side by side in a block."""


def fits(layer: LayerSpec, weight: QuantizedWeight, cache: LayerCache) -> bool:
    """Whether the kernel can be a layer's: e4m3 with scales by channel, a cache of bfloat16, and sizes."""
    group, rest = divmod(layer.num_heads, layer.num_kv_heads)
    size, d = weight.shape[1], layer.head_dim
    rows, odd = divmod((group + 2) * d, PROGRAMS)
    return (
        suits(weight)
        and layer.soft_cap is None
        and layer.sliding_window is None
        and cache.k.dtype == torch.bfloat16
        and not cache.scaled
        and cache.k.shape[1] % KEYS == 0
        and not rest
        and not odd
        and group <= 8
        and rows % 16 == 0
        and d % 64 == 0
        and rows * size <= MOST_WEIGHTS
        and 2 * rows <= 32 * WARPS
    )


@cache
def kernel(
    layer: tuple[int, int, int, int, int], norms: tuple[bool, bool, bool], rounds: bool, ahead: bool,
    device: torch.device,
) -> CudaKernel:  # fmt: skip
    """The kernel for a shape, compiled once.

    layer: inputs, size of a head, query heads of a key/value head, key/value heads, tokens of a block. norms:
    whether the layer's has distances from 1, whether heads have any, whether theirs has distances.
    """
    names = ["K", "D", "G", "KH", "P", "ONE_PLUS", "HEAD_NORM", "HEAD_ONE_PLUS", "ROUND", "AHEAD"]
    constants = dict(zip(names, (*layer, *norms, rounds, ahead), strict=True))
    constants |= {"CTAS": PROGRAMS, "WARPS": WARPS, "NORM": True}
    return CudaKernel(Path(__file__).with_name("attend.cu"), constants, device)


def attend_cluster(
    x: Tensor,  # [1, K] bfloat16
    norm: NormWeights,
    weight: QuantizedWeight,  # [(H + 2 KH) D, K]
    cos_sin: tuple[Tensor, Tensor],  # D numbers each, float32
    norms: HeadNorms | None,
    layer: LayerSpec,
    cache: LayerCache,  # the new key and value are stored here
    block_tables: Tensor,  # [1, max_blocks] int32
    context_lens: Tensor,  # [1] int32
    slots: Tensor,  # [1] int64; negative: not stored
) -> Tensor:
    """Attention's output `[1, H D]`, its splits combined, of a layer that `fits`."""
    heads, kv_heads, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    norm_weight, eps, one_plus = norm
    q_weight, k_weight, head_eps, head_one_plus = norms if norms is not None else (x, x, 0.0, False)
    call = kernel(
        (weight.shape[1], d, heads // kv_heads, kv_heads, cache.k.shape[1]),
        (one_plus, norms is not None, head_one_plus),
        weight.scheme.activations is not None, starts_early(layer), x.device,
    )  # fmt: skip
    out = torch.empty(1, heads * d, dtype=x.dtype, device=x.device)
    call(
        kv_heads * PROGRAMS, WARPS * 32,
        out, x, norm_weight, weight.data, weight.scale, *cos_sin, q_weight, k_weight, cache.k, cache.v,
        block_tables, block_tables.shape[1], context_lens, slots, eps, head_eps, layer.scale * LOG2_E.value,
        *cache.k.stride()[:3],
    )  # fmt: skip
    return out

"""Keys and values in eight bits: what a head's numbers are divided by, to use the range there is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from paged_cache.pool import largest

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROOM = {"fp8": 2.0, "int8": 1.1}
"""How much larger than all that were seen a key may be: a float loses nothing by it, int8 a tenth."""
SAMPLE = 256
"""Tokens that scales are taken from while an engine is made."""


def sample(model: Model) -> list[int]:
    """`SAMPLE` tokens from all over the vocabulary, the same every time.

    What is large in keys is large for every token: a few channels that the rotation hardly turns, and biases.
    """
    generator = torch.Generator().manual_seed(0)
    count = min(SAMPLE, model.max_len)
    found = torch.randint(model.config.vocab_size, (count,), generator=generator)
    if model.config.bos_token_id is not None:
        found[0] = model.config.bos_token_id  # the first token is unlike all others
    tokens: list[int] = found.tolist()
    return tokens


def head_scales(model: Model, texts: Sequence[Sequence[int]], kind: str) -> Tensor:
    """Scales `[L, 2, KH]` float32 with which the keys and values of `texts` fit into `kind`, with `ROOM`."""
    seen = HeadMaxima(model)
    with torch.inference_mode():
        for tokens in texts:
            ids = torch.tensor(list(tokens), device=model.device)
            model(ids, torch.arange(len(ids), device=model.device), seen)
    scales = seen.largest * (ROOM[kind] / largest(KV_DTYPES[kind]))
    return scales.clamp_min(torch.finfo(torch.float32).tiny).clone()


class HeadMaxima(RecomputeAttention):
    """Phase 01's attention, which remembers the largest key and value of every head: `[L, 2, KH]`."""

    def __init__(self, model: Model) -> None:
        config = model.config
        self.largest = torch.zeros(
            config.num_layers, 2, config.num_kv_heads, device=model.device
        )

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [S, H, D]`, `k` and `v [S, KH, D]` -> `[S, H, D]`."""
        for side, x in enumerate((k, v)):
            most = x.float().abs().amax(dim=(0, 2))
            self.largest[layer.index, side] = self.largest[layer.index, side].maximum(most)
        return super().__call__(layer, q, k, v)

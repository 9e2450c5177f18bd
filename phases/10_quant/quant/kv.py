"""Scales for keys and values in eight bits: each head has its own, to use the range of the format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from paged_cache.pool import largest

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
ROOM = {"fp8": 2.0, "int8": 1.1}
"""Factor by which a key may exceed the largest of the sample; int8 loses a tenth of its steps by it."""
SAMPLE = 256
"""Most tokens from which scales are computed when an engine is made."""


def sample(model: Model) -> list[int]:
    """Return 256 random token ids (fewer for a short context), the same at each call; BOS comes first.

    They suffice to find scales of keys: what makes keys large does so for every token (channels that RoPE
    hardly rotates, and biases).
    """
    generator = torch.Generator().manual_seed(0)
    count = min(SAMPLE, model.max_len)
    found = torch.randint(model.config.vocab_size, (count,), generator=generator)
    if model.config.bos_token_id is not None:
        found[0] = model.config.bos_token_id  # the first token is unlike all others
    tokens: list[int] = found.tolist()
    return tokens


def head_scales(model: Model, texts: Sequence[Sequence[int]], kind: str) -> Tensor:
    """Return scales `[L, 2, KH]` float32 of keys and values by layer and head, for a cache in 8 bits.

    Each is a head's largest magnitude in `texts`, times a margin (2 for fp8, 1.1 for int8: other texts may
    have larger ones), divided by the format's largest number.

    Args:
        texts: token ids, each text by itself.
        kind: the format of the cache, "fp8" or "int8".
    """
    seen = HeadMaxima(model)
    with torch.inference_mode():
        for tokens in texts:
            ids = torch.tensor(list(tokens), device=model.device)
            model(ids, torch.arange(len(ids), device=model.device), seen)
    scales = seen.largest * (ROOM[kind] / largest(KV_DTYPES[kind]))
    return scales.clamp_min(torch.finfo(torch.float32).tiny).clone()


class HeadMaxima(RecomputeAttention):
    """Attention without a cache that records the largest magnitude of each head's keys and values.

    largest: `[L, 2, KH]` float32; index 0 for keys, 1 for values.
    """

    def __init__(self, model: Model) -> None:
        config = model.config
        self.largest = torch.zeros(
            config.num_layers, 2, config.num_kv_heads, device=model.device
        )

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record magnitudes of a layer's `k` and `v [S, KH, D]`; return attention's output `[S, H, D]`.

        q: `[S, H, D]`, the queries.
        """
        for side, x in enumerate((k, v)):
            most = x.float().abs().amax(dim=(0, 2))
            self.largest[layer.index, side] = self.largest[layer.index, side].maximum(most)
        return super().__call__(layer, q, k, v)

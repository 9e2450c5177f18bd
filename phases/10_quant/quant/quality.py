"""What fewer bits cost: how far a model's predictions move from those of the same model in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from forward.attention import Attention, LayerSpec, RecomputeAttention
from forward.model import Model
from paged_cache.pool import KVFormat, encode

WINDOW = 512
"""Tokens that are read at a time, each window from nothing."""


@dataclass(frozen=True)
class Quality:
    """Over all predicted tokens of a text.

    kl: the mean Kullback-Leibler divergence from the reference's distribution to this one, in nats.
    perplexity: e to the mean negative log probability of the token that came.
    agreement: the share of predictions whose most likely token is the reference's.
    tokens: that were predicted.
    """

    kl: float
    perplexity: float
    agreement: float
    tokens: int


@torch.inference_mode()
def compare(
    reference: Model,
    others: Mapping[str, tuple[Model, Attention]],
    tokens: Sequence[int],
    window: int = WINDOW,
) -> dict[str, Quality]:
    """Quality of each of `others` beside `reference`, which is among the results as ``reference``.

    Args:
        others: by name, a model and the attention that it is to use.
        tokens: of the text; a rest shorter than a window is left out.
    """
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in ("reference", *others)}
    count = 0
    for at in range(0, len(tokens) - window + 1, window):
        ids = torch.tensor(list(tokens[at : at + window]), device=reference.device)
        true = predictions(reference, RecomputeAttention(), ids)
        for name, (model, attention) in (("reference", (reference, None)), *others.items()):
            found = true if attention is None else predictions(model, attention, ids)
            sums[name] += difference(true, found, ids[1:])
        count += window - 1
    return {
        name: Quality(float(kl) / count, exp(float(loss) / count), float(same) / count, count)
        for name, (kl, loss, same) in sums.items()
    }


def predictions(model: Model, attention: Attention, ids: Tensor) -> Tensor:
    """Log probabilities of every token after each but the last of `ids [S]`: `[S - 1, V]`."""
    hidden = model(ids, torch.arange(len(ids), device=ids.device), attention)
    return model.logits(hidden[:-1]).log_softmax(-1)


def difference(true: Tensor, found: Tensor, came: Tensor) -> Tensor:
    """Sums over rows of log probabilities `[R, V]`: divergence, loss on `came [R]`, same first choices."""
    kl = (true.exp() * (true - found)).sum(dtype=torch.float64)
    loss = -found.gather(1, came[:, None]).sum(dtype=torch.float64)
    return torch.stack([kl, loss, (true.argmax(-1) == found.argmax(-1)).sum().double()]).cpu()


class StoredAttention(RecomputeAttention):
    """Phase 01's attention over keys and values that have been through a cache of a format."""

    def __init__(self, kv: KVFormat) -> None:
        assert kv.dtype is not None and kv.scales is not None
        self.dtype, self.scales = kv.dtype, kv.scales

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `RecomputeAttention.__call__`."""
        k, v = (
            (encode(x, scale, self.dtype).float() * scale[:, None]).to(x.dtype)
            for x, scale in zip((k, v), self.scales[layer.index], strict=True)
        )
        return super().__call__(layer, q, k, v)

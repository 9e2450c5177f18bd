"""What fewer bits cost: how far a model's predictions move from those of the same model in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from benchmarks.defined import defined
from forward.attention import Attention, LayerSpec, RecomputeAttention
from forward.model import Model
from paged_cache.attention import encode
from paged_cache.pool import KVFormat
from quant.formats import Scheme
from quant.linear import QuantLinear

WINDOW = 512
"""Tokens that are read at a time, each window from nothing."""
WINDOWS = 4
"""Read at once."""
LOGITS = 1 << 25
"""Compared at a time."""


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


@dataclass(frozen=True)
class Read:
    """What a model made of a text: the states `[R, hidden]` that predict, and a model with its head."""

    hidden: Tensor
    head: Model


@torch.inference_mode()
def compare(
    reference: Model,
    others: Iterable[tuple[str, Model, Attention]],
    tokens: Sequence[int],
    window: int = WINDOW,
) -> dict[str, Quality]:
    """Quality of each of `others` beside `reference`, which is among the results as ``reference``.

    Every model reads the whole text before the next is asked for, so an iterator needs memory for two. Of
    each only last hidden states are kept, a hundredth of the logits: these are made a few rows at a time.

    Args:
        reference: in float32, as the others are where they are not quantized.
        others: name, model, and the attention that it is to use. What heads of one scheme are of is the same
            weight: one is kept.
        tokens: of the text; a rest shorter than a window is left out.
    """
    count = len(tokens) // window
    ids = torch.tensor(list(tokens[: count * window]), device=reference.device).view(
        count, window
    )
    heads: dict[Scheme | None, Model] = {}
    found = {"reference": _read(reference, RecomputeAttention(), ids, heads)}
    for name, model, attention in others:
        found[name] = _read(model, attention, ids, heads)
    came = ids[:, 1:].flatten()
    rows = max(1, LOGITS // reference.config.vocab_size)
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in found}
    for at in range(0, len(came), rows):
        part = slice(at, at + rows)
        true = _predicted(found["reference"], part)
        for name, read in found.items():
            guess = true if name == "reference" else _predicted(read, part)
            sums[name] += difference(true, guess, came[part])
    return {
        name: Quality(
            float(kl) / len(came),
            exp(float(loss) / len(came)),
            float(same) / len(came),
            len(came),
        )
        for name, (kl, loss, same) in sums.items()
    }


def _read(
    model: Model, attention: Attention, ids: Tensor, heads: dict[Scheme | None, Model]
) -> Read:
    """Of `ids [W, window]` all hidden states but each window's last, which predicts nothing that came."""
    exact = defined(model)
    positions = torch.arange(ids.shape[1], device=ids.device)
    hidden = [
        exact(each, positions.expand_as(each), attention)[:, :-1].flatten(0, 1)
        for each in torch.split(ids, WINDOWS)
    ]
    head = heads.setdefault(
        model.lm_head.scheme if isinstance(model.lm_head, QuantLinear) else None, exact
    )
    if head is exact:
        for part in [part for part, _ in exact.named_children() if part != "lm_head"]:
            delattr(exact, part)
    return Read(torch.cat(hidden), head)


def _predicted(read: Read, rows: slice) -> Tensor:
    return read.head.logits(read.hidden[rows]).log_softmax(-1)


def difference(true: Tensor, found: Tensor, came: Tensor) -> Tensor:
    """Sums over rows of log probabilities `[R, V]`: divergence, loss on `came [R]`, same first choices."""
    kl = (true.exp() * (true - found)).sum(-1).sum(dtype=torch.float64)
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

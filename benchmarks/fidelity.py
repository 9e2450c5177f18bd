"""What fewer bits cost: how far a model's predictions move from those of the same model in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp

import torch
from torch import Tensor, nn

from forward.attention import Attention, LayerSpec, RecomputeAttention
from forward.model import Model
from forward.surgery import clone
from paged_cache.attention import encode
from paged_cache.pool import KVFormat
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


@torch.inference_mode()
def compare(
    reference: Model,
    others: Iterable[tuple[str, Model, Attention]],
    tokens: Sequence[int],
    window: int = WINDOW,
) -> dict[str, Quality]:
    """Quality of each of `others` beside `reference`, which is among the results as ``reference``.

    One model is asked for when the one before it is done, so an iterator needs memory for few. Of the
    reference only last hidden states are kept, a hundredth of the logits: these are made in pieces.

    Args:
        reference: in float32, as the others are where they are not quantized.
        others: name, model, and the attention that it is to use.
        tokens: of the text; a rest shorter than a window is left out.
    """
    count = len(tokens) // window
    ids = torch.tensor(list(tokens[: count * window]), device=reference.device)
    ids = ids.view(count, window)
    came = ids[:, 1:].flatten()
    rows = max(1, LOGITS // reference.config.vocab_size)
    plain = RecomputeAttention()
    true = _read(reference, plain, ids)
    found = {}
    for name, model, attention in chain([("reference", reference, plain)], others):
        guess = _read(model, attention, ids)
        total = torch.zeros(3, dtype=torch.float64)
        for at in range(0, len(came), rows):
            part = slice(at, at + rows)
            total += difference(_predicted(true, part), _predicted(guess, part), came[part])
        kl, loss, same = (total / len(came)).tolist()
        found[name] = Quality(kl, exp(loss), same, len(came))
    return found


def _read(model: Model, attention: Attention, ids: Tensor) -> tuple[Model, Tensor]:
    """Of `ids [W, window]` all hidden states but each window's last, which predicts nothing that came."""
    exact = exactly(model)
    positions = torch.arange(ids.shape[1], device=ids.device)
    hidden = [
        exact(each, positions.expand_as(each), attention)[:, :-1].flatten(0, 1)
        for each in torch.split(ids, WINDOWS)
    ]
    return exact, torch.cat(hidden)


def _predicted(read: tuple[Model, Tensor], rows: slice) -> Tensor:
    model, hidden = read
    return model.logits(hidden[rows]).log_softmax(-1)


def difference(true: Tensor, found: Tensor, came: Tensor) -> Tensor:
    """Sums over rows of log probabilities `[R, V]`: divergence, loss on `came [R]`, same first choices."""
    kl = (true.exp() * (true - found)).sum(-1).sum(dtype=torch.float64)
    loss = -found.gather(1, came[:, None]).sum(dtype=torch.float64)
    return torch.stack([kl, loss, (true.argmax(-1) == found.argmax(-1)).sum().double()]).cpu()


class ExactLinear(nn.Module):
    """`QuantLinear` by its definition, so that no device's fastest product is measured."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """See `QuantLinear.exact`."""
        return self.layer.exact(x)


def exactly(model: Model) -> Model:
    """A copy of a float32 model whose quantized layers are multiplied by their definition."""
    model = clone(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            model.set_submodule(name, ExactLinear(layer))
    return model


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

"""How often a sampled draft is accepted: the optimum, and draws with the same noise."""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.noise import negative_exponentials, stream_key


def optimum(p: Tensor, q: Tensor) -> Tensor:
    """Return how often draws of p and q can be the same: 1 - total variation. `[..., V]` -> `[...]`.

    The classical way accepts as often: the sum of q min(1, p / q) is that of min(p, q).
    """
    return torch.minimum(p, q).sum(-1)


def coupled(p: Tensor, q: Tensor, draws: int, seed: int = 0) -> float:
    """Return how often the engine's way accepts: the same noise, hashed from seed, step and token id.

    p, q: `[V]`. draws: how many steps are tried.
    """
    ids = torch.arange(len(p), dtype=torch.int32)
    keys = torch.full((draws,), stream_key(seed))
    noise = negative_exponentials(keys, torch.arange(draws), ids)  # [draws, V]
    return float(((noise / p).argmax(1) == (noise / q).argmax(1)).double().mean())


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """`coupled` without drawing: how often two draws with the same noise are the same, `[..., V]` -> `[...]`.

    With noise E token i wins for p if E_i / p_i is the smallest of all. That it wins for both is a race of
    exponentials, with chance 1 / sum over j of max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh, 2024). Of
    the two the first is the larger one for the tokens j whose p / q is not below that of i: two sums of
    tokens sorted by p / q.
    """
    p, q = p.double(), q.double()
    order = (p / q).nan_to_num(0.0, posinf=torch.inf).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    wins = p * q / (above * q + below.clamp(min=0) * p)  # 1 / (above / p + below / q)
    return wins.nan_to_num(0.0).sum(-1)

"""Routing: which experts a token goes to, with which weights, and which tokens an expert gets.

No shape here depends on what is chosen, and nothing waits for the device: a CUDA graph can record it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's `top_k` most probable experts and their weights; of equal ones the lowest number.

    Probabilities are the softmax over all experts, in float32. The order is by probability and then by
    number, whatever else is in the batch. `torch.topk` promises nothing about ties.

    Args:
        logits: `[T, E]` of the router.
        normalize: let a token's weights sum to 1.

    Returns:
        weights: `[T, top_k]` float32, the probabilities of the chosen experts.
        chosen: `[T, top_k]` int64, their numbers.
    """
    probabilities = torch.softmax(logits.float(), dim=-1)  # [T, E]
    ranked, experts = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, chosen = ranked[:, :top_k], experts[:, :top_k]
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def sort_by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return a batch's choices sorted by expert.

    A choice is a pair of a token and one of its k experts: choice `j` of token `t` has the number `t * k +
    j`.

    Args:
        chosen: `[T, k]`, the number of the expert of each choice.
        count: number of experts, E. An expert that no token chose has no choices in `order`.

    Returns:
        order: `[T k]` int64, the choices of expert 0 first; those of one expert in the order of tokens.
        offsets: `[E + 1]` int64; expert `e` has the entries `offsets[e] : offsets[e + 1]` of `order`.
    """
    experts, order = torch.sort(chosen.flatten(), stable=True)
    edges = torch.arange(count + 1, device=chosen.device)
    return order, torch.searchsorted(experts, edges)

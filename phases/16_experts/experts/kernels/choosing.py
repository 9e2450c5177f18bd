"""The router's choice in one kernel: softmax and the best experts of each token.

In plain torch it is ten small kernels a layer, which take as long as reading the experts of one token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_paged_attention.hardware import dependent_launch


@triton.jit
def route_kernel(
    weights, chosen, logits,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per token; of equal probabilities the lowest number is first."""
    token = tl.program_id(0).to(tl.int64)
    e, place = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + token * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, axis=0))
    left = tl.where(e < E, x / tl.sum(x, axis=0), -1.0)
    found = tl.zeros([K_PAD], tl.float32)
    numbers = tl.zeros([K_PAD], tl.int64)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=0)
        found = tl.where(place == k, tl.max(left, axis=0), found)
        numbers = tl.where(place == k, best.to(tl.int64), numbers)
        left = tl.where(e == best, -1.0, left)
    if NORMALIZE:
        found = found / tl.sum(found, axis=0)
    tl.store(weights + token * TOP_K + place, found, mask=place < TOP_K)
    tl.store(chosen + token * TOP_K + place, numbers, mask=place < TOP_K)


def early(device: torch.device) -> dict[str, Any]:
    """Return what starts a kernel while the last one still ends, where the device can."""
    return {"PDL": True, "launch_pdl": True} if dependent_launch(device) else {"PDL": False}


def route_at_once(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """`routing.route` in one kernel."""
    tokens, count = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    route_kernel[(tokens,)](
        weights, chosen, logits.contiguous(), E=count, E_PAD=triton.next_power_of_2(count),
        TOP_K=top_k, K_PAD=triton.next_power_of_2(top_k), NORMALIZE=normalize, num_warps=1,
        **early(logits.device),
    )  # fmt: skip
    return weights, chosen

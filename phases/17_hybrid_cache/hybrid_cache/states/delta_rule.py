"""The gated delta rule: a layer's memory is one matrix a head, which every token decays, corrects and reads.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464). The
state `S [Dk, Dv]` maps keys to values. A token with key `k`, value `v`, decay `g <= 0` and strength `beta`

    forgets a share of everything              S <- exp(g) S
    writes what the state gets wrong about k   S <- S + k (beta (v - S^T k))^T
    reads                                      o  = S^T q

`recurrence` does this token by token. `scan` does it chunk by chunk with matrix products (Yang et al.,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv 2406.06484). States are
float32: they sum over the whole text.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens whose writes are solved for together."""


class DeltaTokens(NamedTuple):
    """The inputs of the gated delta rule for `S` tokens, in float32.

    q, k: `[..., S, H, Dk]`, for each of `H` heads a vector of length 1; `q` is then scaled by `Dk ** -0.5`.
    v: `[..., S, H, Dv]`.
    decay: `[..., S, H]`, the logarithm of the share of the state that stays.
    beta: `[..., S, H]`, 0 to 1: the share of the state's error about `v` that a token corrects.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def span(self, first: int, last: int) -> DeltaTokens:
        """Return the inputs of the tokens `first .. last - 1` alone."""
        vectors = (x[..., first:last, :, :] for x in self[:3])
        return DeltaTokens(*vectors, *(x[..., first:last, :] for x in self[3:]))


def one_token(state: Tensor, token: DeltaTokens) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one token: the state decays, the token corrects it, the query reads it.

    Args:
        state: `[..., H, Dk, Dv]`.
        token: inputs without the dimension `S`.

    Returns:
        The output `[..., H, Dv]` that the token's query reads, and the new state.
    """
    q, k, v, decay, beta = token
    state = state * decay.exp()[..., None, None]
    known = (state * k.unsqueeze(-1)).sum(-2)  # [..., H, Dv], what the state says of this key
    delta = (v - known) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


def recurrence(state: Tensor, tokens: DeltaTokens) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to one token after another; return outputs `[..., S, H, Dv]` and the new
    state.

    state: `[..., H, Dk, Dv]`, as it is before the first token.
    """
    out = torch.empty_like(tokens.v)
    for i in range(out.shape[-3]):
        vectors = (x[..., i, :, :] for x in tokens[:3])
        token = DeltaTokens(*vectors, *(x[..., i, :] for x in tokens[3:]))
        out[..., i, :, :], state = one_token(state, token)
    return out, state


def scan(state: Tensor, tokens: DeltaTokens, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to `chunk` tokens at a time; return outputs `[..., S, H, Dv]` and the new
    state.

    state: `[..., H, Dk, Dv]`, before the first token. The results equal those of `recurrence`, but for
        rounding.
    """
    length = tokens.v.shape[-3]
    parts = []
    for first in range(0, length, chunk):
        out, state = one_chunk(state, tokens.span(first, min(first + chunk, length)))
        parts.append(out)
    return torch.cat(parts, -3) if parts else torch.empty_like(tokens.v), state


def one_chunk(state: Tensor, tokens: DeltaTokens) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule to `C` tokens at once; return outputs `[..., C, H, Dv]` and the new state.

    state: `[..., H, Dk, Dv]`, before the first token. tokens: their inputs, with `S = C`.
    A token writes `beta (v - what the state says of k)`, and the state holds the writes of the chunk's
    tokens before it. So the writes `W [C, Dv]` solve a triangular system, the WY form of the delta rule:

        (1 + L) W = beta (v - exp(G) k S),    L[i, j] = beta_i exp(G_i - G_j) k_i . k_j   for j < i

    with `G` the running sum of the decays and `S` the state before the chunk.
    """
    q, k, v = (x.transpose(-3, -2) for x in tokens[:3])  # [..., H, C, D]
    total = tokens.decay.transpose(-2, -1).cumsum(
        -1, dtype=torch.float64
    )  # [..., H, C]; differences count
    beta = tokens.beta.transpose(-2, -1).unsqueeze(-1)  # [..., H, C, 1]
    since = total.unsqueeze(-1) - total.unsqueeze(
        -2
    )  # [..., H, C, C]: decay between two tokens
    later = torch.ones_like(since, dtype=torch.bool).triu(1)
    since = (
        since.masked_fill(later, float("-inf")).float().exp()
    )  # masked before exp, which would overflow
    faded = (
        total.float().exp().unsqueeze(-1)
    )  # [..., H, C, 1]: what is left of the state before the chunk

    system = beta * (k @ k.transpose(-1, -2)) * since
    wrong = beta * (v - faded * (k @ state))
    writes = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)

    out = faded * (q @ state) + ((q @ k.transpose(-1, -2)) * since) @ writes
    left = (
        (total[..., -1:] - total).float().exp().unsqueeze(-1)
    )  # what is left of each write at the chunk's end
    state = faded[..., -1:, :] * state + (left * k).transpose(-1, -2) @ writes
    return out.transpose(-3, -2), state


def causal_conv(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a causal convolution over the last `W` tokens to each channel, and then SiLU.

    Args:
        x: `[..., S, C]`, `S` tokens of `C` channels.
        weight: `[C, W]`, the last column for the token itself.
        before: `[..., W - 1, C]`, the inputs of the tokens before; zeros at the beginning of a text.

    Returns:
        `[..., S, C]` in `x`'s dtype, and the last `W - 1` inputs, for the tokens that follow.
    """
    width = weight.shape[1]
    inputs = torch.cat((before.to(x.dtype), x), -2)  # [..., W - 1 + S, C]
    windows = inputs.unfold(-2, width, 1)  # [..., S, C, W]
    out = (windows.float() * weight.float()).sum(-1)
    return F.silu(out).to(x.dtype), inputs[..., inputs.shape[-2] - width + 1 :, :]


def unit(x: Tensor) -> Tensor:
    """Return vectors `x [..., D]` scaled to length 1, in float32; a vector near 0 stays near 0."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

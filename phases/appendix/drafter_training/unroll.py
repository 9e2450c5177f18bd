"""Training as it will be used: the head reads its own hidden states from the second draft on.

A head that is trained on the model's hidden states alone is good at its first draft and lost at its second,
which builds on a hidden state of its own making. So it is unrolled for a few steps: in step j every place has
the head's own output of step j - 1 in place of the model's hidden state, and attends to what a draft in that
place would find in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from phases.appendix.drafter_training.text import Talk
from speculative.head import Head
from speculative.taps import layers_of, stream


class WholeAttention(RecomputeAttention):
    """The same by PyTorch's fused kernel, where a layer has neither a window nor a soft cap."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, S, H, D]`, `k` and `v [B, S, KH, D]` -> `[B, S, H, D]`."""
        if layer.soft_cap is not None or layer.sliding_window is not None:
            return super().__call__(layer, q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2)


class UnrolledAttention:
    """Attention of step j over the keys of step 1 up to where its chain began, and its chain's own since.

    The chain that is at place p in step j began at place p - j + 1, and was at place p - j + i in step i.
    """

    def __init__(self) -> None:
        self.step = 0
        self._past: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B, S, H, D]`, `k` and `v [B, S, KH, D]` -> `[B, S, H, D]`."""
        group = layer.num_heads // layer.num_kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # [B, H, S, D]
        past = self._past.setdefault(layer.index, [])
        past.append((k, v))
        first_k, first_v = past[0]
        size, ahead = q.shape[2], len(past) - 1
        places = torch.arange(size, device=q.device)
        seen = places[:, None] - places[None, :] >= ahead
        scores = (q @ first_k.transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))  # [B, H, S, S]
        own = [
            (q * shift(keys, ahead - at, 2)).sum(-1, keepdim=True).float()  # [B, H, S, 1]
            for at, (keys, _) in enumerate(past[1:], start=1)
        ]
        weights = (torch.cat((scores, *own), dim=-1) * layer.scale).softmax(-1).to(v.dtype)
        out = weights[..., :size] @ first_v
        for at, (_, values) in enumerate(past[1:], start=1):
            out = out + weights[..., size + at - 1, None] * shift(values, ahead - at, 2)
        return out.transpose(1, 2)


def shift(x: Tensor, by: int, dim: int) -> Tensor:
    """`x` moved `by` places to the right along `dim`, zeros moving in."""
    if by == 0:
        return x
    zeros = torch.zeros_like(x.narrow(dim, 0, by))
    return torch.cat((zeros, x.narrow(dim, 0, x.shape[dim] - by)), dim)


def padded(talks: Sequence[Talk], device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens `[B, S]`, and which of them are no padding `[B, S]`."""
    longest = max(len(talk.tokens) for talk in talks)
    ids = torch.zeros(len(talks), longest, dtype=torch.int64)
    real = torch.zeros(len(talks), longest, dtype=torch.bool)
    for line, talk in enumerate(talks):
        ids[line, : len(talk.tokens)] = torch.tensor(talk.tokens)
        real[line, : len(talk.tokens)] = True
    return ids.to(device), real.to(device)


@contextmanager
def watching(model: Model, places: Sequence[int]) -> Iterator[list[Tensor]]:
    """While it lasts, a forward pass leaves the outputs of these layers in the list, `[..., hidden]` each."""
    seen: list[Tensor] = []
    hooks = [
        layers_of(model)[place].register_forward_hook(lambda layer, given, out: seen.append(stream(out)))
        for place in places
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def hidden_states(model: Model, ids: Tensor, taps: Sequence[int] = ()) -> Tensor:
    """Return what the model makes of `ids [B, S]`: outputs of the layers `taps`, and its last hidden states,
    end to end: `[B, S, (len(taps) + 1) * hidden]`.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with watching(model, taps) as seen:
        last = model(ids, positions, WholeAttention())
    return torch.cat((*seen, last), dim=-1)


def outputs(drafter: Head, ids: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
    """Return the head's hidden states in each step, `[B, S', hidden]`.

    Entry `[:, p]` is about token p + 2, and belongs to a chain that began `step` places before.

    hidden: what `hidden_states` makes with the head's taps.
    """
    tokens, features = ids[:, 1:], drafter.mix(hidden[:, :-1])
    positions = torch.arange(tokens.shape[1], device=ids.device).expand_as(tokens)
    attention, made = UnrolledAttention(), list[Tensor]()
    for _ in range(steps):
        out = drafter.step(tokens, features, positions, attention)
        made.append(out)
        features = shift(out, 1, 1)
    return made


def loss(model: Model, drafter: Head, ids: Tensor, real: Tensor, skip: int, steps: int) -> Tensor:
    """Cross-entropy with the model's own probabilities over the reduced vocabulary, mean over all steps.

    skip: places at the beginning that do not count: the template, the same in all conversations.
    """
    reduced = drafter.lm_head
    hidden = hidden_states(model, ids, drafter.taps)
    with torch.no_grad():
        last = hidden[:, 1:, -model.config.hidden_size :]
        wanted = reduced.few(last).float().softmax(-1)  # [B, S', N]
    total = torch.zeros((), device=ids.device)
    for step, out in enumerate(outputs(drafter, ids, hidden, steps)):
        counts = real[:, 1:].clone()
        counts[:, : max(skip, step)] = False
        counts[:, -1] = False  # nobody knows what comes behind the end
        logits = reduced.few(out.to(reduced.weight.dtype)).float()
        terms = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1), reduction="none")
        total = total + 0.8**step * (terms * counts.flatten()).sum() / counts.sum().clamp(min=1)
    return total


AHEAD = 2
"""Places from an output of the head to the token that it is about."""


@torch.no_grad()
def accepted(model: Model, drafter: Head, talks: Sequence[Talk], steps: int = 4) -> list[float]:
    """Return how often the first, the first two, ... greedy drafts are all what a greedy answer said.

    All conversations at once, padded at their ends.
    """
    if not talks:
        return [0.0] * steps
    ids, real = padded(talks, model.device)
    answers = torch.tensor([talk.answer for talk in talks], device=ids.device)
    hidden = hidden_states(model, ids, drafter.taps)
    width = ids.shape[1] - AHEAD
    begins = torch.arange(width, device=ids.device)  # the place of a chain's first output
    last = begins + AHEAD + steps - 1  # where its last draft would stand
    counts = (begins[None] >= answers[:, None] - AHEAD) & (last < ids.shape[1])[None]
    counts &= real[:, last.clamp(max=ids.shape[1] - 1)]
    chain = counts.clone()
    right: list[float] = []
    for step, out in enumerate(outputs(drafter, ids, hidden, steps)):
        logits = drafter.lm_head.few(out[:, :width].to(drafter.lm_head.weight.dtype))
        said = drafter.lm_head.ids[logits.argmax(-1)]  # [B, S']
        match = F.pad(said == ids[:, AHEAD : AHEAD + width], (0, step))[:, step : step + width]
        chain = chain & match
        right.append(float(chain.sum() / counts.sum().clamp(min=1)))
    return right

"""The classical way to verify sampled drafts, for comparison: accept by chance, and correct the rest.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023 (arXiv
2211.17192), and Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023
(arXiv 2302.01318). It needs the drafter's probabilities, and its text depends on the drafter: the
distribution of the text stays the same, the text for a seed does not. The engine does without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def verify(
    target: Tensor, draft: Tensor, drafts: Sequence[int], generator: torch.Generator
) -> list[int]:
    """Return the tokens of one step by rejection sampling: the drafts that are accepted, and one more.

    A draft x with chance q(x) to be drafted and p(x) to be right is accepted with chance min(1, p(x) /
    q(x)). The first draft that is not accepted is replaced by a token from what p has more of than q. Then
    each token has the distribution p, whatever q is: min(p, q) comes from drafts, and max(0, p - q) from
    replacements.

    target: `[K + 1, V]` probabilities of the model, for each draft's position and the one after the last.
    draft: `[K, V]` probabilities that the `drafts`, K token ids, were drawn with.
    """
    for place, token in enumerate(drafts):
        p, q = target[place], draft[place]
        if torch.rand((), generator=generator) * q[token] >= p[token]:
            return [*drafts[:place], draw(residual(p, q), generator)]
    return [*drafts, draw(target[len(drafts)], generator)]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the probabilities `[V]` to draw from after a rejection: max(0, p - q), made to add up to 1."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


def draw(p: Tensor, generator: torch.Generator) -> int:
    """Return the id of a token drawn from the probabilities `p [V]`."""
    return int(torch.multinomial(p, 1, generator=generator))

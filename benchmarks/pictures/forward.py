"""Phase 01: the scores of three queries, their weights, and two pairs of dimensions that RoPE turns."""

from __future__ import annotations

import torch

from benchmarks.pictures.svg import (
    Box,
    Cell,
    Dial,
    Lines,
    Picture,
    Text,
    picture,
    row,
    table,
    titled,
)
from common.models.config import RopeConfig
from forward.attention import causal_mask, softmax
from forward.rope import inverse_frequencies

QUERIES = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0))
KEYS = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
"""Of three tokens; the last query and all keys are those of the lesson's example."""


def matrix(title: str, values: torch.Tensor, form: str) -> Box:
    """A table of queries by keys; what the mask hides is grey."""
    lines: Lines = [["", "key 0", "key 1", "key 2"]]
    for query, line in enumerate(values.tolist()):
        lines.append([f"query {query}"])
        for key, value in enumerate(line):
            words = "hidden" if value == float("-inf") else format(value, form)
            lines[-1].append(Cell(words, "idle" if key > query else "kept a", 74, 32))
    return titled(title, table(lines))


def attention() -> Picture:
    """The scores under their mask, and the weights."""
    places = torch.arange(len(KEYS))
    scores = torch.tensor(QUERIES) @ torch.tensor(KEYS).T
    scores = scores.masked_fill(~causal_mask(places, places), float("-inf"))
    weights = softmax(scores.view(1, 3, 3), None).view(3, 3)
    return picture(
        "The scores of three queries, and their weights",
        row(
            matrix("scores: query · key", scores, "g"),
            "→",
            matrix("weights: softmax of each row", weights, ".2f"),
            gap=40,
        ),
        "A query sees its own key and those before it. Each row of weights adds up to 1.",
    )


def rope() -> Picture:
    """The two pairs of a head of four dimensions, at the first positions."""
    pairs = []
    for pair, turn in enumerate(inverse_frequencies(RopeConfig(theta=16.0), 4).tolist()):
        turns = Text(f"{turn:.3g} radian a position", "soft")
        words = titled(f"dimensions {pair} and {pair + 2}", turns)
        pairs += [Dial([turn * position for position in range(4)]), words]
    return picture("Two pairs of dimensions, turned by RoPE", row(*pairs, gap=20))


PICTURES = {"attention": attention, "rope": rope}

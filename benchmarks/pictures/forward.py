"""Phase 01: the scores of three queries, their weights, and two pairs of dimensions that RoPE turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.pictures.svg import INK, NEUTRAL, PAPER, SOFT, STRONG, Picture
from common.models.config import RopeConfig
from forward.attention import causal_mask, softmax
from forward.rope import inverse_frequencies

QUERIES = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0))
KEYS = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
"""Of three tokens; the last query and all keys are those of the lesson's example."""
THETA = 16.0
POSITIONS = 4


def record() -> tuple[list[list[float]], list[list[float]]]:
    """Scores and weights of every query, `[3][3]`; a score that the mask hides is minus infinity."""
    positions = torch.arange(len(KEYS))
    scores = torch.tensor(QUERIES) @ torch.tensor(KEYS).T
    scores = scores.masked_fill(~causal_mask(positions, positions), float("-inf"))
    return scores.tolist(), softmax(scores.view(1, 3, 3), None).view(3, 3).tolist()


def attention(
    scores: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]
) -> Picture:
    """Two tables of queries by keys: the scores under their mask, and the weights."""
    picture = Picture(
        "The scores of three queries, and their weights",
        f"Scores {scores}, of which those of later keys are hidden; weights {weights}",
        height=196,
    )
    wide = 74
    high = 32
    titles = ("scores: query · key", "weights: softmax of each row")
    for left, title, rows in ((96, titles[0], scores), (470, titles[1], weights)):
        picture.text(left, 26, title, bold=True)
        for column in range(len(KEYS)):
            x = left + wide * column + wide / 2
            picture.text(x, 48, f"key {column}", "middle", SOFT, 11)
        for line, row in enumerate(rows):
            y = 56 + high * line
            picture.text(left - 10, y + 20, f"query {line}", "end", SOFT, 11)
            for column, value in enumerate(row):
                hidden = column > line
                shown = f"{value:g}" if rows is scores else f"{value:.2f}"
                words = "hidden" if hidden and rows is scores else shown
                x = left + wide * column
                picture.cell(x, y, wide, high, "idle" if hidden else "kept", "a", words)
    picture.line([(340, 104), (388, 104)], INK, tip=True)
    words = "A query sees its own key and those before it. Each row of weights adds up to 1."
    picture.text(96, 182, words, fill=SOFT)
    return picture


def rope() -> Picture:
    """The two pairs of a head of four dimensions, at the first positions."""
    turns = inverse_frequencies(RopeConfig(theta=THETA), 4).tolist()
    picture = Picture(
        "Two pairs of dimensions, turned by RoPE",
        f"A step of one position turns the pairs by {turns} radians",
        height=176,
    )
    for left, pair, turn in (
        (120, "dimensions 0 and 2", turns[0]),
        (480, "dimensions 1 and 3", turns[1]),
    ):
        x, y = left, 96
        picture.circle(x, y, 62, PAPER, NEUTRAL)
        angles = torch.arange(POSITIONS) * turn
        for at, (cos, sin) in enumerate(
            zip(angles.cos().tolist(), angles.sin().tolist(), strict=True)
        ):
            picture.line([(x, y), (x + 60 * cos, y - 60 * sin)], STRONG["a"], tip=True)
            picture.text(x + 74 * cos, y - 74 * sin + 4, str(at), "middle", size=11)
        picture.text(x + 100, 56, pair, bold=True)
        picture.text(x + 100, 76, f"{turn:.3g} rad a position", fill=SOFT)
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's two."""
    return {"attention": attention(*record()), "rope": rope()}

"""Phase 10: what an outlier does to the weights that share its scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from benchmarks.pictures.svg import INK, LINE, PAPER, SOFT, Picture
from quant.formats import INT4
from quant.rtn import quantize

ROWS = 6
INPUTS = 64
GROUPS = (64, 32, 16)
OUTLIERS = {(1, 9): 8.0, (4, 38): -6.0}
"""Where a weight is large; all others are between -1 and 1."""
SHADES = ("#fbf6ee", "#f3dfbd", "#d99f4c", "#a8650f", "#6b3a06")
STEPS = (0.05, 0.1, 0.2, 0.4)
"""Errors from which a cell is drawn a shade darker."""


def weights() -> torch.Tensor:
    """`[ROWS, INPUTS]`, from whole numbers, so that they are the same everywhere."""
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(INPUTS), indexing="ij")
    values = ((37 * column + 61 * row + column * row) % 101 - 50) / 50
    for place, value in OUTLIERS.items():
        values[place] = value
    return values


def record(groups: Sequence[int] = GROUPS) -> Mapping[int, torch.Tensor]:
    """For each size of group the magnitudes of the errors of int4, rounded to nearest."""
    whole = weights()
    return {
        group: (quantize(whole, replace(INT4, group=group)).dequantize() - whole).abs()
        for group in groups
    }


def scales(errors: Mapping[int, torch.Tensor]) -> Picture:
    """The matrix once for each size of group: the darker a weight, the larger its error."""
    cell = 9.6
    high = 18
    left = 116
    picture = Picture(
        "Errors of four-bit weights, by how many share a scale",
        "; ".join(
            f"groups of {group}: mean error {errors[group].mean():.3f}" for group in errors
        ),
        height=34 + (high * ROWS + 42) * len(errors) + 30,
    )
    for panel, group in enumerate(errors):
        top = 36 + (high * ROWS + 42) * panel
        wrong = errors[group]
        picture.box(left, top, cell * INPUTS, high * ROWS, SHADES[0])
        words = "one scale a row" if group == INPUTS else f"a scale for {group} inputs"
        picture.text(left, top - 9, words, bold=True)
        mean = f"mean error {wrong.mean():.3f}; a scale of 16 bits adds {16 / (4 * group):.0%}"
        picture.text(left + cell * INPUTS, top - 9, mean, "end", SOFT)
        for row in range(ROWS):
            picture.text(left - 14, top + high * row + 13, f"output {row}", "end", SOFT, 11)
            for column in range(INPUTS):
                shade = sum(float(wrong[row, column]) >= step for step in STEPS)
                x, y = left + cell * column, float(top + high * row)
                if shade:
                    picture.box(x + 0.5, y + 1, cell - 1, high - 2, SHADES[shade])
                if (row, column) in OUTLIERS:
                    picture.circle(x + cell / 2, y + high / 2, 4, PAPER, INK)
        for cut in range(0, INPUTS + 1, group):
            x = left + cell * cut
            picture.line(
                [(x, top - 2), (x, top + high * ROWS + 2)], INK if group < INPUTS else LINE
            )
    x = float(left)
    y = picture.height - 14
    picture.circle(x + 6, y - 4, 4, PAPER, INK)
    picture.text(x + 16, y, "an outlier", fill=SOFT)
    x += 100
    names_of = ["below 0.05", *(f"from {step}" for step in STEPS)]
    for colour, words in zip(SHADES, names_of, strict=True):
        picture.box(x, y - 11, 16, 14, colour, LINE)
        picture.text(x + 22, y, words, fill=SOFT)
        x += 40 + 6.8 * len(words)
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's one."""
    return {"scales": scales(record())}


def show(group: int) -> Picture:
    """The matrix with a scale for each `group` inputs: 64 (a row), 32 or 16."""
    return scales(record((group,)))

"""Phase 10: what an outlier does to the weights that share its scale."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.pictures.svg import Lines, Picture, cells, picture, row, table, titled
from quant.formats import INT4
from quant.rtn import quantize

ROWS, INPUTS = 4, 64
OUTLIERS = {(1, 9): 8.0, (2, 38): -6.0}
"""Where a weight is large; all others are between -1 and 1."""
LOOKS = ("idle", "kept b", "now b")
ERRORS = (0.1, 0.2)
"""From which a weight has the second look, and the third."""


def scales(*groups: int) -> Picture:
    """A matrix in int4 once for each size of group: the darker a weight, the larger its error."""
    line, place = torch.meshgrid(torch.arange(ROWS), torch.arange(INPUTS), indexing="ij")
    weights = ((37 * place + 61 * line + place * line) % 101 - 50) / 50  # the same everywhere
    for at, value in OUTLIERS.items():
        weights[at] = value
    panels = []
    for group in groups or (64, 32, 16):
        scheme = replace(INT4, group=group)
        wrong = (quantize(weights, scheme).dequantize() - weights).abs()
        kinds = torch.bucketize(wrong, torch.tensor(ERRORS), right=True)
        lines: Lines = []
        for output in range(ROWS):
            looks = [LOOKS[kind] for kind in kinds[output].tolist()]
            words = ["o" if (output, at) in OUTLIERS else "" for at in range(INPUTS)]
            parts = [
                cells(words[first : first + group], looks[first : first + group], 9.6, 18)
                for first in range(0, INPUTS, group)
            ]
            lines.append([f"output {output}", row(*parts, gap=6)])
        title = "one scale a row" if group == INPUTS else f"a scale for {group} inputs"
        title += f": mean error {wrong.mean():.3f}; scales need {4 / group:.0%} more memory"
        panels.append(titled(title, table(lines)))
    return picture(
        "Errors of four-bit weights, by how many share a scale",
        *panels,
        "idle: error below 0.1",
        "kept b: from 0.1",
        "now b: from 0.2",
    )


PICTURES = {"scales": scales}
show = scales

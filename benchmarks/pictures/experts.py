"""Phase 16: the choices of two tokens, sorted by expert, multiplied, and brought back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.pictures.svg import Arrow, Box, Cell, Lines, Picture, Text, picture, row, table
from experts.grouped_experts import combine
from experts.routing import route, sort_by_expert

PROBABILITIES = ((0.1, 0.6, 0.1, 0.2), (0.5, 0.3, 0.1, 0.1))
"""Of four experts, for the tokens a and b of the lesson's example."""
TOP_K = 2
OWNERS = "aabb"
"""Of choices."""
FACTORS = (1.0, 10.0, 100.0, 1000.0)
"""In place of an MLP an expert multiplies a token by its factor; a token is the number 1."""
WIDE, GAP = 112, 22


def by_token(boxes: Sequence[Box]) -> Box:
    """Choices beside each other, those of a token together."""
    return row(row(*boxes[:TOP_K]), row(*boxes[TOP_K:]), gap=GAP)


def steps() -> Picture:
    """Route, sort, multiply and bring back with the package's functions."""
    weights, chosen = route(torch.tensor(PROBABILITIES).log(), TOP_K, normalize=True)
    order, offsets = sort_by_expert(chosen, len(FACTORS))
    experts = chosen.flatten()
    products = torch.tensor(FACTORS)[experts[order]].unsqueeze(-1)
    sums = combine(products, order, weights)[:, 0].tolist()
    choices = [
        Cell(f"{choice}: expert {expert}", f"known {OWNERS[choice]}", WIDE)
        for choice, expert in enumerate(experts.tolist())
    ]
    back: list[Box] = [Box()] * len(choices)
    groups: dict[str, list[Box]] = {"sort": [], "multiply": [], "results": []}
    arrows: list[Arrow] = []
    for expert, factor in enumerate(FACTORS):
        places = range(int(offsets[expert]), int(offsets[expert + 1]))
        rows, results = [], []
        for place in places:
            choice = int(order[place])
            who, product = OWNERS[choice], f"{products[place].item():g}"
            rows.append(Cell(f"{choice}: token {who}", f"kept {who}", WIDE))
            results.append(Cell(product, f"kept {who}", WIDE))
            back[choice] = Cell(f"choice {choice}: {product}", f"kept {who}", WIDE)
            arrows += [(choices[choice], rows[-1], who), (results[-1], back[choice], who)]
        words = f"expert {expert}: × {factor:g}" if places else f"expert {expert}: no row"
        does = Cell(words, "now" if places else "idle", WIDE * max(1, len(places)))
        groups["sort"].append(row(*rows) if places else Box(WIDE))
        groups["multiply"].append(does)
        groups["results"].append(row(*results) if places else Box(WIDE))
    added = []
    for token, (factors, total) in enumerate(zip(weights.tolist(), sums, strict=True)):
        terms = [
            f"{factor:.3g} · {FACTORS[expert]:g}"
            for factor, expert in zip(factors, chosen[token].tolist(), strict=True)
        ]
        words = f"{' + '.join(terms)} = {total:.4g}"
        added.append(Cell(words, f"now {'ab'[token]}", TOP_K * WIDE))
    names = [Text(f"token {who}", f"bold {who}", TOP_K * WIDE) for who in "ab"]
    lines: Lines = [["", row(*names, gap=GAP)], ["choose", by_token(choices)], [Box(0, 20)]]
    lines += [[name, row(*boxes, gap=GAP)] for name, boxes in groups.items()]
    lines += [[Box(0, 20)], ["bring back", by_token(back)], ["sum", row(*added, gap=GAP)]]
    return picture(
        "Choices sorted by expert, multiplied, and brought back",
        table(lines, down=6),
        arrows=arrows,
    )


PICTURES = {"sorted": steps}

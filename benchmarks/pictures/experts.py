"""Phase 16: the choices of two tokens, sorted by expert, multiplied, and brought back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.pictures.svg import STRONG, Picture
from experts.grouped_experts import combine
from experts.routing import route, sort_by_expert

PROBABILITIES = ((0.1, 0.6, 0.1, 0.2), (0.5, 0.3, 0.1, 0.1))
"""Of four experts, for the tokens a and b of the lesson's example."""
TOP_K = 2
FACTORS = (1.0, 10.0, 100.0, 1000.0)
"""In place of an MLP an expert multiplies a token by its factor; a token is the number 1."""
WIDE, HIGH = 112, 30
LEFT, GAP = 116, 22
"""Of a cell; where the first one begins, and what parts two experts or two tokens."""


@dataclass(frozen=True)
class Routing:
    """What phase 16's functions made of the two tokens.

    chosen, weights: `[tokens][top_k]`. order: the choice at each place. offsets: each expert's first place.
    products: at each place. sums: of each token, what `combine` returns.
    """

    chosen: Sequence[Sequence[int]]
    weights: Sequence[Sequence[float]]
    order: Sequence[int]
    offsets: Sequence[int]
    products: Sequence[float]
    sums: Sequence[float]


def record() -> Routing:
    """Route, sort, multiply and bring back with the package's functions."""
    weights, chosen = route(torch.tensor(PROBABILITIES).log(), TOP_K, normalize=True)
    order, offsets = sort_by_expert(chosen, len(FACTORS))
    experts = chosen.flatten()[order]
    products = torch.tensor(FACTORS)[experts].unsqueeze(-1)
    sums = combine(products, order, weights)[:, 0]
    return Routing(
        chosen.tolist(),
        weights.tolist(),
        order.tolist(),
        offsets.tolist(),
        products[:, 0].tolist(),
        sums.tolist(),
    )


def steps(found: Routing) -> Picture:
    """Choices by token above, by expert in the middle, and by token again below."""
    picture = Picture(
        "Choices sorted by expert, multiplied, and brought back",
        f"Choices {found.chosen} lie in the order {found.order} with the offsets {found.offsets}; "
        f"sums {[round(each, 2) for each in found.sums]}",
        height=366,
    )
    count = len(found.order)
    who = ["ab"[choice // TOP_K] for choice in range(count)]
    above = [LEFT + WIDE * choice + GAP * (choice // TOP_K) for choice in range(count)]
    for y, words in (
        (47, "choose"),
        (139, "sort"),
        (199, "multiply"),
        (281, "bring back"),
        (337, "sum"),
    ):
        picture.text(12, y, words, bold=True)
    for token, name in enumerate("ab"):
        picture.text(above[TOP_K * token], 20, f"token {name}", bold=True, fill=STRONG[name])
    x: float = LEFT
    places: list[float] = []
    for expert, factor in enumerate(FACTORS):
        rows = found.offsets[expert + 1] - found.offsets[expert]
        words = f"expert {expert}: × {factor:g}" if rows else f"expert {expert}: no row"
        wide = WIDE * max(1, rows)
        picture.cell(x, 180, wide, HIGH, "now" if rows else "idle", "", words)
        places += [x + WIDE * row for row in range(rows)]
        x += wide + GAP
    for place, choice in enumerate(found.order):
        expert = found.chosen[choice // TOP_K][choice % TOP_K]
        x, colour = places[place] + WIDE / 2, STRONG[who[choice]]
        own = above[choice] + WIDE / 2
        words = f"{choice}: expert {expert}"
        picture.cell(above[choice], 28, WIDE, HIGH, "known", who[choice], words)
        picture.curve((own, 60), (x, 119), colour)
        picture.cell(
            places[place], 120, WIDE, HIGH, "kept", who[choice], f"row of {who[choice]}"
        )
        picture.line([(x, 152), (x, 178)], colour, tip=True)
        picture.curve((x, 212), (own, 261), colour)
        words = f"choice {choice}: {found.products[place]:g}"
        picture.cell(above[choice], 262, WIDE, HIGH, "kept", who[choice], words)
    back = {choice: found.products[place] for place, choice in enumerate(found.order)}
    for token, name in enumerate("ab"):
        parts = " + ".join(
            f"{weight:.3g} · {back[TOP_K * token + place]:g}"
            for place, weight in enumerate(found.weights[token])
        )
        words = f"{parts} = {found.sums[token]:.4g}"
        picture.cell(above[TOP_K * token], 318, TOP_K * WIDE, HIGH, "now", name, words)
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's one."""
    return {"sorted": steps(record())}

"""Kernels of experts against a loop over them, in the interpreter, or natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from experts.kernels.grouped import TABLE, Tile, grouped_mlp, tile_for
from experts.kernels.sorting import most_tiles, sort_in_tiles
from experts.kernels.stack import Stack, Swiglu
from experts.routing import route, sort_by_expert
from tests.quant_layers import DEVICE, DTYPE, assert_close

pytestmark = pytest.mark.usefixtures("poison")

E, TOP, HIDDEN, INNER = 7, 3, 48, 80
SMALL = Tile(16, 32, 32, 4, 2)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(0)


def normal(rng: torch.Generator, *shape: int, size: float = 1.0) -> Tensor:
    return (size * torch.randn(*shape, device=DEVICE, generator=rng)).to(DTYPE)


def stacks(rng: torch.Generator, bias: bool = False) -> tuple[Stack, Stack]:
    up = normal(rng, E, 2 * INNER, HIDDEN, size=HIDDEN**-0.5)
    down = normal(rng, E, HIDDEN, INNER, size=INNER**-0.5)
    if not bias:
        return Stack(up), Stack(down)
    return Stack(up, bias=normal(rng, E, 2 * INNER)), Stack(down, bias=normal(rng, E, HIDDEN))


def routed(rng: torch.Generator, tokens: int, kind: str = "spread") -> tuple[Tensor, Tensor]:
    """Weights and choices of a router; expert 4 is chosen by nobody, or all choose 2, 5 and 0."""
    logits = torch.randn(tokens, E, device=DEVICE, generator=rng)
    logits[:, 4] = -100.0
    if kind == "crowd":
        logits[:, [2, 5, 0]] += 50.0
    return route(logits, TOP, normalize=True)


def loop(x: Tensor, up: Stack, down: Stack, weights: Tensor, chosen: Tensor, act: Swiglu) -> Tensor:
    """Each token's choices, one after the other, in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for token, (row, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, expert in zip(row, experts, strict=True):
            both = up.dequantize(expert) @ x[token].float()
            both = both if up.bias is None else both + up.bias[expert].float()
            gate, linear = act.parts(both)
            if act.limit:
                gate, linear = gate.clamp(max=act.limit), linear.clamp(-act.limit, act.limit)
                inner = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
            else:
                inner = torch.nn.functional.silu(gate) * linear
            part = down.dequantize(expert) @ inner
            part = part if down.bias is None else part + down.bias[expert].float()
            out[token] += weight * part
    return out


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (5, 16), (40, 16), (40, 32)])
def test_choices_are_sorted_in_tiles_of_one_expert(tokens: int, rows: int, rng: torch.Generator) -> None:
    _, chosen = routed(rng, tokens)
    tiles = sort_in_tiles(chosen.contiguous(), E, rows)
    order, offsets = sort_by_expert(chosen, E)
    assert tiles.order.tolist() == order.tolist(), "places"
    wanted = []
    for expert in range(E):
        begin, end = offsets[expert : expert + 2].tolist()
        wanted += [[expert, at, min(rows, end - at)] for at in range(begin, end, rows)]
    table = tiles.table.t().tolist()
    assert table[: len(wanted)] == wanted
    assert all(count == 0 for _, _, count in table[len(wanted) :]), "tiles left over have no rows"


def test_there_is_room_for_any_routing() -> None:
    for counts in ([16, 0, 0], [1, 1, 30], [17, 17, 17], [1, 0, 0]):
        needed = sum(-(-count // 16) for count in counts)
        assert needed <= most_tiles(sum(counts), len(counts), 16)
    assert most_tiles(33, 3, 16) == 4, "17, 15 and 1 rows take four tiles; no routing takes five"


@pytest.mark.parametrize("kind", ["spread", "crowd"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_it_is_the_loop_over_experts(tokens: int, kind: str, rng: torch.Generator) -> None:
    up, down = stacks(rng)
    x = normal(rng, tokens, HIDDEN)
    weights, chosen = routed(rng, tokens, kind)
    found = grouped_mlp(x, up.data, down.data, weights, chosen, "silu", tile=SMALL)
    assert_close(found, loop(x, up, down, weights, chosen, Swiglu()), f"{tokens} tokens, {kind}")

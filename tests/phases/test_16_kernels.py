"""Kernels of experts against a loop over them, in the interpreter, or natively on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UserError
from experts.grouped_experts import GroupedExperts
from experts.kernels import grouped as grouped_module
from experts.kernels.grouped import LARGE, OLDER, TABLE, Tile, grouped, tile_for
from experts.kernels.routing import most_tiles, route_at_once, sort_in_tiles
from experts.kernels.small_batch import gathered
from experts.routing import route, sort_by_expert
from experts.weights import ExpertWeights, Swiglu, stack_layers
from quant.formats import FP8, FP8_BLOCK, FP8_WEIGHTS, INT4, INT8, Scheme
from quant.linear import QuantLinear
from tests.compiling import spilled
from tests.quant_layers import DEVICE, DTYPE, assert_close

pytestmark = pytest.mark.usefixtures("poison")

E = 7
TOP = 3
HIDDEN = 48
INNER = 80
SMALL = Tile(16, 32, 32, 4, 2)


def normal(rng: torch.Generator, *shape: int, size: float = 1.0) -> Tensor:
    return (size * torch.randn(*shape, device=DEVICE, generator=rng)).to(DTYPE)


def both_products(
    rng: torch.Generator, bias: bool = False
) -> tuple[ExpertWeights, ExpertWeights]:
    up = normal(rng, E, 2 * INNER, HIDDEN, size=HIDDEN**-0.5)
    down = normal(rng, E, HIDDEN, INNER, size=INNER**-0.5)
    if not bias:
        return ExpertWeights(up), ExpertWeights(down)
    return ExpertWeights(up, bias=normal(rng, E, 2 * INNER)), ExpertWeights(
        down, bias=normal(rng, E, HIDDEN)
    )


def routed(rng: torch.Generator, tokens: int, kind: str = "spread") -> tuple[Tensor, Tensor]:
    """Weights and choices of a router; expert 4 is chosen by nobody, or all choose 2, 5 and 0."""
    logits = torch.randn(tokens, E, device=DEVICE, generator=rng)
    logits[:, 4] = -100.0
    if kind == "crowd":
        logits[:, [2, 5, 0]] += 50.0
    return route(logits, TOP, normalize=True)


def loop(
    x: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    act: Swiglu,
) -> Tensor:
    """Each token's choices, one after the other, in float32."""
    out = torch.zeros(x.shape, device=x.device)
    for token, (row, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, expert in zip(row, experts, strict=True):
            both = up.data[expert].float() @ x[token].float()
            both = both if up.bias is None else both + up.bias[expert].float()
            inner = act(both)
            part = down.data[expert].float() @ inner
            part = part if down.bias is None else part + down.bias[expert].float()
            out[token] += weight * part
    return out


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (5, 16), (40, 16), (40, 32)])
def test_choices_are_sorted_in_tiles_of_one_expert(
    tokens: int, rows: int, rng: torch.Generator
) -> None:
    _, chosen = routed(rng, tokens)
    places, tiles = sort_in_tiles(chosen.contiguous(), E, rows)
    order, offsets = sort_by_expert(chosen, E)
    assert places.tolist() == order.tolist(), "places"
    wanted = []
    for expert in range(E):
        begin, end = offsets[expert : expert + 2].tolist()
        wanted += [[expert, at, min(rows, end - at)] for at in range(begin, end, rows)]
    table = tiles.t().tolist()
    assert table[: len(wanted)] == wanted
    assert all(count == 0 for _, _, count in table[len(wanted) :]), (
        "tiles left over have no rows"
    )


def test_there_is_room_for_any_routing() -> None:
    for counts in ([16, 0, 0], [1, 1, 30], [17, 17, 17], [1, 0, 0]):
        needed = sum(-(-count // 16) for count in counts)
        assert needed <= most_tiles(sum(counts), len(counts), 16)
    assert most_tiles(33, 3, 16) == 4, (
        "17, 15 and 1 rows take four tiles; no routing takes five"
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(7, 3), (5, 5), (1, 1), (128, 8)])
def test_a_router_chooses_in_one_kernel(
    count: int, top_k: int, normalize: bool, rng: torch.Generator
) -> None:
    logits = torch.randn(6, count, device=DEVICE, generator=rng)
    logits[1] = 0.5  # all are equal
    logits[2, count // 2 :] = logits[2].max()  # some are
    logits[3, 0] = 200.0  # all others have no probability
    weights, chosen = route_at_once(logits, top_k, normalize)
    wanted, numbers = route(logits, top_k, normalize)
    assert chosen.tolist() == numbers.tolist()
    assert_close(weights, wanted, "weights")


PLAIN, CLAMPED = Swiglu(), Swiglu(limit=0.5)


def compute(
    kernel: str,
    x: Tensor,
    up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    act: Swiglu,
) -> Tensor:
    layer = GroupedExperts(up, down, act)
    if kernel == "small batch":
        return gathered(layer, x, weights, chosen, ((32, 128, 4), (16, 64, 4)))
    return grouped(layer, x, weights, chosen, SMALL)


@pytest.mark.parametrize("kernel", ["grouped", "small batch"])
@pytest.mark.parametrize("kind", ["spread", "crowd"])
@pytest.mark.parametrize(("tokens", "act"), [(1, PLAIN), (20, PLAIN), (4, CLAMPED)])
def test_it_is_the_loop_over_experts(
    kernel: str, kind: str, tokens: int, act: Swiglu, rng: torch.Generator
) -> None:
    up, down = both_products(rng, bias=act is CLAMPED)
    x = normal(rng, tokens, HIDDEN)
    weights, chosen = routed(rng, tokens, kind)
    found = compute(kernel, x, up, down, weights, chosen, act)
    assert_close(
        found,
        loop(x, up, down, weights, chosen, act),
        f"{kernel}, {tokens} tokens, {kind}, {act}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["grouped", "small batch"])
@pytest.mark.parametrize(
    "scheme", [FP8, FP8_WEIGHTS, FP8_BLOCK, INT8], ids=lambda scheme: scheme.name
)
@pytest.mark.parametrize("tokens", [2, 9])
def test_eight_bits_are_the_dequantized_experts(
    kernel: str, scheme: Scheme, tokens: int, rng: torch.Generator
) -> None:
    # In blocks, one of them not whole.
    hidden, inner = (144, 128) if scheme.scales == "block" else (HIDDEN, INNER)
    layers = layers_of(rng, scheme, hidden, inner)
    up, down = (
        stack_layers([each[:2] for each in layers]),
        stack_layers([each[2:] for each in layers]),
    )
    assert up.data.itemsize == down.data.itemsize == 1
    x = normal(rng, tokens, hidden)
    weights, chosen = routed(rng, tokens)
    wanted = torch.zeros(tokens, hidden, device=DEVICE)
    for token in range(tokens):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, linear, out = layers[expert]
            middle = F.silu(gate.exact(x[token])) * linear.exact(x[token])
            wanted[token] += weight * out.exact(middle.to(DTYPE))
    assert_close(
        compute(kernel, x, up, down, weights, chosen, PLAIN),
        wanted,
        f"{kernel}, {scheme.name}",
    )


def plain(rng: torch.Generator, n: int, k: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, device=DEVICE, dtype=DTYPE)
    layer.weight = nn.Parameter(normal(rng, n, k, size=k**-0.5), requires_grad=False)
    return layer


def layers_of(
    rng: torch.Generator, scheme: Scheme | None, hidden: int = HIDDEN, inner: int = INNER
) -> list[list[Any]]:
    """Gate, up and down of each expert."""
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    layers = [[plain(rng, *size) for size in sizes] for _ in range(E)]
    return (
        layers
        if scheme is None
        else [[QuantLinear.of(one, scheme, "x") for one in each] for each in layers]
    )


def test_experts_of_four_bits_are_refused_by_name(rng: torch.Generator) -> None:
    layers = [[QuantLinear.of(plain(rng, 32, 64), INT4, "x")] for _ in range(2)]
    with pytest.raises(UserError, match="not in w8a8 or int4"):
        stack_layers(layers)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["grouped", "small batch"])
def test_a_token_does_not_depend_on_the_others(kernel: str, rng: torch.Generator) -> None:
    up, down = both_products(rng)
    count = 8 if kernel == "small batch" else 40
    x = normal(rng, count, HIDDEN)
    weights, chosen = routed(rng, count)
    whole = compute(kernel, x, up, down, weights, chosen, PLAIN)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    # The interpreter's products are NumPy's, which on some processors sum a row by its place in the tile.
    most = 1e-5 if DEVICE == "cpu" else 0.0
    for rows in (order, order[:7], order[:1]):
        part = compute(kernel, x[rows], up, down, weights[rows], chosen[rows], PLAIN)
        off = (part - whole[rows]).abs().max()
        assert off <= most, f"{len(rows)} of {count} tokens, in another order: off by {off}"


def test_one_size_cuts_every_sum() -> None:
    assert len({tile.block_k for tile in (LARGE, OLDER, *(tile for _, tile in TABLE))}) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("room", [65_536, 101_376, 166_912, 232_448])
def test_what_is_on_its_way_fits_the_shared_memory(
    room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_module, "shared_memory", lambda device: room)
    for rows in (1, 17, 49, 97, 1000):
        tile = tile_for(rows, torch.empty(0, dtype=dtype))
        stage = (tile.rows + tile.block_n) * tile.block_k * dtype.itemsize
        assert stage * (tile.num_stages - 1) <= room, f"{rows} rows an expert, {tile}"
        assert tile.num_stages >= 2, (
            f"{rows} rows an expert: nothing hides the way from memory"
        )


def part_of(stack: ExpertWeights, start: int, count: int) -> ExpertWeights:
    return stack.only(range(start, start + count))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["grouped", "small batch"])
@pytest.mark.parametrize("scheme", [None, FP8], ids=["plain", "fp8"])
def test_parts_of_the_experts_add_up_to_all(
    kernel: str, scheme: Scheme | None, rng: torch.Generator
) -> None:
    layers = layers_of(rng, scheme)
    up, down = (
        stack_layers([each[:2] for each in layers]),
        stack_layers([each[2:] for each in layers]),
    )
    x = normal(rng, 6, HIDDEN)
    weights, chosen = routed(rng, 6)
    whole = compute(kernel, x, up, down, weights, chosen, PLAIN).float()
    parts = [
        compute(
            kernel, x, part_of(up, *at), part_of(down, *at), weights, chosen - at[0], PLAIN
        ).float()
        for at in ((0, 4), (4, 3))
    ]
    assert_close(parts[0] + parts[1], whole, "four experts and three")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["grouped", "small batch"])
def test_a_graph_holds_any_routing(kernel: str, rng: torch.Generator) -> None:
    up, down = both_products(rng)
    x = normal(rng, 6, HIDDEN)
    logits = torch.zeros(6, E, device=DEVICE)

    def step() -> Tensor:
        return compute(kernel, x, up, down, *route_at_once(logits, TOP, True), PLAIN)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for kind in ("spread", "crowd"):
        logits.copy_(torch.randn(6, E, device=DEVICE, generator=rng))
        if kind == "crowd":
            logits[:, [2, 5, 0]] += 50.0
        graph.replay()
        wanted = loop(x, up, down, *route(logits, TOP, True), PLAIN)
        assert_close(out, wanted, f"{kernel}, {kind}, in a graph")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_kernels_of_experts_compile_for_a_gpu(capability: int) -> None:
    found = spilled(capability, "--experts")
    assert found and max(found) <= 64, "what a program works with stays in registers"

"""Phase 06: the grid of a decode launch, and which keys each of its programs read."""

from __future__ import annotations

import os

import torch

from benchmarks.pictures.svg import (
    Arrow,
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    cells,
    column,
    picture,
    row,
    table,
)
from forward.attention import LayerSpec
from paged_cache import LayerBlocks
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.tables import DecodeConfig

CONTEXTS = (96, 20)
TILE = 16
TILES = max(CONTEXTS) // TILE
KV_HEADS, GROUP = 2, 2
"""Key/value heads, and query heads of each."""
D = 128


def record(splits: int) -> list[list[list[list[int]]]]:
    """Launch the kernel, and return the keys that each program read, by request, key/value head and split.

    The value of key `i` is 1 at place `i` and 0 elsewhere. So the partial result that a program leaves is not
    0 just where it has read a key, and one that has read nothing leaves nothing.
    """
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    values = torch.eye(TILES * TILE, D, device=device).view(TILES, TILE, 1, D)
    values = values.repeat(1, 1, KV_HEADS, 1)
    space = Workspace(len(CONTEXTS) * KV_HEADS * splits * GROUP, D, device)
    space.partial.zero_()
    out = paged_decode(
        LayerSpec(0, KV_HEADS * GROUP, KV_HEADS, D, 1.0),
        torch.zeros(len(CONTEXTS), KV_HEADS * GROUP, D, device=device),
        LayerBlocks(torch.zeros_like(values), values),
        torch.arange(TILES, dtype=torch.int32, device=device).repeat(len(CONTEXTS), 1),
        torch.tensor(CONTEXTS, dtype=torch.int32, device=device),
        workspace=space,
        config=DecodeConfig(block_n=TILE, splits=splits),
    )
    left = space.partial.view(len(CONTEXTS), KV_HEADS, splits, GROUP, D)[:, :, :, 0]
    for request, parts in enumerate(left):
        if not parts.any():  # one split was enough, and wrote its result directly
            parts[:, 0] = out[request, ::GROUP]
    return [
        [[part.nonzero().flatten().tolist() for part in parts] for parts in heads]
        for heads in left
    ]


def grid(splits: int = 3) -> Picture:
    """The tiles of each request, and below them the programs, each as wide as the keys that it read."""
    heads = [f"kv head {head}" for head in range(KV_HEADS)]
    columns: Lines = [["", "keys", *heads, ""]]
    arrows: list[Arrow] = []
    for number, (context, reads) in enumerate(zip(CONTEXTS, record(splits), strict=True)):
        who, tiles = "ab"[number], range(0, context, TILE)
        words = f"request {number}: {context} keys, {len(tiles)} tiles of {TILE}"
        keys = [f"{first}–{min(first + TILE, context) - 1}" for first in tiles]
        stack = [Text(words, "bold", 0), cells(keys, [f"kept {who}"], 50)]
        output = Cell("attention output", f"known {who}", 120)
        for read in reads:
            programs = [
                Cell(f"split {split}", f"now {who}", 50 * -(-len(part) // TILE))
                for split, part in enumerate(read)
                if part
            ]
            idle = splits - len(programs)
            more = Cell(f"{idle} more: no keys", "coming", 120) if idle else Box()
            stack.append(row(row(*programs), more, gap=12))
        arrows += [(program, output, "") for program in programs]
        columns.append([*stack, column(Box(0, 24), output)])
    return picture(
        "One program for each key/value head, split and request",
        table(zip(*columns, strict=True), gap=40, down=8),
        "In each head every split leaves its part and its lse; the last to finish combines them.",
        arrows=arrows,
    )


PICTURES = {"grid": grid}
show = grid

"""Phase 06: the grid of a decode launch, and which keys each of its programs read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from benchmarks.pictures.svg import INK, SOFT, Picture
from forward.attention import LayerSpec
from paged_cache import LayerBlocks
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.tables import DecodeConfig

CONTEXTS = (96, 20)
TILE = 16
SPLITS = 3
KV_HEADS = 2
HEADS = 4
D = 128

Grid = Mapping[tuple[int, int, int], tuple[int, int] | None]
"""Of each program (request, key/value head, split) the keys that it read: the first, and one beyond the last.
None: it returned at once."""


def record(contexts: Sequence[int] = CONTEXTS, splits: int = SPLITS) -> Grid:
    """Launch the kernel on values that say which key they belong to: the value of key `i` is 1 at place `i`.

    So the partial result that a program leaves behind is not 0 just where it has read a key. One that leaves
    nothing behind has read nothing; where one split is enough it writes its result directly.
    """
    assert max(contexts) <= D, "each key has a place of its own"
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    blocks = [-(-context // TILE) for context in contexts]
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32, device=device)
    keys, values = torch.zeros(2, sum(blocks), TILE, KV_HEADS, D, device=device)
    for request, count in enumerate(blocks):
        tables[request, :count] = torch.arange(count, device=device) + sum(blocks[:request])
        for place in range(count * TILE):
            values[int(tables[request, place // TILE]), place % TILE, :, place] = 1.0
    rows, group = len(contexts) * KV_HEADS * splits, HEADS // KV_HEADS
    space = Workspace(rows * group, D, device)
    space.partial.fill_(0.0)
    out = paged_decode(
        LayerSpec(0, HEADS, KV_HEADS, D, 1.0),
        torch.zeros(len(contexts), HEADS, D, device=device),
        LayerBlocks(keys, values),
        tables,
        torch.tensor(contexts, dtype=torch.int32, device=device),
        workspace=space,
        config=DecodeConfig(block_n=TILE, splits=splits),
    )
    left = space.partial.view(len(contexts), KV_HEADS, splits, group, D)[
        :, :, :, 0
    ]  # one query head's rows
    alone = ~left.flatten(1).any(dim=1)  # a request whose one split wrote its result directly
    left[alone, :, 0] = out.view(len(contexts), KV_HEADS, group, D)[alone, :, 0]
    found: dict[tuple[int, int, int], tuple[int, int] | None] = {}
    for request in range(len(contexts)):
        for head in range(KV_HEADS):
            for split in range(splits):
                read = left[request, head, split].nonzero().flatten().tolist()
                assert read == list(range(read[0], read[-1] + 1)) if read else True, (
                    "keys in a row"
                )
                found[request, head, split] = (read[0], read[-1] + 1) if read else None
    return found


def grid(found: Grid, contexts: Sequence[int] = CONTEXTS) -> Picture:
    """The tiles of each request, and below them the programs, each as wide as the keys that it read."""
    cell = 50
    left = 92
    top = 66
    gap = 56
    splits = 1 + max(split for _, _, split in found)
    picture = Picture(
        "One program for each key/value head, split and request",
        "; ".join(
            f"request {request}, head {head}, split {split}: "
            + (f"keys {keys[0]} to {keys[1] - 1}" if keys else "returns at once")
            for (request, head, split), keys in found.items()
        ),
        height=308,
    )
    picture.text(left - 14, top + 18, "keys", "end", SOFT)
    for head in range(KV_HEADS):
        picture.text(left - 14, top + 64 + 42 * head, f"kv head {head}", "end")
    x = float(left)
    for request, context in enumerate(contexts):
        who, tiles = "ab"[request], -(-context // TILE)
        picture.text(x, 26, f"request {request}", bold=True)
        picture.text(x, 44, f"{context} keys, {tiles} tiles of {TILE}", fill=SOFT)
        for tile in range(tiles):
            last = min(context, (tile + 1) * TILE) - 1
            picture.cell(x + cell * tile, top, cell, 28, "kept", who, f"{tile * TILE}–{last}")
        used: list[float] = []
        for head in range(KV_HEADS):
            y = top + 42 + 42 * head
            read = [keys for split in range(splits) if (keys := found[request, head, split])]
            for split, (low, high) in enumerate(read):  # those without work are the last
                begin, end = x + cell * low / TILE, x + cell * -(-high // TILE)
                picture.cell(begin, y, end - begin, 32, "now", who, f"split {split}")
                if head == KV_HEADS - 1:
                    used.append((begin + end) / 2)
            if len(read) < splits:
                first, last = len(read), splits - 1
                words = f"split {first}" if first == last else f"splits {first} to {last}"
                picture.cell(x + cell * tiles + 12, y, 92, 32, "coming", "", words)
        if len(read) < splits:
            picture.text(x + cell * tiles + 58, y + 50, "returns at once", "middle", SOFT)
        middle, bottom = sum(used) / len(used), top + 42 + 42 * KV_HEADS
        for place in used:
            picture.curve((place, bottom), (middle + (place - middle) / 6, bottom + 42))
        picture.cell(middle - 60, bottom + 44, 120, 30, "known", who, "attention output")
        x += cell * tiles + (gap if len(read) == splits else 134)
    y = top + 42 + 42 * KV_HEADS + 98
    picture.text(
        left,
        y,
        "In each head every split leaves its part and its lse; the last to finish combines them.",
        fill=INK,
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's one."""
    return {"grid": grid(record())}


def show(splits: int) -> Picture:
    """The same launch with any number of splits."""
    return grid(record(splits=splits))

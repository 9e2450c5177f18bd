"""Phase 14: which part of every matrix each rank has."""

from __future__ import annotations

from benchmarks.pictures.svg import Cell, Lines, Picture, Text, column, picture, row, table
from forward.loading import skeleton
from forward.shapes import SHAPES
from parallel.shard import ROWS, Shard

NAMES = {
    "Q": "self_attn.q_proj",
    "K": "self_attn.k_proj",
    "V": "self_attn.v_proj",
    "O": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SCALE = 1.2


def split(ranks: int = 2) -> Picture:
    """Every matrix of a block, outputs downwards and inputs to the right, and where sums are made.

    There are two key/value heads, so of four ranks two have the same one.
    """
    config = SHAPES["tiny-window"]
    whole = skeleton(config)
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    parts = [skeleton(shard.config(config)) for shard in shards]
    columns: Lines = []
    for name, path in NAMES.items():
        weight = f"layers.0.{path}.weight"
        high, wide = (SCALE * size for size in whole.get_parameter(weight).shape)
        by_inputs = path.endswith(ROWS)
        owners: dict[int, list[str]] = {}
        for shard, part in zip(shards, parts, strict=True):
            full, own = (model.get_parameter(weight).shape for model in (whole, part))
            cut = shard.cut(weight, full, own, config.num_kv_heads)
            assert cut is not None and cut.dim == by_inputs
            owners.setdefault(cut.start, []).append(str(shard.rank))
        count = len(owners)
        size = (wide / count, high) if by_inputs else (wide, high / count)
        boxes = [
            Cell(",".join(who), f"kept {'abcd'[int(who[0])]}", *size)
            for who in owners.values()
        ]
        matrix = row(*boxes) if by_inputs else column(*boxes, gap=0)
        matrix.align = 0.5
        by = Text("by inputs" if by_inputs else "by outputs", "soft mid")
        columns.append([Text(name, "bold mid"), by, matrix])
        if by_inputs:
            columns.append([Text(words, "bold mid") for words in ("", "one sum", "→ Σ →")])
    looks = [f"kept {'abcd'[rank]}: rank {rank}" for rank in range(ranks)]
    return picture(
        "The matrices of a block in parts",
        table(zip(*columns, strict=True), gap=14, label=14, down=4),
        *looks,
        "rows of a matrix are its outputs, columns its inputs",
    )


PICTURES = {"split": split}
show = split

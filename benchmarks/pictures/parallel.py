"""Phase 14: which part of every matrix each rank has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.pictures.svg import INK, PALE, SOFT, STRONG, Anchor, Picture
from forward.loading import skeleton
from forward.shapes import SHAPES
from parallel.shard import Shard

MODEL, RANKS = "tiny-window", 2
LAYER = "layers.0."
NAMES = {
    "Q": "self_attn.q_proj",
    "K": "self_attn.k_proj",
    "V": "self_attn.v_proj",
    "O": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "head": "lm_head",
}


class Cut(NamedTuple):
    """A matrix `[outputs, inputs]`, the dimension that is cut, and each rank's first and last place in it."""

    shape: tuple[int, int]
    dim: int
    parts: tuple[tuple[int, int], ...]


def record(ranks: int = RANKS) -> Mapping[str, Cut]:
    """What `Shard` says of each matrix of the model."""
    config = SHAPES[MODEL]
    whole = skeleton(config)
    found: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    dims: dict[str, int] = {}
    for rank in range(ranks):
        shard = Shard(rank, ranks)
        part = skeleton(shard.config(config))
        for name, path in NAMES.items():
            layer = path if path == "lm_head" else LAYER + path
            full = next(
                at for at, _ in whole.named_parameters() if at.endswith(f"{layer}.weight")
            )
            big, small = (
                list(whole.get_parameter(full).shape),
                list(part.get_parameter(full).shape),
            )
            if path == "lm_head":
                first, count, _ = shard.vocabulary(config.vocab_size)
                found.setdefault(name, []).append((first, first + count))
                dims[name] = 0
            else:
                cut = shard.cut(full, big, small, config.num_kv_heads)
                assert cut is not None
                dims[name] = cut.dim
                found.setdefault(name, []).append((cut.start, cut.start + cut.length))
            shapes[name] = (big[0], big[1])
    return {name: Cut(shapes[name], dims[name], tuple(parts)) for name, parts in found.items()}


def _span(begin: int, end: int) -> str:
    return f"{begin} to {end - 1}" if end > begin + 1 else str(begin)


def split(cuts: Mapping[str, Cut]) -> Picture:
    """Every matrix of a block, outputs downwards and inputs to the right, and where sums are made."""
    config = SHAPES[MODEL]
    ranks = len(cuts["Q"].parts)
    scale, middle = 1.15, 128
    picture = Picture(
        f"A block's matrices in {'two' if ranks == 2 else 'four'} parts",
        "; ".join(
            f"{name} is cut by its {'inputs' if cut.dim else 'outputs'}: "
            + " and ".join(f"{a} to {b - 1}" for a, b in cut.parts)
            for name, cut in cuts.items()
        ),
        height=292,
    )
    x = 20.0
    centres: dict[str, float] = {}
    for name, cut in cuts.items():
        high, wide = (scale * size for size in cut.shape)
        if name == "head":
            high = 128  # cut down to the panel; its halves are in proportion
        top = middle - high / 2
        for rank, (begin, end) in enumerate(cut.parts):
            who, whole = "abcd"[rank], cut.shape[cut.dim]
            owners = [
                str(other) for other, part in enumerate(cut.parts) if part == (begin, end)
            ]
            if cut.dim:
                place = (x + wide * begin / whole, top, wide * (end - begin) / whole - 2, high)
            else:
                place = (x, top + high * begin / whole, wide, high * (end - begin) / whole - 2)
            picture.box(*place, PALE[who], STRONG[who])
            centre = (place[0] + place[2] / 2, place[1] + place[3] / 2 + 4)
            picture.text(
                *centre, ",".join(owners), anchor="middle", fill=STRONG[who], bold=True
            )
        centres[name] = x + wide / 2
        picture.text(centres[name], 24, name, "middle", bold=True)
        words = "inputs" if cut.dim else "outputs"
        picture.text(centres[name], 40, f"by {words}", "middle", SOFT, 11)
        x += wide
        if name in ("O", "down"):
            picture.line([(x + 4, middle), (x + 14, middle)], INK, tip=True)
            picture.circle(x + 28, middle, 13, "#fffefc", INK)
            picture.text(x + 28, middle + 5, "Σ", "middle", bold=True, size=14)
            picture.line([(x + 42, middle), (x + 53, middle)], INK, tip=True)
            picture.text(x + 28, middle + 32, "one sum", "middle", SOFT, 11)
            x += 58
        else:
            x += 16 if name in ("V", "up") else 8
    q, kv = config.num_heads // ranks, max(1, config.num_kv_heads // ranks)
    heads = " and ".join(_span(rank * q, rank * q + q) for rank in range(ranks))
    places = (
        ("V", f"query heads {heads}; {kv} key/value head{'s' * (kv > 1)} each"),
        ("up", "inner numbers " + " and ".join(_span(*part) for part in cuts["up"].parts)),
        ("head", "tokens " + ", ".join(_span(*part) for part in cuts["head"].parts)),
    )
    if ranks > RANKS:  # there is no room for all of them
        counts = [end - begin for begin, end in cuts["head"].parts]
        places = (
            ("V", f"{q} query head each, 2 ranks a key/value head"),
            ("up", f"{config.intermediate_size // ranks} inner numbers each"),
            ("head", f"{', '.join(map(str, counts))} tokens"),
        )
    for name, words in places:
        anchor: Anchor = "end" if name == "head" else "middle"
        at = 744 if name == "head" else centres[name]
        picture.text(at, 222, words, anchor, INK, 11)
    for rank in range(ranks):
        x = 20.0 + 90 * rank
        picture.box(x, 262, 18, 15, PALE["abcd"[rank]], STRONG["abcd"[rank]])
        picture.text(x + 24, 274, f"rank {rank}", fill=SOFT)
    picture.text(
        20 + 90 * ranks, 274, "rows of a matrix are its outputs, columns its inputs", fill=SOFT
    )
    return picture


def pictures() -> dict[str, Picture]:
    """The lesson's one."""
    return {"split": split(record())}


def show(ranks: int) -> Picture:
    """The matrices of 2 or 4 ranks. There are two key/value heads, so of four ranks two have the same one."""
    return split(record(ranks))

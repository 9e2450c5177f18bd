"""The shards of a model: heads, the MLP's inside and the vocabulary are cut; all else is whole on each rank.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053: of two matrices in a row the first is cut by columns and the
second by rows, so that each rank computes its part of both by itself, and one sum over ranks ends the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.errors import UserError
from common.models.config import ModelConfig

ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Layers that are cut along their inputs: each rank's product is a part of a sum."""
KEYS = ("self_attn.k_proj", "self_attn.v_proj")
VOCABULARY = ("embed_tokens", "lm_head")


class Slice(NamedTuple):
    """A range of the dimension `dim` of a tensor: `length` entries from `start` on, or fewer at its end."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """The shard of a model that rank `rank` of `size` ranks has.

    Where there are fewer key/value heads than ranks, neighbouring ranks have the same head.
    """

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the configuration of this rank's part as a model of its own, given that of the whole model.

        Query heads and the MLP's inside are cut in `size` equal parts; the vocabulary stays. Key/value heads
        are cut, too, unless there are fewer of them than ranks: then each rank has one head, and `size` /
        heads neighbouring ranks have the same one.

        Raises:
            UserError: `size` does not divide num_heads, or else intermediate_size; or neither of num_kv_heads
                and `size` divides the other.
        """
        size = self.size
        cut = {"num_heads": whole.num_heads, "intermediate_size": whole.intermediate_size}
        for name, count in cut.items():
            if count % size:
                raise UserError(
                    f"tensor_parallel is {size}, but must divide the model's {name}, which is {count}"
                )
        heads = whole.num_kv_heads
        if heads % size and size % heads:
            raise UserError(
                f"tensor_parallel is {size}, but must divide the model's num_kv_heads, which is {heads}, or "
                "be a multiple of it"
            )
        return replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=max(1, heads // size),
            intermediate_size=whole.intermediate_size // size,
        )

    def vocabulary(self, whole: int) -> tuple[int, int, int]:
        """Return this rank's first token id, its number of tokens, and its room: how many it could have.

        Room is the same on all ranks: `whole / size`, rounded up. Ranks fill it in their order, so the last
        ones may have fewer tokens, or none: then their first token id is `whole`.

        whole: number of tokens of the vocabulary.
        """
        room = -(-whole // self.size)
        first = min(whole, self.rank * room)
        return first, min(whole, first + room) - first, room

    def cut(
        self, name: str, whole: Sequence[int], own: Sequence[int], kv_heads: int
    ) -> Slice | None:
        """Return the `Slice` (dim, start, length) of the tensor `name` that this rank has; None: all of it.

        name: of the layer and the tensor, such as `layers.0.self_attn.k_proj.weight`.
        whole, own: the tensor's shape in the whole model, and in this rank's. kv_heads: the whole model's.

        A tensor (weight, packed numbers, scales, zero points) is cut in the dimension in which its shapes
        differ, into parts of the length that `own` has there, in the order of ranks. Two kinds of layers
        differ:

        - `VOCABULARY` (embedding and head), in dimension 0: parts are rounded up (see `vocabulary`), so the
          last may begin at the tensor's end, and may reach beyond it.
        - `KEYS` (key and value projections), with fewer key/value heads than ranks: there are as many parts
          as heads, and neighbouring ranks have the same part.

        Raises:
            UserError: more than one dimension differs, or the parts do not make the whole.
        """
        owner = name.rpartition(".")[0]
        cut = [dim for dim, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b]
        if not cut:
            return None
        dim = cut[0]
        if owner in VOCABULARY and dim == 0:
            return Slice(0, min(whole[0], self.rank * own[0]), own[0])
        parts, place = self.size, self.rank
        if owner.endswith(KEYS) and kv_heads < self.size:
            parts, place = kv_heads, self.rank * kv_heads // self.size
        if len(cut) > 1 or own[dim] * parts != whole[dim]:
            raise UserError(
                f"tensor_parallel is {self.size}, but {name}, {list(whole)}, cannot be cut in {parts} parts: "
                "groups of weights that share a scale must stay together"
            )
        return Slice(dim, place * own[dim], own[dim])

    def first_alone(self, name: str) -> bool:
        """Return True if only rank 0 has the tensor `name` and the others have zeros; else False.

        It is so for the bias of a layer in `ROWS` (cut along its inputs): products are summed over ranks, and
        a bias is added once.
        """
        owner, _, leaf = name.rpartition(".")
        return leaf == "bias" and owner.endswith(ROWS)

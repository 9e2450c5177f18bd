"""Who has which part of the model: heads, the MLP's inside and the vocabulary are cut, the rest is not.

Shoeybi et al., "Megatron-LM", arXiv 1909.08053: of two matrices in a row the first is cut by columns and the
second by rows, so that each rank computes its part of both by itself, and one sum over ranks ends the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.errors import UserError
from common.models.config import ModelConfig

ROWS = ("self_attn.o_proj", "mlp.down_proj", "attn.c_proj", "mlp.c_proj")
"""Layers that are cut along their inputs: each rank's product is a part of a sum."""
KEYS = ("self_attn.k_proj", "self_attn.v_proj")
VOCABULARY = ("embed_tokens", "wte", "lm_head")
JOINED = "attn.c_attn"
"""GPT-2's queries, keys and values in one matrix: each third is cut."""


class Slice(NamedTuple):
    """`length` places of dimension `dim`, from `start` on; fewer where the tensor ends before that."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """One rank of `size`, and its part of a model.

    Where there are fewer key/value heads than ranks, neighbours have the same one.
    """

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """This rank's model as a model of its own; the vocabulary is still all there is.

        Raises:
            UserError: something cannot be cut in so many parts.
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
        """First token id, how many there are, and for how many there is room, the same on all ranks."""
        room = -(-whole // self.size)
        first = min(whole, self.rank * room)
        return first, min(whole, first + room) - first, room

    def cut(self, name: str, whole: Sequence[int], own: Sequence[int], kv_heads: int) -> Slice | None:
        """Which part of the tensor `name` this rank has, given its shapes; None: all of it.

        Of packed numbers, scales and zero points the shapes tell as well how they are cut.

        Args:
            kv_heads: of the whole model.

        Raises:
            UserError: there are no such parts.
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
        """Whether only rank 0 has the tensor and the others zeros: a bias is added once to a sum of parts."""
        owner, _, leaf = name.rpartition(".")
        return leaf == "bias" and owner.endswith(ROWS)

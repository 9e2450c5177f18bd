"""Experts over the ranks of phase 14: whole experts to each rank, or a part of every expert's inside.

Attention is cut as in phase 14, so behind its sum every rank has every token, and the same router chooses the
same experts on all of them. A rank computes what it has of those, and one more sum over ranks ends the layer:
expert parallel costs what tensor parallel costs, and has the shapes of one rank, which a graph can hold.

The other way is an all-to-all: a rank owns some of the tokens, sends each to the ranks of its experts, and
gets their outputs back. That is fewer bytes where a token's experts are on few of many ranks, but attention
must be cut by requests for it, and every rank has to know how many rows come, which no graph can hold.
Counted by `traffic` for Qwen3-30B-A3B, 8 of 128 experts chosen evenly, bytes a token and layer of all ranks;
and the busiest rank's rows over the mean, by `imbalance`:

    ranks   all-reduce   all-to-all   1 token   16 tokens   256 tokens
        2        8,192        8,170      1.26        1.07         1.02
        4       24,576       22,200      1.74        1.17         1.03
        8       57,344       38,000      2.52        1.37         1.08

So whole experts lose with a few tokens, where all wait for the rank that has most of the chosen; a part of
every expert's inside is balanced always, but with many ranks too narrow a product: 96 of 768 with 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError, choice
from common.options import option
from experts.feature import MixtureOfExperts
from experts.kernels.stack import ExpertStack, Swiglu
from experts.layer import Experts
from experts.stacked import ExpertWay, StackedExperts, Stacking
from forward.loading import config_of
from forward.model import Model
from paged_cache import Feature, Parts, Recipe
from parallel.feature import Parallel, Split
from parallel.ranks import Ranks
from quant.formats import BLOCK
from quant.loading import Quantize

CUTS = ("experts", "inside")


def first_experts(count: int, ranks: int) -> list[int]:
    """Return each rank's first expert, and `count`: neighbours differ by one expert at most."""
    return [count * rank // ranks for rank in range(ranks + 1)]


def rows_of_ranks(chosen: Tensor, count: int, ranks: int) -> list[int]:
    """Return how many rows each rank computes of the choices `[T, k]`, if it has whole experts."""
    rows = torch.bincount(chosen.flatten(), minlength=count)
    return [int(rows[first:end].sum()) for first, end in pairwise(first_experts(count, ranks))]


def imbalance(rows: Sequence[int]) -> float:
    """Return the busiest rank's rows over the mean: what all others wait for. 1.0 is a perfect balance."""
    return max(rows) * len(rows) / max(1, sum(rows))


class Traffic(NamedTuple):
    """Bytes that all ranks together send in a layer."""

    all_reduce: int
    all_to_all: int


def traffic(chosen: Tensor, count: int, ranks: int, token_bytes: int) -> Traffic:
    """Count what the choices `[T, k]` of a step cost in both ways, tokens spread evenly over the ranks.

    A ring sends each number of a sum `2 (ranks - 1)` times. An all-to-all sends a token once to each other
    rank that has some of its experts, and gets a sum back from it.
    """
    tokens = len(chosen)
    edges = torch.tensor(first_experts(count, ranks)[1:], device=chosen.device)
    has = torch.searchsorted(edges, chosen.contiguous(), right=True)  # [T, k], the rank of each choice
    home = torch.arange(tokens, device=chosen.device) * ranks // max(1, tokens)
    visits = torch.zeros(tokens, ranks, dtype=torch.bool, device=chosen.device).scatter_(1, has, True)
    visits.scatter_(1, home[:, None], False)
    return Traffic(2 * (ranks - 1) * tokens * token_bytes, 2 * int(visits.sum()) * token_bytes)


def cut_inside(stack: ExpertStack, ranks: Ranks, act: Swiglu | None) -> ExpertStack:
    """A rank's part of every expert: with `act` the rows of some gates and ups, else columns of `down`.

    Raises:
        UserError: the parts would not be equal, or a scale would be of two ranks.
    """
    blocks = stack.scheme is not None and stack.scheme.scales == "block"
    size = stack.data.shape[2] if act is None else stack.data.shape[1] // 2
    if size % (ranks.size * (BLOCK if blocks else 1)):
        raise UserError(f"tensor_parallel is {ranks.size}, but an expert's inside is {size}: cut 'experts'")

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(ranks.size, dim)[ranks.rank].contiguous()

    def rows(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or act is None or act.interleaved:
            return None if tensor is None else part(tensor, 1)
        return torch.cat([part(half, 1) for half in tensor.chunk(2, 1)], 1)

    data, scale, bias = stack.data, stack.scale, stack.bias
    if act is not None:
        return ExpertStack(rows(data), rows(scale), rows(bias), stack.scheme)  # type: ignore[arg-type]
    scale = part(scale, 2) if blocks and scale is not None else scale
    bias = torch.zeros_like(bias) if bias is not None and ranks.rank else bias  # it is added once
    return replace(stack, data=part(data, 2), scale=scale, bias=bias)


def some_of(stack: ExpertStack, own: range) -> ExpertStack:
    """Return the stack of some experts, copied, so that the others are let go of."""

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[own.start : own.stop].clone()

    data = stack.data[own.start : own.stop].clone()
    return replace(stack, data=data, scale=part(stack.scale), bias=part(stack.bias))


class OverRanks:
    """An `ExpertWay` around others: a rank computes its part, and the parts of all ranks add up.

    first: the number of this rank's first expert. Others are, to the ways inside, experts that do not exist.
    """

    def __init__(self, ways: Sequence[ExpertWay], ranks: Ranks, first: int) -> None:
        self.ways, self.ranks, self.first = list(ways), ranks, first

    def takes(self, tokens: int) -> bool:
        """See `ExpertWay.takes`."""
        return True

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `ExpertWay`; the same on every rank."""
        way = next(way for way in self.ways if way.takes(len(x)))
        return self.ranks.all_reduce(way(x, weights, chosen - self.first))


class Sharing(Quantize):
    """A `Linears` around `Stacking`: a rank keeps its part. Phase 14 asks whether it is a `Quantize`.

    Experts that are not stacked, in a format that no kernel here reads, stay whole on every rank.
    """

    def __init__(self, inner: Stacking, ranks: Ranks, cut: str) -> None:
        below = inner.inner
        super().__init__(*((below.scheme, below.head) if isinstance(below, Quantize) else ()))
        self.inner, self.ranks, self.by_expert = inner, ranks, cut == CUTS[0]

    def own(self, count: int) -> range:
        """This rank's experts."""
        edges = first_experts(count, self.ranks.size)
        return range(edges[self.ranks.rank], edges[self.ranks.rank + 1])

    def expect(self, model: Model) -> None:
        """See `Linears.expect`."""
        self.inner.expect(model)
        plain = self.scheme is None and model.config.quantization is None
        self.by_expert = self.by_expert and (plain or self.inner.eight)

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `Linears.place`: other ranks' experts are let go of at once."""
        group, found, rest = name.partition(".experts.")
        number = rest.partition(".")[0]
        if self.by_expert and found and number.isdigit():
            layer = model.get_submodule(group)
            if isinstance(layer, Experts) and int(number) not in self.own(layer.facts.count):
                return
        self.inner.place(model, name, tensor)

    def finish(self, model: Model) -> Model:
        """See `Linears.finish`."""
        for layer in model.modules():
            if self.by_expert and isinstance(layer, Experts) and isinstance(layer.experts, nn.ModuleList):
                own = self.own(layer.facts.count)
                layer.experts = layer.experts[own.start : own.stop]
        model = self.inner.finish(model)
        for layer in model.modules():
            if not isinstance(layer, StackedExperts):
                continue
            up, down, own = layer.gate_up, layer.down, self.own(layer.facts.count)
            if not self.by_expert:
                layer.keep(cut_inside(up, self.ranks, layer.act), cut_inside(down, self.ranks, None))
            elif len(down.data) > len(own):  # a family's that lay in stacks already
                layer.keep(some_of(up, own), some_of(down, own))
        return model


@dataclass(frozen=True)
class ExpertParallel(Feature):
    """With several ranks, each has a part of the experts; with one, nothing changes."""

    name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[int] = 16

    cut: str = option("experts", "what a rank has: experts (whole ones) or inside (a part of every expert)")

    def __post_init__(self) -> None:
        """Check the option."""
        choice("cut", self.cut, CUTS)

    def prepare(self, parts: Parts) -> None:
        """Let each rank keep its part while the model is loaded. Rank 0 checks before any other begins."""
        for one in parts.recipe.features:
            if isinstance(one, Parallel) and one.tensor_parallel > 1:
                self.check(parts.recipe, one.tensor_parallel)
        ranks = _ranks(parts)
        if ranks is not None and isinstance(parts.linears, Stacking):
            parts.wrap(self, linears=lambda inner: Sharing(inner, ranks, self.cut))

    def check(self, recipe: Recipe, size: int) -> None:
        """Raise `UserError` for what `size` ranks cannot do."""
        facts = None if isinstance(recipe.model, Model) else config_of(str(recipe.model)).experts
        asked = any(isinstance(one, MixtureOfExperts) and one.active_experts for one in recipe.features)
        if facts is None and asked:
            raise UserError(f"tensor_parallel is {size}, but active_experts cuts a dense model on one GPU")
        if facts is not None and self.cut == "experts" and facts.count < size:
            raise UserError(f"tensor_parallel is {size}, but a layer has {facts.count} experts: cut 'inside'")

    def install(self, parts: Parts) -> None:
        """Add up what the ranks compute."""
        ranks = _ranks(parts)
        if ranks is None:
            return
        for layer in parts.own_model().modules():
            if isinstance(layer, StackedExperts):
                by_expert = len(layer.down.data) < layer.facts.count
                first = first_experts(layer.facts.count, ranks.size)[ranks.rank] if by_expert else 0
                layer.ways = [OverRanks(layer.ways, ranks, first)]


def _ranks(parts: Parts) -> Ranks | None:
    """Return the ranks that this engine is one of."""
    return next((one.ranks for one in parts.recipe.features if isinstance(one, Split)), None)

"""Experts over the ranks of phase 14: whole experts to each rank, or a part of every expert's inside.

Attention is cut as in phase 14, so behind its sum every rank has every token, and the same router chooses the
same experts on all of them. A rank computes what it has of those, and one more sum over ranks ends the layer:
expert parallel costs what tensor parallel costs, and has the shapes of one rank, which a graph can hold.

The other way is an all-to-all: a rank owns some of the tokens, sends each to the ranks of its experts, and
gets their outputs back. That is fewer bytes where a token's experts are on few of many ranks, but attention
must be cut by requests for it, and every rank has to know how many rows come, which no graph can hold.
For Qwen3-30B-A3B, 8 of 128 experts chosen evenly, bytes a token and layer of all ranks, and the busiest
rank's rows over the mean:

    ranks   all-reduce   all-to-all   1 token   16 tokens   256 tokens
        2        8,192        8,170      1.26        1.07         1.02
        4       24,576       22,200      1.74        1.17         1.03
        8       57,344       38,000      2.52        1.37         1.08

So whole experts lose with a few tokens, where all wait for the rank that has most of the chosen; a part of
every expert's inside is balanced always, but with many ranks too narrow a product: 96 of 768 with 8. And a
rank cuts its part of an inside when all experts are loaded: it has to have room for the whole model once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.errors import UserError, choice
from common.options import option
from experts.feature import MixtureOfExperts, expert_layers
from experts.kernels.stack import ExpertStack
from experts.layer import ExpertList
from experts.stacked import StackedExperts
from forward.loading import config_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature, Recipe
from parallel.feature import Parallel, Split
from parallel.ranks import Ranks
from quant.formats import BLOCK
from quant.loading import Quantize

CUTS = ("experts", "inside")


def own_experts(count: int, ranks: Ranks) -> range:
    """Return a rank's experts, of `count` in all; two ranks differ by one expert at most."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


def cut_inside(stack: ExpertStack, ranks: Ranks, gated: bool) -> ExpertStack:
    """A rank's part of every expert. gated: rows of some gates and of their ups; otherwise columns of `down`.

    Raises:
        UserError: the parts would not be equal, or a scale would be of two ranks.
    """
    size = stack.data.shape[1] // 2 if gated else stack.data.shape[2]
    if size % (ranks.size * (BLOCK if stack.in_blocks else 1)):
        raise UserError(
            f"tensor_parallel is {ranks.size}, but an expert's inside is {size}: cut 'experts'"
        )

    def part(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(ranks.size, dim)[ranks.rank].contiguous()

    if gated:
        return stack.each(lambda t: torch.cat([part(half, 1) for half in t.chunk(2, 1)], 1))
    scale, bias = stack.scale, stack.bias
    scale = part(scale, 2) if scale is not None and stack.in_blocks else scale
    bias = (
        torch.zeros_like(bias) if bias is not None and ranks.rank else bias
    )  # it is added once
    return ExpertStack(part(stack.data, 2), scale, bias, stack.scheme)


class OwnExpertsLoader(Quantize):
    """A `WeightLoader` around another: the experts of other ranks are not kept. own: those of this rank."""

    def __init__(self, inner: Quantize | None, ranks: Ranks) -> None:
        self.inner = inner or Quantize()
        super().__init__(self.inner.scheme, self.inner.head)
        self.ranks, self.own = ranks, range(0)

    def reading(self) -> Quantize:
        """See `Quantize.reading`."""
        return self.inner.reading()

    def expect(self, model: Model) -> None:
        """See `WeightLoader.expect`."""
        self.inner.expect(model)
        if model.config.experts is not None:
            self.own = own_experts(model.config.experts.count, self.ranks)

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """See `WeightLoader.place`: other ranks' experts are let go of at once."""
        number = name.partition(".experts.")[2].partition(".")[0]
        if not number.isdigit() or int(number) in self.own:
            self.inner.place(model, name, tensor)

    def finish(self, model: Model) -> Model:
        """See `WeightLoader.finish`."""
        for layer in expert_layers(model):
            if isinstance(layer.experts, ExpertList):
                layer.experts = layer.experts.only(self.own)
        return self.inner.finish(model)


@dataclass(frozen=True)
class ExpertParallel(Feature):
    """With several ranks, each has a part of the experts; with one, nothing changes."""

    name: ClassVar[str] = "expert_parallel"
    phase: ClassVar[int] = 16

    cut: str = option(
        "experts", "what a rank has: experts (whole ones) or inside (a part of every expert)"
    )

    def __post_init__(self) -> None:
        """Check the option."""
        choice("cut", self.cut, CUTS)

    def prepare(self, builder: EngineBuilder) -> None:
        """Let each rank keep its part while the model is loaded. Rank 0 checks before any other begins."""
        for one in builder.recipe.features:
            if isinstance(one, Parallel) and one.tensor_parallel > 1:
                self.check(builder.recipe, one.tensor_parallel)
            elif isinstance(one, Split):
                if self.cut == CUTS[0]:
                    builder.decorate(
                        self, weight_loader=partial(OwnExpertsLoader, ranks=one.ranks)
                    )
                builder.stages["load"].append(partial(self._share, one.ranks))

    def check(self, recipe: Recipe, size: int) -> None:
        """Raise `UserError` for what `size` ranks cannot do."""
        facts = (
            None if isinstance(recipe.model, Model) else config_of(str(recipe.model)).experts
        )
        asked = any(
            isinstance(one, MixtureOfExperts) and one.active_experts for one in recipe.features
        )
        if facts is None and asked:
            raise UserError(
                f"tensor_parallel is {size}, but active_experts cuts a dense model on one GPU"
            )
        if facts is not None and self.cut == "experts" and facts.count < size:
            raise UserError(
                f"tensor_parallel is {size}, but a layer has {facts.count} experts: cut 'inside'"
            )

    def _share(self, ranks: Ranks, builder: EngineBuilder) -> None:
        """Let a rank's part of each layer add up with the parts of the others."""
        for layer in expert_layers(builder.model):
            made = layer.experts
            if self.cut == CUTS[0]:
                layer.first = own_experts(layer.facts.count, ranks).start
            elif isinstance(made, StackedExperts):
                made.gate_up = cut_inside(made.gate_up, ranks, True)
                made.down = cut_inside(made.down, ranks, False)
            else:  # one by one, on every rank whole
                continue
            layer.total = ranks.all_reduce

    def install(self, builder: EngineBuilder) -> None:
        """Do nothing more: the layers are loaded."""

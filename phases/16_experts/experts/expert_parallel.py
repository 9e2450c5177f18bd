"""Expert parallelism: each rank of phase 14's process group has some of the experts, whole.

Attention is sharded as in phase 14, so after its sum over ranks every rank has every token, and the same
router chooses the same experts on all of them. A rank computes those that it has, and one more sum over ranks
ends the layer: expert parallelism costs what tensor parallelism costs, and has the shapes of one rank, which
a CUDA graph can hold.

The other way is an all-to-all: a rank owns some of the tokens, sends each to the ranks of its experts, and
gets their outputs back. That is fewer bytes where a token's experts are on 2 or 3 of many ranks, but
attention must be split by requests for it, and every rank has to know how many rows come, which no graph can
hold.
For Qwen3-30B-A3B, 8 of 128 experts chosen evenly: bytes that all ranks send for a token in a layer, and the
busiest rank's number of rows over the mean, for batches of 1, 16 and 256 tokens:

    ranks   all-reduce   all-to-all   1 token   16 tokens   256 tokens
        2        8,192        8,170      1.26        1.07         1.02
        4       24,576       22,200      1.74        1.17         1.03
        8       57,344       38,000      2.52        1.37         1.08

So whole experts lose with small batches, where all wait for the rank that has most of the chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from common.errors import UserError
from experts.feature import expert_layers
from experts.grouped_experts import GroupedExperts
from experts.layer import ExpertModules
from forward.loading import facts_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from parallel.feature import Parallel, Split
from parallel.ranks import Ranks
from quant.loading import Quantize


def own_experts(count: int, ranks: Ranks) -> range:
    """Return the range of experts, of `count`, that this rank has; ranges differ in length by at most 1."""
    return range(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)


class OwnExpertsLoader(Quantize):
    """A weight loader around another one, `inner`, that drops the experts of other ranks.

    inner: quantizes weights; None: no weight is quantized.
    own: numbers of this rank's experts; empty before `expect`.
    """

    def __init__(self, inner: Quantize | None, ranks: Ranks) -> None:
        self.inner = inner or Quantize()
        super().__init__(self.inner.scheme, self.inner.head)
        self.ranks, self.own = ranks, range(0)

    def reading(self) -> Quantize:
        """Return a loader for another model, such as a draft model.

        It reads quantized checkpoints as `inner` does, but quantizes nothing and drops no experts.
        """
        return self.inner.reading()

    def expect(self, model: Model) -> None:
        """Prepare a model on the device `meta` for its checkpoint, in place; set `own`."""
        self.inner.expect(model)
        if model.config.experts is not None:
            self.own = own_experts(model.config.experts.count, self.ranks)

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Store a checkpoint's tensor as `name` in the model, unless it is of an expert of another rank."""
        number = name.partition(".experts.")[2].partition(".")[0]
        if not number.isdigit() or int(number) in self.own:
            self.inner.place(model, name, tensor)

    def finish(self, model: Model) -> Model:
        """Remove the experts of other ranks from the model after all tensors are loaded, and return it."""
        for layer in expert_layers(model):
            if isinstance(layer.experts, ExpertModules | GroupedExperts):
                layer.experts = layer.experts.only(self.own)
        return self.inner.finish(model)


@dataclass(frozen=True)
class ExpertParallel(Feature):
    """Expert parallelism: with several ranks, each has some of the experts; with one, nothing changes."""

    name = "expert_parallel"
    phase = 16

    def configure_load(self, builder: EngineBuilder) -> None:
        """Let each rank keep only its own experts while `builder` loads the model.

        Raises:
            UserError: a layer has fewer experts than there are ranks. Rank 0 raises it before other ranks
                start.
        """
        parallel, split = builder.feature(Parallel), builder.feature(Split)
        if parallel and parallel.tensor_parallel > 1:
            experts = facts_of(builder.recipe.model).experts
            if experts is not None and experts.count < parallel.tensor_parallel:
                raise UserError(
                    f"tensor_parallel is {parallel.tensor_parallel}, "
                    f"but a layer has {experts.count} experts"
                )
        if split:
            loader = builder.weight_loader.part
            assert loader is None or isinstance(loader, Quantize)
            own = OwnExpertsLoader(loader, split.ranks)
            builder.weight_loader.decorate(self, lambda inner: own)
            # The first: others may run the model.
            builder.surgeries.insert(0, partial(_sum_over_ranks, split.ranks))


def _sum_over_ranks(ranks: Ranks, builder: EngineBuilder) -> None:
    """Let each layer of experts of the builder's model sum its output over all ranks."""
    for layer in expert_layers(builder.own_model()):
        layer.first = own_experts(layer.facts.count, ranks).start
        layer.all_reduce = ranks.all_reduce

"""The parts of an engine, and features, which change them.

A feature is one optimization: a small frozen dataclass whose fields are its options, and whose `install` puts
its own parts in the places of the usual ones. This phase has none. Every later phase adds one or two, and
`build` makes an engine with any of them, each by itself or together with others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from common.errors import UserError, number
from common.options import option
from common.sampling.sampler import TORCH, SamplerBackend
from common.text.tokenizer import Tokenizer
from continuous.engine import Engine
from continuous.seams import NO_DRAFTS, NO_GRAMMAR_MANAGER, Drafter, GrammarManager, Loop
from continuous.sizes import Sizes
from forward.loading import WeightLoader
from forward.model import Model
from forward.surgery import clone
from paged_cache.attention import PagedAttention, TorchPagedAttention
from paged_cache.cache import PagedCache
from paged_cache.memory import MemoryPlan
from paged_cache.pool import BlockPool, KVFormat
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler

PagedEngine = Engine
"""One over a block pool: its cache is a `PagedCache`."""


@dataclass(frozen=True)
class PagedSizes(Sizes):
    """`Sizes`, and those of a paged cache."""

    LIMITS: ClassVar[dict[str, tuple[int, int | None]]] = {
        **Sizes.LIMITS,
        "block_size": (1, 1 << 16),
    }

    block_size: int | None = option(None, "tokens in a block of the cache")
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory to fill, unless cache_bytes is given"
    )

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        super().__post_init__()
        number(
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            low=0.0,
            high=1.0,
            above_low=True,
        )


@dataclass(frozen=True)
class Recipe:
    """All that `build` is given.

    model: a name, whose model then belongs to the engine, so that a feature may replace layers in place; or a
        loaded model, which stays as it is.
    features: in any order; those of `EngineBuilder.recipe` are in the order of their phases.
    """

    model: str | Path | Model
    sizes: PagedSizes = PagedSizes()
    features: tuple[Feature, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: Tokenizer | None = None


Stage = Callable[["EngineBuilder"], object]


@dataclass
class EngineBuilder:
    """The parts of an engine that is being made; the defaults are this phase's.

    stages: all that is done, in order: each stage is a list of calls with these parts. A feature may add a
        call to a stage, or put another one in the place of this phase's.
    linears: a say in how linear layers keep their weights while the model is loaded.
    kv: how keys and values are stored.
    cache, scheduler, pool, attention, runner: what `make` calls to make each of them.
    chooser: of the sampler's tokens.
    loops: called in this order with the new engine; each makes its loop, perhaps around the one it has.
    plans: what a runner with plans calls, in this order, to make each; see `continuous.runner.StepExecutor`.
    drafter, masks: objects that take part in steps.
    reserve: asked after all features are installed how many bytes to leave free.
    usual: sizes that features suggest instead of None.
    brought: the features whose parts are in the place of the default, by part, the innermost first.

    Stages fill in the rest. model (`load`): owned by the builder, unless `borrowed` from the caller; see
    `own_model`. features (`install`): those installed so far, by name. ledger (`plan`), engine (`make`).
    """

    recipe: Recipe
    stages: dict[str, list[Stage]] = field(default_factory=dict)
    weight_loader: WeightLoader | None = None
    kv: KVFormat = KVFormat()
    cache: Callable[..., PagedCache] = PagedCache
    scheduler: Callable[..., PagedScheduler] = PagedScheduler
    pool: Callable[..., BlockPool] = BlockPool
    attention: Callable[[BlockPool], PagedAttention] = TorchPagedAttention
    sampler_backend: SamplerBackend = TORCH
    runner: Callable[..., PagedRunner] = PagedRunner
    loops: dict[str, Callable[[PagedEngine], Loop]] = field(default_factory=dict)
    plans: dict[str, Callable[..., Any]] = field(default_factory=dict)
    drafter: Drafter = NO_DRAFTS
    masks: GrammarManager = NO_GRAMMAR_MANAGER
    reserve: list[Callable[[EngineBuilder], int]] = field(default_factory=list)
    defaults: dict[str, int] = field(
        default_factory=lambda: {"max_rows": 64, "block_size": 16}
    )
    owners: dict[str, list[str]] = field(default_factory=dict)
    features: dict[str, Feature] = field(default_factory=dict)
    borrowed: bool = False
    model: Model = field(init=False)
    memory_plan: MemoryPlan = field(init=False)
    engine: PagedEngine = field(init=False)

    @property
    def sizes(self) -> PagedSizes:
        """The sizes that were asked for."""
        return self.recipe.sizes

    def add(self, feature: Feature) -> None:
        """Note a feature by its name. Raises `UserError` for a second one of that name."""
        if feature.name in self.features:
            raise UserError(f"{feature.name} is given twice")
        self.features[feature.name] = feature

    def replace(self, feature: Feature, **builder: Any) -> None:
        """Put a feature's parts in the places of the usual ones.

        Raises:
            UserError: another feature has brought such a part already.
        """
        for name, part in builder.items():
            if name in self.owners:
                raise UserError(
                    f"{feature.name} and {self.owners[name][0]} cannot both be on: "
                    f"each brings its own {name}"
                )
            self.owners[name] = [feature.name]
            setattr(self, name, part)

    def decorate(self, feature: Feature, **around: Callable[[Any], Any]) -> None:
        """Put a feature's parts around those that are there: each is made of the one so far."""
        for name, made in around.items():
            setattr(self, name, made(getattr(self, name)))
            self.owners.setdefault(name, []).append(feature.name)

    def own_model(self) -> Model:
        """The model, for a feature that replaces layers; if borrowed, a copy that shares its weights."""
        if self.borrowed:
            self.model, self.borrowed = clone(self.model), False
        return self.model

    def size(self, name: str) -> int:
        """A size as it will be: what the caller asked for, or what is usual with these features."""
        asked = getattr(self.sizes, name)
        return int(self.defaults[name] if asked is None else asked)


class Feature(ABC):
    """One optimization. Subclasses are frozen dataclasses of options; construction checks these.

    name: what it is called in options and files, such as `prefix_cache`.
    phase: the number of the phase that brings it; features are installed in this order.
    without: options that say in its own words what an engine does that lacks it. Giving one of these values
        asks for nothing.
    """

    name: ClassVar[str]
    phase: ClassVar[int]
    without: ClassVar[Mapping[str, Any]] = {}

    def prepare(self, builder: EngineBuilder) -> None:  # noqa: B027  # most features leave all as it is
        """Change the stages, or what they begin with, before the first of them."""

    @abstractmethod
    def install(self, builder: EngineBuilder) -> None:
        """Change the parts. Raises `UserError` where it makes no sense with the others, or on this device."""

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """Return True if it is on by default for this device and the `others` chosen."""
        return True

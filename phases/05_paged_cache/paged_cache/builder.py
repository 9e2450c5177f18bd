"""From a recipe (model, sizes, features) to an engine: the engine's parts, and the order of making them.

Every exchangeable part of an engine (scheduler, cache, attention, ...) has a slot, which holds this phase's
part at first. A feature's `install` replaces or decorates it. Parts of which an engine may have several are
in lists; executors, which run certain steps faster, are in a dict, one of each class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Generic, TypeVar

from common.errors import UserError
from common.sampling.sampler import TORCH, SamplerBackend
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from continuous.runner import ONE_TOKEN_EACH, OutputVerifier
from continuous.seams import (
    NO_DRAFTS,
    NO_GRAMMAR_MANAGER,
    SEQUENTIAL_LOOP,
    Drafter,
    GrammarManager,
    Loop,
)
from continuous.work import Work
from forward.loading import WeightLoader, load_model
from forward.model import Model
from forward.surgery import clone
from paged_cache.attention import PagedAttention, TorchPagedAttention
from paged_cache.cache import PagedCache
from paged_cache.executor import StepExecutor
from paged_cache.memory import MemoryPlan, plan_cache
from paged_cache.pool import BlockPool, KVFormat
from paged_cache.recipe import F, Feature, Recipe, find
from paged_cache.runner import PagedRunner
from paged_cache.scheduler import PagedScheduler

PagedEngine = Engine
"""One over a block pool: its cache is a `PagedCache`."""
MAX_ROWS = 64
"""Requests that run at a time, unless the caller says otherwise."""
STEP_TOKENS = 2048
"""Tokens that a step computes at most, unless the longest request has more: it must fit in one step."""

T = TypeVar("T")


class Slot(Generic[T]):
    """One exchangeable part of an engine that is being built, such as the factory of its scheduler.

    name: for error messages. part: what the engine will use.
    owner: the name of the first feature that changed the part; empty while it is this phase's own.
    """

    def __init__(self, name: str, part: T) -> None:
        self.name, self.part = name, part
        self.owner = ""

    def replace(self, feature: Feature, part: T) -> None:
        """Store `part` in place of this phase's part, on behalf of `feature`.

        Raises:
            UserError: another feature has replaced or decorated the part already.
        """
        if self.owner:
            raise UserError(
                f"{feature.name} and {self.owner} cannot both be on: each brings its own {self.name}"
            )
        self.part, self.owner = part, feature.name

    def decorate(self, feature: Feature, decorator: Callable[[T], T]) -> None:
        """Replace this slot's part by `decorator(part)`, on behalf of `feature`; several features may."""
        self.part = decorator(self.part)
        self.owner = self.owner or feature.name


class EngineBuilder:
    """The parts of an engine that is being built; features replace and decorate them.

    Slots, of one part each:
    assemble: function that makes the engine. load: function that loads the model. weight_loader: how linear
        layers keep their weights while the model is loaded; None: as phase 01's layers do.
    memory_plan: function that divides the memory, and so sets the number of KV cache blocks.
    kv: the format in which keys and values are stored.
    pool, cache, attention, runner, scheduler: called to make each of them.
    verifier: makes the `OutputVerifier`, which decides which sampled tokens a request keeps.
    sampler_backend, drafter, grammar_manager, loop, on_step_failed: arguments of `Engine` and its parts.

    Lists, and a dict of executors, to which features add:
    surgeries: functions that change the loaded model's layers, or run it, before any feature is installed.
    executors: by class, a function from the runner to a `StepExecutor`, which runs certain steps faster, or
        to None if this engine has none. They are asked in the order of their classes' `order`.
    reservations: functions that return how many bytes to leave free; called when all features are in.
    prefetchers: called with the works of the next step (each: one request's tokens) while the host waits
        for the masks of grammars.
    warmups: called with the finished engine.

    default_block_size, default_step_tokens: sizes where the caller asks for none.
    model: the loaded model; exists when features are installed. See `own_model`.
    """

    model: Model

    def __init__(self, recipe: Recipe) -> None:
        features = sorted(recipe.features, key=lambda feature: feature.phase)
        names = [feature.name for feature in features]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"{name} is given twice")
        self.recipe = replace(recipe, features=tuple(features))
        self.assemble: Slot[Callable[[EngineBuilder], PagedEngine]] = Slot("engine", assemble)
        self.load: Slot[Callable[[EngineBuilder], Model]] = Slot("load", load)
        self.weight_loader: Slot[WeightLoader | None] = Slot("weight_loader", None)
        self.memory_plan: Slot[Callable[[EngineBuilder], MemoryPlan]] = Slot(
            "memory_plan", plan_memory
        )
        self.kv: Slot[KVFormat] = Slot("kv", KVFormat())
        self.pool: Slot[Callable[..., BlockPool]] = Slot("pool", BlockPool)
        self.cache: Slot[Callable[..., PagedCache]] = Slot("cache", PagedCache)
        self.attention: Slot[Callable[[BlockPool], PagedAttention]] = Slot(
            "attention", TorchPagedAttention
        )
        self.runner: Slot[Callable[..., PagedRunner]] = Slot("runner", PagedRunner)
        self.scheduler: Slot[Callable[..., PagedScheduler]] = Slot("scheduler", PagedScheduler)
        self.verifier: Slot[Callable[[RequestRows], OutputVerifier]] = Slot(
            "verifier", lambda rows: ONE_TOKEN_EACH
        )
        self.sampler_backend: Slot[SamplerBackend] = Slot("sampler_backend", TORCH)
        self.drafter: Slot[Drafter] = Slot("drafter", NO_DRAFTS)
        self.grammar_manager: Slot[GrammarManager] = Slot(
            "grammar_manager", NO_GRAMMAR_MANAGER
        )
        self.loop: Slot[Loop] = Slot("loop", SEQUENTIAL_LOOP)
        self.on_step_failed: Slot[Callable[[BaseException], None]] = Slot(
            "on_step_failed", lambda error: None
        )
        self.surgeries: list[Callable[[EngineBuilder], None]] = []
        self.executors: dict[type[StepExecutor], Callable[..., StepExecutor | None]] = {}
        self.reservations: list[Callable[[EngineBuilder], int]] = []
        self.prefetchers: list[Callable[[Sequence[Work]], object]] = []
        self.warmups: list[Callable[[PagedEngine], None]] = []
        self.default_block_size = 16
        self.default_step_tokens: int | None = None

    def feature(self, kind: type[F]) -> F | None:
        """Return this engine's feature of the class `kind`, or None if it is off."""
        return find(self.recipe.features, kind)

    def own_model(self) -> Model:
        """Return the engine's model for a feature that will replace its layers.

        A model that the caller loaded is first copied, with the weights shared, so that it stays as it is.
        """
        if self.model is self.recipe.model:
            self.model = clone(self.model)
        return self.model

    # Sizes: what the caller asked for, or the default with these features.

    @property
    def max_rows(self) -> int:
        """Return the most requests that run at a time."""
        return self.recipe.sizes.max_rows or MAX_ROWS

    @property
    def max_len(self) -> int:
        """Return the most tokens of a request, prompt and output."""
        return self.recipe.sizes.context(self.model)

    @property
    def block_size(self) -> int:
        """Return how many tokens a KV cache block holds."""
        return self.recipe.sizes.block_size or self.default_block_size

    @property
    def step_tokens(self) -> int:
        """Return the most tokens that a step computes."""
        default = self.default_step_tokens or max(STEP_TOKENS, self.max_len)
        return self.recipe.sizes.step_tokens or default


def build(recipe: Recipe) -> PagedEngine:
    """Return an engine with the model, sizes and features of a recipe; earlier phases' features come first.

    Raises:
        UserError: features that do not go together, or sizes that do not fit.
    """
    builder = EngineBuilder(recipe)
    for feature in builder.recipe.features:
        for kind in feature.needs:
            if builder.feature(kind) is None:
                raise UserError(f"{feature.name} is on, but needs {kind.name}, which is off")
        feature.configure_load(builder)
    return builder.assemble.part(builder)


def assemble(builder: EngineBuilder) -> PagedEngine:
    """Load the model, install the features, divide the memory, and return the engine made of the parts.

    builder: the parts; no feature is installed yet.
    """
    builder.model = builder.load.part(builder)
    for surgery in builder.surgeries:
        surgery(builder)
    for feature in builder.recipe.features:
        feature.install(builder)
    model = builder.model
    memory_plan = builder.memory_plan.part(builder)
    blocks, block_size = memory_plan.blocks, memory_plan.block_size
    rows = RequestRows(builder.max_rows, builder.max_len, model.device)
    cache = builder.cache.part(rows.count, rows.max_len, blocks, block_size)
    pool = builder.pool.part(
        model.config,
        blocks,
        block_size,
        device=model.device,
        dtype=model.dtype,
        kv=builder.kv.part,
    )
    runner = builder.runner.part(
        model,
        builder.attention.part(pool),
        rows,
        cache,
        sampler_backend=builder.sampler_backend.part,
        verifier=builder.verifier.part(rows),
        executors=[
            builder.executors[kind]
            for kind in sorted(builder.executors, key=attrgetter("order"))
        ],
    )
    scheduler = builder.scheduler.part(
        rows,
        cache,
        step_tokens=builder.step_tokens,
        policy=POLICIES[builder.recipe.sizes.policy],
        drafter=builder.drafter.part,
    )
    engine = PagedEngine(
        scheduler,
        runner,
        builder.recipe.tokenizer,
        grammar_manager=builder.grammar_manager.part,
        loop=builder.loop.part,
        on_step_failed=builder.on_step_failed.part,
        memory_plan=memory_plan,
    )
    for warm_up in builder.warmups:
        warm_up(engine)
    return engine


def load(builder: EngineBuilder) -> Model:
    """Return the model of `builder.recipe`, loaded from its files unless the recipe has a loaded one."""
    asked = builder.recipe
    return load_model(
        asked.model,
        device=asked.device,
        dtype=asked.dtype,
        weight_loader=builder.weight_loader.part,
    )


def plan_memory(builder: EngineBuilder) -> MemoryPlan:
    """Return a `MemoryPlan` with as many KV cache blocks as fit beside weights and activations.

    builder: its model, sizes and reservations are used.
    """
    sizes = builder.recipe.sizes
    return plan_cache(
        builder.model,
        block_size=builder.block_size,
        step_tokens=builder.step_tokens,
        rows=builder.max_rows,
        max_len=builder.max_len,
        kv=builder.kv.part,
        cache_bytes=sizes.cache_bytes,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        reserved=sum(bytes_of(builder) for bytes_of in builder.reservations),
    )

"""From a recipe to an engine: slots that hold the parts, and the order in which they are made.

Every part of an engine has a slot, with a type and this phase's part in it. A feature's `install` replaces
the part in a slot, or decorates it. What there may be several of is a list or, for executors, one of a kind.
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

    name: for error messages. part: what will be used.
    owner: the name of the first feature that changed it; empty while it is this phase's part.
    """

    def __init__(self, name: str, part: T) -> None:
        self.name, self.part = name, part
        self.owner = ""

    def replace(self, feature: Feature, part: T) -> None:
        """Store `part` instead, on behalf of `feature`.

        Raises:
            UserError: another feature has replaced the part already.
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

    assemble: makes the engine. load: the model. weight_loader: how linear layers keep their weights while
        it is loaded. memory_plan: how many blocks there are.
    kv: how keys and values are stored.
    pool, cache, attention, runner, scheduler: called to make each of them.
    verifier: makes the `OutputVerifier`, which decides which sampled tokens a request gets.
    sampler_backend, drafter, grammar_manager, loop, on_step_failed: see `Engine`.

    surgeries: changes of a model's layers before any feature is installed.
    executors: by class, a function from the runner to a `StepExecutor`, which runs certain steps faster, or
        to None if there is none here. They are asked in the order of their classes' `order`.
    reservations: asked after all features are installed how many bytes to leave free.
    prefetchers: called with the works of the next step while the host waits for masks.
    warmups: called with the finished engine.
    default_block_size, default_step_tokens: sizes where the caller says nothing.

    model: there when features are installed; see `own_model`.
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
        """Return a model whose layers a feature may replace; a caller's model is copied first, with the
        same weights.
        """
        if self.model is self.recipe.model:
            self.model = clone(self.model)
        return self.model

    # Sizes: what the caller asked for, or the default with these features.

    @property
    def max_rows(self) -> int:
        """Return how many requests run at a time, at most."""
        return self.recipe.sizes.max_rows or MAX_ROWS

    @property
    def max_len(self) -> int:
        """Return the most tokens of a request."""
        return self.recipe.sizes.context(self.model)

    @property
    def block_size(self) -> int:
        """Return the tokens in a block."""
        return self.recipe.sizes.block_size or self.default_block_size

    @property
    def step_tokens(self) -> int:
        """Return the most tokens that a step computes."""
        default = self.default_step_tokens or max(STEP_TOKENS, self.max_len)
        return self.recipe.sizes.step_tokens or default


def build(recipe: Recipe) -> PagedEngine:
    """Return an engine with the model, sizes and features of a recipe, installed in the order of their
    phases.

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
    """Load the model, install the features, divide the memory, and return the engine made of the parts."""
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
    """Return the recipe's model, loaded from its files unless the caller has loaded it."""
    asked = builder.recipe
    return load_model(
        asked.model,
        device=asked.device,
        dtype=asked.dtype,
        weight_loader=builder.weight_loader.part,
    )


def plan_memory(builder: EngineBuilder) -> MemoryPlan:
    """Return the division of the memory: as many KV cache blocks as fit beside weights and activations."""
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

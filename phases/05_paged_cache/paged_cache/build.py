"""From a model and features to an engine, in stages: load, install, plan, make, and what features add."""

from __future__ import annotations

from dataclasses import replace

from continuous.policies import POLICIES
from continuous.rows import RequestRows
from forward.loading import load_model
from paged_cache.builder import EngineBuilder, PagedEngine, Recipe
from paged_cache.memory import plan_cache


def build(recipe: Recipe) -> PagedEngine:
    """Make an engine, with the features in the order of their phases.

    Raises:
        UserError: features that do not go together, or sizes that do not fit.
    """
    ordered = tuple(sorted(recipe.features, key=lambda feature: feature.phase))
    builder = EngineBuilder(replace(recipe, features=ordered))
    builder.stages = {
        "load": [load],
        "install": [install],
        "plan": [plan],
        "make": [make],
        "connect": [],  # what features have brought meets the engine
        "rehearse": [],  # the engine gets ready for its first request
    }
    for feature in ordered:
        feature.prepare(builder)
    for calls in builder.stages.values():
        for call in calls:
            call(builder)
    return builder.engine


def load(builder: EngineBuilder) -> None:
    """Load the model, or borrow one that is loaded."""
    asked = builder.recipe
    builder.model = load_model(
        asked.model,
        device=asked.device,
        dtype=asked.dtype,
        weight_loader=builder.weight_loader,
    )
    builder.borrowed = builder.model is asked.model


def install(builder: EngineBuilder) -> None:
    """Let each feature change the parts."""
    for feature in builder.recipe.features:
        builder.add(feature)
        feature.install(builder)


def plan(builder: EngineBuilder) -> None:
    """Divide the memory: as many blocks as fit."""
    sizes, length = builder.sizes, builder.sizes.context(builder.model)
    builder.defaults.setdefault("step_tokens", max(2048, length))
    builder.memory_plan = plan_cache(
        builder.model,
        block_size=builder.size("block_size"),
        step_tokens=builder.size("step_tokens"),
        rows=builder.size("max_rows"),
        max_len=length,
        kv=builder.kv,
        cache_bytes=sizes.cache_bytes,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        reserved=sum(ask(builder) for ask in builder.reserve),
    )


def make(builder: EngineBuilder) -> None:
    """Make the parts, and the engine of them."""
    model = builder.model
    memory_plan = builder.memory_plan
    sizes = builder.sizes
    max_rows, length = builder.size("max_rows"), sizes.context(model)
    rows = RequestRows(max_rows, length, model.device)
    cache = builder.cache(max_rows, length, memory_plan.blocks, memory_plan.block_size)
    scheduler = builder.scheduler(
        rows, cache, step_tokens=builder.size("step_tokens"), policy=POLICIES[sizes.policy]
    )
    scheduler.drafter = builder.drafter
    pool = builder.pool(
        model.config,
        memory_plan.blocks,
        memory_plan.block_size,
        device=model.device,
        dtype=model.dtype,
        kv=builder.kv,
    )
    runner = builder.runner(
        model, builder.attention(pool), rows, cache, sampler_backend=builder.sampler_backend
    )
    builder.engine = engine = PagedEngine(
        scheduler, runner, builder.recipe.tokenizer, masks=builder.masks
    )
    engine.memory_plan = memory_plan
    for loop in builder.loops.values():
        engine.loop = loop(engine)

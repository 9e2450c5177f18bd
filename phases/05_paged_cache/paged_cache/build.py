"""From a model and features to an engine, in stages: load, install, plan, make, and what features add."""

from __future__ import annotations

from dataclasses import replace

from continuous.policies import POLICIES
from continuous.rows import Rows
from forward.loading import load_model
from paged_cache.memory import plan_cache
from paged_cache.parts import PagedEngine, Parts, Recipe


def build(recipe: Recipe) -> PagedEngine:
    """Make an engine, with the features in the order of their phases.

    Raises:
        UserError: features that do not go together, or sizes that do not fit.
    """
    ordered = tuple(sorted(recipe.features, key=lambda feature: feature.phase))
    parts = Parts(replace(recipe, features=ordered))
    parts.stages = {
        "load": [load],
        "install": [install],
        "plan": [plan],
        "make": [make],
        "connect": [],  # what features have brought meets the engine
        "rehearse": [],  # the engine gets ready for its first request
    }
    for feature in ordered:
        feature.prepare(parts)
    for calls in parts.stages.values():
        for call in calls:
            call(parts)
    return parts.engine


def load(parts: Parts) -> None:
    """Load the model, or borrow one that is loaded."""
    asked = parts.recipe
    parts.model = load_model(asked.model, device=asked.device, dtype=asked.dtype, linears=parts.linears)
    parts.borrowed = parts.model is asked.model


def install(parts: Parts) -> None:
    """Let each feature change the parts."""
    for feature in parts.recipe.features:
        parts.add(feature)
        feature.install(parts)


def plan(parts: Parts) -> None:
    """Divide the memory: as many blocks as fit."""
    sizes, length = parts.sizes, parts.sizes.context(parts.model)
    parts.usual.setdefault("step_tokens", max(2048, length))
    parts.ledger = plan_cache(
        parts.model,
        block_size=parts.size("block_size"),
        step_tokens=parts.size("step_tokens"),
        rows=parts.size("max_rows"),
        max_len=length,
        kv=parts.kv,
        cache_bytes=sizes.cache_bytes,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        reserved=sum(ask(parts) for ask in parts.reserve),
    )


def make(parts: Parts) -> None:
    """Make the parts, and the engine of them."""
    model, ledger, sizes = parts.model, parts.ledger, parts.sizes
    max_rows, length = parts.size("max_rows"), sizes.context(model)
    rows = Rows(max_rows, length, model.device)
    cache = parts.cache(max_rows, length, ledger.blocks, ledger.block_size)
    scheduler = parts.scheduler(
        rows, cache, step_tokens=parts.size("step_tokens"), policy=POLICIES[sizes.policy]
    )
    scheduler.drafter = parts.drafter
    pool = parts.pool(
        model.config, ledger.blocks, ledger.block_size, device=model.device, dtype=model.dtype, kv=parts.kv
    )
    runner = parts.runner(model, parts.attention(pool), rows, cache, chooser=parts.chooser)
    parts.engine = engine = PagedEngine(scheduler, runner, parts.recipe.tokenizer, masks=parts.masks)
    engine.ledger = ledger
    for loop in parts.loops.values():
        engine.loop = loop(engine)

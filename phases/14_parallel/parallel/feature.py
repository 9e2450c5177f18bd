"""Tensor parallel as a feature of an engine."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from common.device import pick_device
from common.errors import UserError, integer
from common.options import option
from continuous.seams import NO_DRAFTS, NO_GRAMMAR_MANAGER
from forward.loading import config_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedEngine, Recipe, build
from parallel import engine as engines
from parallel import worker_group
from parallel.launch import part, rendezvous
from parallel.loading import load_part
from parallel.messages import BroadcastChannel, Build, Rehearsed
from parallel.ranks import Ranks, graphs_of
from parallel.replicated import (
    BroadcastProposer,
    RankZeroGrammarManager,
    ReplicatedProposer,
    WorkerGrammarManager,
)
from parallel.sampler import RankSamplerBackend
from parallel.shard import Shard
from parallel.worker_group import WorkerGroup
from speculative import Speculate

MOST_RANKS = 64


@dataclass(frozen=True)
class Parallel(Feature):
    """The model is split over GPUs of one host, or over processes of a CPU."""

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    tensor_parallel: int = option(
        1, "GPUs (or processes) that share the model's heads, MLP and vocabulary"
    )
    rank_check: int = option(
        100, "steps from one comparison of what the ranks have done to the next"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        integer("tensor_parallel", self.tensor_parallel, low=1, high=MOST_RANKS)
        integer("rank_check", self.rank_check, low=1)

    def prepare(self, builder: EngineBuilder) -> None:
        """With several ranks, one stage makes all of them: each goes through the usual stages by itself."""
        if self.tensor_parallel > 1:
            builder.stages = {"lead": [self._lead]}

    def _lead(self, builder: EngineBuilder) -> None:
        """Make the engine of rank 0, with the other ranks behind it."""
        device = self.check(builder.recipe)
        workers = worker_group.take(self.tensor_parallel)
        try:
            with workers.awaited():
                builder.engine = lead(builder.recipe, device, workers)
        except BaseException:
            workers.kill()
            raise

    def check(self, recipe: Recipe) -> torch.device:
        """Rank 0's device. Raises `UserError` for what cannot be done, before anything is started."""
        size = self.tensor_parallel
        if isinstance(recipe.model, Model):
            raise UserError(
                f"tensor_parallel is {size}, so model must be a name: every rank loads its part"
            )
        config = config_of(str(recipe.model))
        if config.family == "gpt2":
            raise UserError(
                f"tensor_parallel is {size}, but gpt2 is not cut: q, k and v are one matrix"
            )
        if any(
            isinstance(one, Speculate) and one.drafter == "head" for one in recipe.features
        ):
            raise UserError(
                f"tensor_parallel is {size}, but drafter 'head' reads a whole vocabulary: take another"
            )
        Shard(0, size).config(config)
        device = pick_device(recipe.device)
        if device.type == "mps":
            raise UserError(
                f"tensor_parallel is {size}, but device 'mps' is one GPU: take 'cpu' or 'cuda'"
            )
        first = device.index or 0
        if device.type == "cuda" and torch.cuda.device_count() < first + size:
            raise UserError(
                f"tensor_parallel is {size}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here"
            )
        return torch.device("cuda", first) if device.type == "cuda" else device

    def install(self, builder: EngineBuilder) -> None:
        """One rank is an engine as it was."""


def lead(recipe: Recipe, device: torch.device, workers: WorkerGroup) -> PagedEngine:
    """Rank 0's engine; the others make theirs meanwhile."""
    ranks = rendezvous(workers, device)
    tokenizer = None if recipe.tokenizer is None else str(recipe.tokenizer.folder)
    workers.tell(Build(replace(recipe, tokenizer=None, device=str(device)), tokenizer))
    try:
        engine = own_engine(recipe, ranks, recipe.tokenizer, workers=workers)
    except RuntimeError:
        workers.check(patient=True)
        raise
    assert isinstance(engine.loop, engines.RankZeroLoop)
    engine.loop.release = weakref.finalize(engine, part, workers, ranks, graphs_of(engine))
    workers.check()
    return engine


def own_engine(
    recipe: Recipe,
    ranks: Ranks,
    tokenizer: Any,
    workers: WorkerGroup | None = None,
    line: BroadcastChannel | None = None,
) -> PagedEngine:
    """Make a rank's own engine. crew: on rank 0; line: on all others."""
    own: list[Feature] = []
    for feature in recipe.features:
        if isinstance(feature, Parallel):
            own.append(Split(feature, ranks, workers, line))
        elif isinstance(feature, Speculate):
            guesses = SplitSpeculate(**vars(feature))
            if (
                ranks.rank and feature.drafter == "model"
            ):  # which is rank 0's alone; here no drafter is asked
                guesses = replace(
                    guesses, drafter="ngram", draft_model=None, draft_length=feature.length
                )
            own.append(guesses)
        else:
            own.append(feature)
    return build(
        replace(recipe, features=tuple(own), device=str(ranks.device), tokenizer=tokenizer)
    )


@dataclass(frozen=True)
class SplitSpeculate(Speculate):
    """`Speculate` inside a rank's own engine: rank 0 guesses, on the host; a graph would on all ranks."""

    whole: ClassVar[bool] = False


@dataclass(frozen=True)
class Split(Feature):
    """`Parallel` inside a rank's own engine; it is no option.

    crew: the others, on rank 0. line: to rank 0, on all others.
    """

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    options: Parallel
    ranks: Ranks
    workers: WorkerGroup | None = None
    line: BroadcastChannel | None = None

    def prepare(self, builder: EngineBuilder) -> None:
        """Every rank loads its part, and has as many blocks as the one with the least room."""
        builder.stages["load"] = [self._load]
        builder.stages["plan"].append(self._agree)

    def _load(self, builder: EngineBuilder) -> None:
        asked = builder.recipe
        builder.model = load_part(
            asked.model,
            device=asked.device,
            dtype=asked.dtype,
            weight_loader=builder.weight_loader,
            ranks=self.ranks,
        )

    def install(self, builder: EngineBuilder) -> None:
        """Layers that add up, tokens chosen over ranks, and a loop that leads or follows."""
        ranks, model = self.ranks, builder.model
        kind: type[RankSamplerBackend] = RankSamplerBackend
        if getattr(builder.features.get("graphs"), "sampling", "") == "triton":
            from parallel.reduce_argmax import TritonRankSamplerBackend  # Triton comes with it

            kind = TritonRankSamplerBackend
        builder.decorate(
            self, sampler_backend=lambda inner: kind(ranks, inner, model.config.vocab_size)
        )
        if (
            "graphs" in builder.features
        ):  # where a step is masked, rank 0 tells the others what it has chosen
            builder.plans.pop("masked", None)
            # Graphs of full steps have not been tried in ranks: NCCL's sums would be in them.
            builder.plans["chunks"] = partial(builder.plans["chunks"], step_tokens=lambda: 0)
        about = (model.config.vocab_size, model.device)
        workers = self.workers
        line = self.line
        builder.loops["ranks"] = self._loop
        if builder.drafter is not NO_DRAFTS:
            builder.decorate(
                self,
                drafter=lambda own: (
                    BroadcastProposer(own) if line is None else ReplicatedProposer(line)
                ),
            )
        if builder.masks is not NO_GRAMMAR_MANAGER and workers is not None:
            builder.decorate(
                self, masks=lambda own: RankZeroGrammarManager(own, workers, *about)
            )
        elif builder.masks is not NO_GRAMMAR_MANAGER and line is not None:
            builder.decorate(self, masks=lambda own: WorkerGrammarManager(line, *about))
        if workers is None:  # it follows what rank 0 plays when it is made
            builder.stages["rehearse"] = []
        elif builder.stages["rehearse"]:
            builder.stages["rehearse"].append(lambda whole: workers.tell(Rehearsed()))

    def _loop(self, engine: PagedEngine) -> engines.RankZeroLoop | engines.WorkerLoop:
        """Rank 0's loop, or another's, around what it has without ranks."""
        made: engines.RankZeroLoop | engines.WorkerLoop
        drafter = engine.scheduler.drafter
        if self.workers is not None:
            teller = drafter if isinstance(drafter, BroadcastProposer) else None
            made = engines.RankZeroLoop(
                engine.loop, self.workers, self.options.rank_check, teller
            )
        else:
            assert self.line is not None
            made = engines.WorkerLoop(engine.loop, self.line, self.options.rank_check)
        engine.observer = made
        return made

    def _agree(self, builder: EngineBuilder) -> None:
        """Take as many blocks as there are on the rank that has room for the fewest."""
        memory_plan = builder.memory_plan
        blocks = self.ranks.smallest(memory_plan.blocks)
        builder.memory_plan = replace(
            memory_plan, blocks=blocks, cache=memory_plan.cache // memory_plan.blocks * blocks
        )
